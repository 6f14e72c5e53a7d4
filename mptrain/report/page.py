"""Content model of a report page, independent of the output format: sections of blocks.

The templates render them as HTML and Markdown, and `mptrain.cli.blocks` prints them on a terminal. Every string here is
plain text and never markup. Only `mptrain.report.html_and_markdown` escapes text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

#: Emphasis of a text. The words always carry the same information.
Tone = Literal["", "good", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table in a report: its text, a tone (good, warn, bad) that colours it, and a link.

    The link is a relative path, ``./a/report.html``; empty for none.
    """

    text: str
    tone: Tone = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A block of a report: one paragraph, with a tone (good, warn, bad) that colours it."""

    kind: ClassVar[str] = "text"
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    """A block of a report: a bulleted list of sentences, with a tone (good, warn, bad) that colours it."""

    kind: ClassVar[str] = "bullets"
    items: tuple[str, ...]
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A block of a report: its most important numbers in large print, each with name, value and remark."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """A block of a report: pairs of name and value; `facts` leaves out those without value."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A block of a report: a table. `table` makes one from strings.

    Attributes:
        head: Names of the columns; the cells of ``rows`` are in the same order.
        numeric: Indices of the columns that hold numbers. They are right-aligned.
        note: A sentence below the table; empty for none.
        optional: Names of columns that a narrow terminal leaves out, the least important first.
    """

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    note: str = ""
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """A curve, marks or bars of a `Chart`, as drawn in the SVG document of the figure.

    Attributes:
        name: Name in the legend.
        x: Steps.
        y: Values, NaN where the curve is interrupted. Exponents are turned back into values.
        colour: Colour as ``#rrggbb``, of opacity ``alpha``.
        kind: ``line``; ``stepped`` for a line that changes only at its points; ``marks`` without a line; ``bars``; or
            ``steps`` for marks whose height means nothing.
        width: Width of the line in points.
        dash: Line style of matplotlib: ``-``, ``--``, ``:`` or ``-.``.
        marker: Marker of matplotlib, such as ``o``; ``ring`` for an outline; ``None`` for none.
        size: Diameter of the marker in points.
        low: Lower end of a band around the curve, with ``high``; empty for none.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    colour: str
    alpha: float = 1.0
    kind: Literal["line", "stepped", "marks", "bars", "steps"] = "line"
    width: float = 1.6
    dash: str = "-"
    marker: str = "None"
    size: float = 6.0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Data of one pair of axes of a figure over steps.

    Attributes:
        title: Title; empty for none.
        unit: Label of the vertical axis; empty for none.
        log: Base of a logarithmic vertical axis, 2 or 10; 0 for a linear one.
        rows: Names of the rows at the heights 0, 1, ... from the top, if the vertical axis has no numbers.
    """

    title: str
    unit: str
    log: int
    rows: tuple[str, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of a report, as an SVG document with the caption below it.

    ``charts`` has the data of a figure over steps, from which the script of the HTML page draws it again so that it can
    be zoomed; empty for other figures.
    """

    name: str
    caption: str
    svg: str
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True)
class Plots:
    """A block of a report: figures, side by side if the page is wide enough."""

    kind: ClassVar[str] = "plots"
    plots: tuple[Plot, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A block of a report: an image of the run's samples. ``file`` is relative to the report; HTML embeds ``png``."""

    kind: ClassVar[str] = "picture"
    file: str
    caption: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Sound:
    """A block of a report: a sound of the run's samples. ``file`` is relative to the report; HTML embeds ``wav``."""

    kind: ClassVar[str] = "sound"
    file: str
    caption: str
    wav: bytes


@dataclass(frozen=True, slots=True)
class Code:
    """A block of a report: preformatted text such as a command; ``language`` is for highlighting, such as ``sh``."""

    kind: ClassVar[str] = "code"
    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """A block of a report: blocks that are collapsed below a title until the reader opens them."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: tuple[Block, ...]


Block = Text | Bullets | Tiles | Facts | Table | Plots | Picture | Sound | Code | Fold


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a report: a heading with the blocks below it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report of a run, sweep or comparison, which is rendered as HTML and as Markdown.

    Attributes:
        over: The kind of report, shown above the title.
        status: The status of the subject. An empty one is not shown.
        lead: The main result in one or a few sentences.
        sections: The sections in order. Those without blocks are left out.
    """

    over: str
    title: str
    status: Cell
    lead: str
    sections: tuple[Section, ...]

    def plots(self) -> list[Plot]:
        """Return all figures of the report in order, also those in collapsed blocks."""
        return [plot for section in self.sections for block in section.blocks for plot in _plots(block)]


def section(title: str, *blocks: Block | None) -> Section:
    """Return a section of a report with those of the given blocks that are neither None nor empty."""
    return Section(title, tuple(block for block in blocks if block is not None and not is_empty(block)))


def is_empty(block: Block) -> bool:
    """Return whether a block of a report has no content, so that `section` leaves it out."""
    match block:
        case Bullets(items=()) | Facts(rows=()) | Table(rows=()) | Plots(plots=()):
            return True
    return False


def facts(*rows: tuple[str, str]) -> Facts:
    """Return a block of a report with pairs of name and value, without the pairs that have no value."""
    return Facts(tuple((name, text) for name, text in rows if text))


def table(
    head: Sequence[str | None],
    rows: Iterable[Sequence[Cell | str]],
    numeric: Iterable[int] = (),
    note: str = "",
    optional: Iterable[str | None] = (),
) -> Table:
    """Return a table of a report from cells and plain strings, without the columns whose name in ``head`` is None.

    Rows and the indices in ``numeric`` count these columns too.
    """
    kept, right = [at for at, name in enumerate(head) if name is not None], set(numeric)
    texts = ([row[at] for at in kept] for row in rows)
    cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in texts)
    names = tuple(name for name in head if name is not None)
    least = tuple(name for name in optional if name in names)
    return Table(names, cells, frozenset(column for column, at in enumerate(kept) if at in right), note, least)


def plots(*figures: Plot | None) -> Plots:
    """Return a block of a report with those of the given figures that are not None."""
    return Plots(tuple(plot for plot in figures if plot is not None))


def _plots(block: Block) -> tuple[Plot, ...]:
    if isinstance(block, Plots):
        return block.plots
    if isinstance(block, Fold):
        return tuple(plot for inner in block.blocks for plot in _plots(inner))
    return ()
