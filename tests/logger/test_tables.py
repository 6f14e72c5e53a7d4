"""Tables of texts as trackers want them."""

from __future__ import annotations

import pytest

from mptrain.logger.tables import markdown_table, read_table


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "transcripts-000010.tsv"
    path.write_text('reference\tmodel\none\t"two\nlines"\n', encoding="utf-8")
    assert read_table(path) == [["reference", "model"], ["one", "two\nlines"]]
    assert markdown_table(path).splitlines() == ["| reference | model |", "| --- | --- |", "| one | two lines |"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"model\n" + 131073 * b"a" + b"\n", "cannot be shown: field larger"), (b"", "is empty")],
    ids=["too long", "empty"],
)
def test_of_a_table_that_cannot_be_read_one_row_says_so(tmp_path, content, said):
    path = tmp_path / "continuations-000010.tsv"
    path.write_bytes(content)
    columns, row = read_table(path)
    assert len(columns) == len(row) == 1
    assert row[0].startswith(f"{path.name} {said}")
    assert said in markdown_table(path)


def test_letters_that_are_no_utf8_are_replaced(tmp_path):
    path = tmp_path / "translations-000010.tsv"
    path.write_bytes(b"model\nGr\xfc\xdfe\n")
    assert read_table(path) == [["model"], ["Gr\ufffd\ufffde"]]
