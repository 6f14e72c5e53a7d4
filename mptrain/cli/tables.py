"""Tables for terminals of any width: wide ones are broken at marked spaces, then columns are omitted.

Numbers must never be truncated.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from mptrain.cli.messages import supports_colour

#: Marks a space at which a title or cell may be broken if the terminal is narrow.
BREAK = "\v"

#: Line width in characters that is enough for every table.
_UNLIMITED = 100_000


@dataclass(frozen=True)
class Column:
    """Column of a terminal table: a title and cells in rich's markup, which may contain `BREAK`.

    Attributes:
        title: Title, possibly of several lines.
        cells: Cells from top to bottom.
        importance: Rank among the columns that a narrow terminal omits, the lowest number first; None for a column that
            is never omitted.
        name: Name of the column in the list of omitted columns; empty for its title.
        is_text: Whether to align the cells left and to fold them as a last resort.
    """

    title: str
    cells: tuple[str, ...]
    importance: int | None = None
    name: str = ""
    is_text: bool = False


def columns_of(titles: Sequence[str], rows: Iterable[Sequence[str]], numeric: Collection[str] = ()) -> list[Column]:
    """Convert the rows of a terminal table to columns.

    Args:
        titles: Titles of the columns.
        rows: Rows from top to bottom, with one cell per title.
        numeric: Titles of the columns with numbers, which are right-aligned.
    """
    cells = list(zip(*rows, strict=True)) or [()] * len(titles)
    return [Column(title, column, is_text=title not in numeric) for title, column in zip(titles, cells, strict=True)]


def capture(piped_width: int, *parts: RenderableType, least_width: int = 0) -> list[str]:
    """Render rich renderables to lines of text for standard output, with colours if it supports them.

    Args:
        piped_width: Line width in characters if standard output is not a terminal.
        parts: Renderables from top to bottom.
        least_width: Minimum line width in characters.
    """
    console = _console(piped_width)
    console.width = max(console.width, least_width)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return [line.rstrip() for line in captured.get().splitlines()]


def render_table(columns: Sequence[Column], piped_width: int, least_gap: int = 2) -> list[str]:
    """Render a table to lines of text that fit the terminal; the last line lists the omitted columns, if any.

    Args:
        columns: Columns from left to right.
        piped_width: Line width in characters if standard output is not a terminal.
        least_gap: Number of spaces between columns if the table does not fit with two.
    """
    console = _console(piped_width)
    unlimited = console.options.update(max_width=_UNLIMITED)

    def size() -> Measurement:
        return Measurement.get(console, unlimited, _table(shown, gap))

    for blank, between in ((" ", 2), (" ", least_gap), ("\n", least_gap)):
        shown, gap = _broken(columns, blank), between
        if size().maximum <= console.width:
            break
    left_out: list[str] = []
    while size().maximum > console.width and (optional := [one for one in shown if one.importance is not None]):
        least = min(reversed(optional), key=lambda column: column.importance or 0)
        left_out.append(least.name or " ".join(least.title.split()))
        shown.remove(least)
    lines = capture(piped_width, _table(shown, gap), least_width=size().minimum)
    return [*lines, f"not shown: {', '.join(left_out)}"] if left_out else lines


def _console(piped_width: int) -> Console:
    styled = supports_colour(sys.stdout)
    return Console(width=None if sys.stdout.isatty() else piped_width, no_color=not styled, force_terminal=styled)


def _broken(columns: Sequence[Column], blank: str) -> list[Column]:
    def replaced(text: str) -> str:
        return text.replace(BREAK, blank)

    return [replace(one, title=replaced(one.title), cells=tuple(map(replaced, one.cells))) for one in columns]


def _table(columns: Sequence[Column], gap: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for column in columns:
        text = column.is_text
        table.add_column(column.title, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table
