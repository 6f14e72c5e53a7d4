"""Tables of texts that a run exhibits, as trackers want them."""

from __future__ import annotations

import csv
from pathlib import Path


def read_table(path: Path) -> list[list[str]]:
    """The rows of a TSV file; the first names the columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, dialect="excel-tab"))


def markdown_table(path: Path) -> str:
    """A TSV file as a table of Markdown, in which every text stays what it is."""
    columns, *rows = [[_cell(text) for text in row] for row in read_table(path)]
    return "\n".join(_row(cells) for cells in (columns, ["---"] * len(columns), *rows))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    special = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|<>"})
    return " ".join(text.split()).translate(special)
