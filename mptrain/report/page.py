"""The content of a report, whatever it is written in: sections of plain blocks, shown by the templates.

Every string here is text, never markup; making it safe is the business of `mptrain.report.html_and_markdown` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

#: How a statement should catch the eye; the words themselves always say it too.
Tone = Literal["", "good", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A word or number with a tone."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    """Sentences, one below the other."""

    kind: ClassVar[str] = "bullets"
    items: tuple[str, ...]
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The few numbers that matter most: name, number, and a remark on it."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what belongs to them; rows without text are left out by `facts`."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        head: Names of the columns.
        rows: As many cells each.
        numeric: Which columns hold numbers, which are aligned on the right.
        note: A sentence below it.
    """

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure: its name (of its file, and the prefix of its ids), what it shows in words, and its SVG document."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Plots:
    """Figures side by side where there is room."""

    kind: ClassVar[str] = "plots"
    plots: tuple[Plot, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG of the run: its path relative to the report, a caption, and its bytes."""

    kind: ClassVar[str] = "picture"
    file: str
    caption: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Sound:
    """A recording of the run: a WAV file's path relative to the report, a caption, and its bytes."""

    kind: ClassVar[str] = "sound"
    file: str
    caption: str
    wav: bytes


@dataclass(frozen=True, slots=True)
class Code:
    """Text that keeps its lines: a command, a configuration."""

    kind: ClassVar[str] = "code"
    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that are shown on demand."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: tuple[Block, ...]


Block = Text | Bullets | Tiles | Facts | Table | Plots | Picture | Sound | Code | Fold


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report.

    Attributes:
        over: What kind of report it is.
        title: What it is about.
        status: How that ended; one without text is not shown.
        lead: The one sentence to read if only one is read.
        sections: In their order; those without blocks are left out.
    """

    over: str
    title: str
    status: Cell
    lead: str
    sections: tuple[Section, ...]

    def plots(self) -> list[Plot]:
        """All figures of the page, in their order."""
        return [plot for section in self.sections for block in section.blocks for plot in _plots(block)]


def section(title: str, *blocks: Block | None) -> Section:
    """A section of the blocks that there are and that have something to show."""
    return Section(title, tuple(block for block in blocks if block is not None and not _is_empty(block)))


def _is_empty(block: Block) -> bool:
    match block:
        case Bullets(items=()) | Facts(rows=()) | Table(rows=()) | Plots(plots=()):
            return True
    return False


def facts(*rows: tuple[str, str]) -> Facts:
    """The rows that have a text."""
    return Facts(tuple((name, text) for name, text in rows if text))


def table(
    head: Sequence[str | None], rows: Iterable[Sequence[Cell | str]], numeric: Iterable[int] = (), note: str = ""
) -> Table:
    """A table of cells and of plain texts.

    Args:
        head: Names of the columns; a column that has None is left out.
        rows: A cell for each column, those that are left out included.
        numeric: The columns that hold numbers, counted with those that are left out.
        note: A sentence below it.
    """
    kept, right = [at for at, name in enumerate(head) if name is not None], set(numeric)
    texts = ([row[at] for at in kept] for row in rows)
    cells = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in texts)
    names = tuple(name for name in head if name is not None)
    return Table(names, cells, frozenset(place for place, at in enumerate(kept) if at in right), note)


def plots(*found: Plot | None) -> Plots:
    """The figures that there are."""
    return Plots(tuple(plot for plot in found if plot is not None))


def _plots(block: Block) -> tuple[Plot, ...]:
    if isinstance(block, Plots):
        return block.plots
    if isinstance(block, Fold):
        return tuple(plot for inner in block.blocks for plot in _plots(inner))
    return ()
