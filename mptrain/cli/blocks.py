"""Rendering of the blocks of a report for a terminal or a pipe: the third form of a page, beside HTML and Markdown.

Figures, images, sounds and folded blocks are left to the files. Numbers in tables are never truncated.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from textwrap import wrap
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text as RichText

from mptrain.cli.messages import printable, say, supports_colour, wrapped
from mptrain.report.page import Block, Bullets, Code, Facts, Section, Table, Text, Tiles, Tone
from mptrain.system.masking import masker
from mptrain.system.words import KEYBOARD

#: Line width in characters of tables if standard output is not a terminal, and one that is enough for every table.
_PIPED, _UNLIMITED = 200, 100_000

#: Escape codes; `mptrain.cli.messages.say` passes no others.
_CODES: Final = {"good": "32", "warn": "33", "bad": "31", "bold": "1", "dim": "2"}
_COLOURS: Final[dict[Tone, str]] = {"": "", "good": "green", "warn": "yellow", "bad": "red"}

#: Characters from which a cell of a table is broken before a bracket.
_LONG: Final = 16

#: Rows from which a table is not broken: it is searched or sorted by another program, and rich needs 1 ms for a row.
_MANY: Final = 500


def print_blocks(*blocks: Block | Section | None) -> None:
    """Print blocks of a report on standard output, with an empty line between two of them.

    Args:
        blocks: The blocks. A section prints its title and its blocks; None prints nothing.

    Raises:
        StorageError: Standard output cannot be written.
    """
    say("\n".join(block_lines(blocks)), styled=True)


def block_lines(blocks: Iterable[Block | Section | None]) -> list[str]:
    """Render blocks of a report to lines of text for standard output, with an empty line between two blocks."""
    lines: list[str] = []
    for block in blocks:
        if shown := _lines(block):
            lines += [*([""] if lines else []), *shown]
    return lines


def _lines(block: Block | Section | None) -> list[str]:
    match block:
        case Text(text=text, tone=tone):
            return _styled(_wrapped(text, indent=""), tone)
        case Bullets(items=items, tone=tone):
            return [line for item in items for line in _styled(_wrapped(item, "- "), tone)]
        case Facts(rows=rows):
            return [line for name, text in rows for line in _wrapped(text, f"{printable(name)}: ")]
        case Tiles(tiles=tiles):
            return _wrapped(", ".join(" ".join(filter(None, tile)) for tile in tiles))
        case Code(text=text):
            return text.splitlines()
        case Table():
            return _table_lines(block)
        case Section(title=title, blocks=blocks):
            shown = block_lines(blocks)
            return [*(_styled([printable(title)], "bold") if title else []), *shown] if shown else []
    return []


def _wrapped(text: str, head: str = "", indent: str = "  ") -> list[str]:
    return wrapped(text.translate(KEYBOARD), head, indent=indent)


def _styled(lines: Sequence[str], style: str) -> list[str]:
    if not style or not supports_colour(sys.stdout):
        return list(lines)
    return [f"\x1b[{_CODES[style]}m{line}\x1b[0m" for line in lines]


def _table_lines(block: Table) -> list[str]:
    """Render a table; one that is too wide is broken, then lacks columns of `Table.optional`, which a line names."""
    width = shutil.get_terminal_size((_PIPED, 24)).columns
    lines, widest = _unbroken(block)
    if widest > width and len(block.rows) < _MANY:
        lines = _broken(block, width)
    return [*lines, "", *_styled(_wrapped(block.note, indent=""), "dim")] if block.note else lines


def _unbroken(block: Table) -> tuple[list[str], int]:
    """Return the lines of a table with one for each row, and the width of the widest."""
    mask = masker()
    rows = [
        [_cell(name, mask) for name in block.head],
        *([_cell(cell.text, mask) for cell in row] for row in block.rows),
    ]
    styles: list[list[str]] = [["bold" for _ in block.head], *([*map(attrgetter("tone"), row)] for row in block.rows)]
    widths = [max(cell_len(row[at]) for row in rows) for at in range(len(block.head))]
    lines: list[str] = []
    for row, tones in zip(rows, styles, strict=True):
        parts = []
        for at, text in enumerate(row):
            blanks, shown = " " * (widths[at] - cell_len(text)), "".join(_styled([text], tones[at]))
            parts.append(blanks + shown if at in block.numeric else shown + blanks)
        lines.append("  ".join(parts).rstrip())
    return lines, sum(widths) + 2 * (len(widths) - 1)


def _broken(block: Table, width: int) -> list[str]:
    """Return the lines of a table whose cells are broken to a width, as far as numbers and words allow."""
    styled = supports_colour(sys.stdout)
    console = Console(width=width, no_color=not styled, force_terminal=styled)
    unlimited = console.options.update(max_width=_UNLIMITED)
    for count, gap in ((count, gap) for count in range(len(block.optional) + 1) for gap in (2, 1)):
        left_out = block.optional[:count]
        table = _drawn(block, left_out, gap)
        size = Measurement.get(console, unlimited, table)
        if size.maximum <= width:
            break
    with console.capture() as captured:
        console.print(table, width=max(width, size.minimum), crop=False)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return [*lines, f"not shown: {', '.join(left_out)}"] if left_out else lines


def _drawn(block: Table, left_out: Sequence[str], gap: int) -> RichTable:
    table = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    mask = masker()
    for at in (shown := [at for at, name in enumerate(block.head) if name not in left_out]):
        head = _in_lines(_cell(block.head[at], mask))
        cells = (_in_lines(_cell(row[at].text, mask)) for row in block.rows)
        room = max(1, *map(len, "\n".join((head.replace(" ", "\n"), *cells)).split("\n")))
        head = "\n".join(part for line in head.split("\n") for part in wrap(line, room))  # no wider than its cells need
        number = at in block.numeric
        table.add_column(RichText(head), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in block.rows:
        texts = [RichText(_in_lines(_cell(row[at].text, mask)), style=_COLOURS[row[at].tone]) for at in shown]
        table.add_row(*texts)
    return table


def _cell(text: str, mask: Callable[[str], str]) -> str:
    return printable(text, mask).translate(KEYBOARD)


def _in_lines(text: str) -> str:
    """Return the text of a broken heading or cell: an interval or remark in brackets has its own line."""
    return text.replace(" [", "\n[").replace(" (", "\n(") if len(text) >= _LONG else text
