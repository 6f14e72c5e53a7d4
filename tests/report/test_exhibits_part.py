"""Which of a run's samples its report shows."""

from __future__ import annotations

from types import SimpleNamespace

from mptrain.report.exhibits_part import exhibits
from mptrain.report.page import Picture, Table, Text

PNG = b"\x89PNG\r\n\x1a\n"


def shown(tmp_path):
    return exhibits(SimpleNamespace(paths=SimpleNamespace(samples=tmp_path)))


def test_the_newest_is_that_of_the_latest_step_not_of_the_last_name(tmp_path):
    for step in (999_999, 1_000_000, 60):
        (tmp_path / f"drawn-{step:06d}.png").write_bytes(PNG)
    (picture,) = shown(tmp_path)
    assert isinstance(picture, Picture)
    assert picture.file.endswith("drawn-1000000.png")
    assert picture.caption == "drawn after step 1,000,000"


def test_a_table_that_cannot_be_read_is_left_out(tmp_path):
    (tmp_path / "long-000001.tsv").write_text("text\n" + "x" * 200_000)
    (tmp_path / "said-000001.tsv").write_text("text\nhello\n")
    words, table = shown(tmp_path)
    assert (type(words), words.text) == (Text, "said after step 1:")
    assert (type(table), table.head) == (Table, ("text",))
