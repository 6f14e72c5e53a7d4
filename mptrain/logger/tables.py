"""Tables of texts that a run exhibits, as trackers want them."""

from __future__ import annotations

import csv
from pathlib import Path


def read_table(path: Path) -> list[list[str]]:
    """The rows of a TSV file; the first names the columns.

    A run does not end because its tracker cannot be shown a text: of a table without rows, or with a text longer than Python's
    reader of tables takes (131,072 letters), one row says so. Bytes that are no UTF-8 are replaced.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.reader(file, dialect="excel-tab"))
    except csv.Error as error:
        return [["table"], [f"{path.name} cannot be shown: {error}"]]
    return rows or [["table"], [f"{path.name} is empty"]]


def markdown_table(path: Path) -> str:
    """A TSV file as a table of Markdown, in which every text stays what it is."""
    columns, *rows = [[_cell(text) for text in row] for row in read_table(path)]
    return "\n".join(_row(cells) for cells in (columns, ["---"] * len(columns), *rows))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    special = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|<>"})
    return " ".join(text.split()).translate(special)
