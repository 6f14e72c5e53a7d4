"""Tables on a terminal that may be too narrow for them: cells are broken where they say, then columns are left out.

No number is ever cut.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from mptrain.cli.messages import supports_colour

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


def columns_of(titles: Sequence[str], rows: Iterable[Sequence[str]], numeric: Collection[str] = ()) -> list[Column]:
    """Return the columns of rows of cells; those whose titles are in ``numeric`` stand at the right."""
    cells = list(zip(*rows, strict=True)) or [()] * len(titles)
    return [Column(title, column, is_text=title not in numeric) for title, column in zip(titles, cells, strict=True)]


def capture(piped_width: int, *parts: RenderableType, least_width: int = 0) -> list[str]:
    """Return what rich draws for standard output, in lines: with colours and bold text where it shows them, else plain.

    Args:
        piped_width: Characters of a line where standard output is no terminal.
        parts: From top to bottom.
        least_width: Characters of a line on any terminal.
    """
    console = _console(piped_width)
    console.width = max(console.width, least_width)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return [line.rstrip() for line in captured.get().splitlines()]


def render_table(columns: Sequence[Column], piped_width: int, least_gap: int = 2) -> list[str]:
    """Return the lines of a table for standard output; below it stands which columns found no room.

    Args:
        columns: From left to right.
        piped_width: Characters of a line where standard output is no terminal.
        least_gap: Blanks between two columns of a table that is not as wide as its cells; else there are two.
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
    return [*lines, f"no room for: {', '.join(left_out)}"] if left_out else lines


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
