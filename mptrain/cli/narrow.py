"""Tables on a terminal that may be too narrow for them: cells are broken where they say, then columns are left out.

No number is ever cut.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from mptrain.cli.messages import drawing_console

#: A blank at which a title or a cell is broken where the terminal is narrow.
BREAK = "\v"

#: Characters of a line on which every table finds room.
_UNLIMITED = 100_000


@dataclass(frozen=True)
class Column:
    """A title and its cells, in rich's markup; `BREAK` may stand in them.

    Attributes:
        title: In as many lines as it has.
        cells: From top to bottom.
        importance: Of the columns with a number the least is left out first; None: the column is never left out.
        name: What to call it where it is left out, if not by its title.
        is_text: At the left, and folded where nothing else helps.
    """

    title: str
    cells: tuple[str, ...]
    importance: int | None = None
    name: str = ""
    is_text: bool = False


def drawn(columns: Sequence[Column], piped_width: int) -> list[str]:
    """Return the lines of a table for standard output; below it stands which columns found no room.

    Args:
        columns: From left to right.
        piped_width: Characters of a line where standard output is no terminal.
    """
    console = drawing_console(None if sys.stdout.isatty() else piped_width)
    shown, left_out = _fitting(columns, console)
    with console.capture() as captured:
        console.print(_table(shown))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return [*lines, f"no room for: {', '.join(left_out)}"] if left_out else lines


def _fitting(columns: Sequence[Column], console: Console) -> tuple[list[Column], list[str]]:
    """Return the columns that the console has room for, and the names of the others."""
    unlimited = console.options.update(max_width=_UNLIMITED)

    def fits() -> bool:
        return Measurement.get(console, unlimited, _table(shown)).maximum <= console.width

    shown = _broken(columns, " ")
    if not fits():
        shown = _broken(columns, "\n")
    left_out: list[str] = []
    while not fits() and (optional := [column for column in shown if column.importance is not None]):
        least = min(reversed(optional), key=lambda column: column.importance or 0)
        left_out.append(least.name or " ".join(least.title.split()))
        shown.remove(least)
    return shown, left_out


def _broken(columns: Sequence[Column], blank: str) -> list[Column]:
    return [
        replace(
            column,
            title=column.title.replace(BREAK, blank),
            cells=tuple(cell.replace(BREAK, blank) for cell in column.cells),
        )
        for column in columns
    ]


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="left" if column.is_text else "right", overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table
