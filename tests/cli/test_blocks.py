"""Tables on narrow terminals: every number is whole, and what found no room is named."""

from __future__ import annotations

import io
import sys

import pytest

from mptrain.cli.blocks import block_lines
from mptrain.report.page import Bullets, Fold, Plots, Text, Tiles, facts, section, table
from mptrain.study.commands.compare import print_comparison
from mptrain.study.comparison.compare_arms import compare
from mptrain.study.pages.comparison_blocks import difference_and_interval
from tests.study.comparison.fake_runs import arm


class Tty(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch, width, **environment):
    """Make standard output a terminal of so many columns, and return what is written to it."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": str(width), **environment}.items():
        monkeypatch.setenv(name, value)
    stream = Tty()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


TABLE = table(
    ("arm", "change in top1", "samples/s", "skipped"),
    [("fp32", "\u2013", "12,345", "0 %"), ("fp16_dynamic", "\u22120.0017 [\u22120.0362, +0.0329]", "123,456", "7 %")],
    numeric=(1, 2, 3),
    note="A note.",
    optional=("samples/s", "skipped"),
)


@pytest.mark.parametrize(
    ("width", "whole", "left_out"),
    [
        (80, ["fp16_dynamic  -0.0017 [-0.0362, +0.0329]    123,456      7 %"], None),
        (55, ["-0.0017    123,456      7 %", "              [-0.0362, +0.0329]"], None),
        (45, ["-0.0017      7 %", "              [-0.0362, +0.0329]"], "not shown: samples/s"),
        (34, ["-0.0017", "              [-0.0362, +0.0329]"], "not shown: samples/s, skipped"),
    ],
)
def test_cells_are_broken_before_brackets_then_the_least_important_columns_are_left_out(
    monkeypatch, width, whole, left_out
):
    on_terminal(monkeypatch, width, NO_COLOR="1")
    *lines, blank, note = block_lines([TABLE])
    assert max(map(len, lines)) <= width
    assert all(any(part in line for line in lines) for part in whole), lines
    assert (lines[-1] if "not shown" in lines[-1] else None) == left_out
    assert (blank, note) == ("", "A note.")


def test_blocks_have_empty_lines_between_them_and_what_a_terminal_cannot_show_has_none(monkeypatch):
    on_terminal(monkeypatch, 80, NO_COLOR="1")
    hidden = (Fold("more", (Text("folded"),)), Plots(()))
    blocks = (Text("one \u00d7 two"), None, *hidden, facts(("name", "text"), ("none", "")), Bullets(("a", "b"), "bad"))
    assert block_lines(blocks) == ["one x two", "", "name: text", "", "- a", "- b"]
    assert block_lines([section("Title", Tiles((("step", "3", "of the critic"), ("loss", "0.5", ""))), *hidden)]) == [
        "Title",
        "step 3 of the critic, loss 0.5",
    ]
    assert block_lines([section("Title", *hidden)]) == []


def test_a_comparison_on_80_columns_has_whole_verdicts_and_intervals(monkeypatch):
    terminal = on_terminal(monkeypatch, 80, NO_COLOR="1")
    comparison = compare([arm("fp32", [0.95, 0.94, 0.96]), arm("amp_dynamic", [0.92, 0.95, 0.99])])
    print_comparison(comparison)
    shown = terminal.getvalue().partition("\n\n")[0]
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    interval = difference_and_interval(comparison.arms[1].difference).replace("\u2212", "-")
    for part in ("reference", "undecided", "amp_dynamic", interval.partition(" ")[2]):
        assert part in shown


@pytest.mark.parametrize(("environment", "styled"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, True)])
def test_what_is_bold_is_plain_where_no_colours_are_wanted(monkeypatch, environment, styled):
    terminal = on_terminal(monkeypatch, 120, **environment)
    print_comparison(compare([arm("fp32", [0.95] * 3), arm("amp_dynamic", [0.95] * 3)]))
    assert ("\x1b[1m" in terminal.getvalue()) is styled
    assert "\\x1b" not in terminal.getvalue()


def test_a_long_table_has_a_line_for_each_row_and_a_short_one_is_broken(monkeypatch):
    on_terminal(monkeypatch, 40, NO_COLOR="1")
    wide = "\u4e2d" * 30
    rows = [(f"run {number}", "12", wide) for number in range(600)]
    long, short = (table(("name", "steps", "text"), part, numeric=(1,)) for part in (rows, rows[:5]))
    lines = block_lines([long])
    assert len(lines) == 601
    assert lines[0] == "name     steps  text"
    assert lines[7] == f"run 6       12  {wide}"
    assert len(block_lines([short])) > 6
