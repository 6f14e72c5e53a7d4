"""Objects that show themselves: short text that a terminal can print, and HTML in which every name is escaped."""

from __future__ import annotations

from mptrain.report.notebook import Shown, first_rows
from mptrain.report.page import Bullets, Cell, Text, facts, table
from tests.loops import each
from tests.report.folders import HOSTILE


class Some(Shown):
    def __init__(self, *blocks):
        self.given = blocks

    def blocks(self):
        return self.given


def test_text_is_aligned_short_and_without_optional_columns():
    shown = table(("name", "n", "more"), [("a", "1", "x"), ("b" * 60, "12,345", "y")], (1,), "note", ("more",))
    long = "c" * 500
    lines = repr(
        Some(shown, facts(("fact", "value")), Bullets((long,)), Bullets((long,), "warn"), Text("text"))
    ).splitlines()
    assert lines[:3] == [f"name{' ' * 43}n", f"a{' ' * 46}1", f"{'b' * 26}…{'b' * 13}  12,345"]
    assert lines[3:5] == ["note", "fact: value"]
    assert max(map(len, lines)) == 120
    assert "".join(lines[5:]).count("c") == 399 + 500  # a warning is shown whole
    assert lines[-1] == "text"


def test_a_long_sentence_ends_at_a_word():
    words = " ".join(f"word{at:03d}" for at in range(100))
    assert repr(Some(Text(words))) == f"{words[:399]}…"
    assert repr(Some(facts(("fact", f"x {words}")))) == f"fact: x {words[:391]}…"
    assert repr(Some(Text(words[1:400] + "."))) == words[1:400] + "."


@each("text", [text for text in HOSTILE if text.strip()])
def test_whatever_a_name_contains_is_neither_markup_nor_a_control_character(text):
    some = Some(table((text,), [(Cell(text),)], note=text), facts((text, text)), Bullets((text,)), Text(text))
    assert all(letter.isprintable() or letter == "\n" for letter in repr(some))
    page = some._repr_html_()
    assert page.count("<") == Some(
        table(("a",), [("b",)], note="c"), facts(("d", "e")), Bullets(("f",)), Text("g")
    )._repr_html_().count("<")


def test_secrets_are_masked(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    some = Some(Text("run.name=hunter2hunter2"))
    assert repr(some) == "run.name=${oc.env:MY_TOKEN}"
    assert "hunter2" not in some._repr_html_()


def test_rows_beyond_a_dozen_are_counted():
    rows = [(f"{at}",) for at in range(15)]
    assert first_rows(table(("n",), rows), "runs").note == "... and 3 more runs"
    assert first_rows(table(("n",), rows[:12]), "runs") == table(("n",), rows[:12])
