"""Rendering of the blocks of a report for a terminal or a pipe: the third form of a page, beside HTML and Markdown.

Figures, images, sounds and folded blocks are left to the files. Numbers in tables are never truncated.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text as RichText

from mptrain.cli.messages import printable, say, supports_colour, wrapped
from mptrain.numerics.words import MINUS, TIMES, UNKNOWN
from mptrain.report.page import Block, Bullets, Code, Facts, Section, Table, Text, Tiles, Tone

#: Line width in characters of tables if standard output is not a terminal, and one that is enough for every table.
_PIPED, _UNLIMITED = 200, 100_000

#: Escape codes; `mptrain.cli.messages.say` passes no others.
_CODES: Final = {"good": "32", "warn": "33", "bad": "31", "bold": "1", "dim": "2"}
_COLOURS: Final[dict[Tone, str]] = {"": "", "good": "green", "warn": "yellow", "bad": "red"}

#: Signs that a keyboard lacks, so that output can be searched and copied.
_SIGNS: Final = str.maketrans({MINUS: "-", TIMES: "x", UNKNOWN: "-"})

#: Characters from which a cell of a table is broken before a bracket.
_LONG: Final = 16


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
    return wrapped(text.translate(_SIGNS), head, indent=indent)


def _styled(lines: Sequence[str], style: str) -> list[str]:
    if not style or not supports_colour(sys.stdout):
        return list(lines)
    return [f"\x1b[{_CODES[style]}m{line}\x1b[0m" for line in lines]


def _table_lines(block: Table) -> list[str]:
    """Render a table; one that is too wide is broken, then lacks columns of `Table.optional`, which a line names."""
    styled = supports_colour(sys.stdout)
    width = shutil.get_terminal_size((_PIPED, 24)).columns
    console = Console(width=width, no_color=not styled, force_terminal=styled)
    unlimited = console.options.update(max_width=_UNLIMITED)

    narrower = ((count, True, gap) for count in range(len(block.optional) + 1) for gap in (2, 1))
    for count, broken, gap in ((0, False, 2), *narrower):
        left_out = block.optional[:count]
        table = _drawn(block, left_out, broken=broken, gap=gap)
        size = Measurement.get(console, unlimited, table)
        if size.maximum <= width:
            break
    with console.capture() as captured:
        console.print(table, width=max(width, size.minimum), crop=False)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    lines += [f"not shown: {', '.join(left_out)}"] if left_out else []
    return [*lines, "", *_styled(_wrapped(block.note, indent=""), "dim")] if block.note else lines


def _drawn(block: Table, left_out: Sequence[str], *, broken: bool, gap: int) -> RichTable:
    table = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    shown = [at for at, name in enumerate(block.head) if name not in left_out]
    for at in shown:
        head, number = _cell(block.head[at], broken=broken), at in block.numeric
        if broken:  # no wider than its words and cells need
            cells = (_cell(row[at].text, broken=True) for row in block.rows)
            room = max(1, *map(len, "\n".join((head.replace(" ", "\n"), *cells)).split("\n")))
            head = "\n".join(part for line in head.split("\n") for part in wrap(line, room))
        table.add_column(RichText(head), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in block.rows:
        table.add_row(*(RichText(_cell(row[at].text, broken=broken), style=_COLOURS[row[at].tone]) for at in shown))
    return table


def _cell(text: str, *, broken: bool) -> str:
    """Return the text of a heading or cell; in a broken one, an interval or remark in brackets has its own line."""
    text = printable(text).translate(_SIGNS)
    return text.replace(" [", "\n[").replace(" (", "\n(") if broken and len(text) >= _LONG else text
