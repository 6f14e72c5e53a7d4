"""Objects that Python and notebooks show as blocks of a report: as short text, and as HTML; and tables of pandas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any, Final

from typing_extensions import override

from mptrain.report.page import Block, Bullets, Facts, Table, Text
from mptrain.system.machine import load_extra
from mptrain.system.masking import masked
from mptrain.system.words import KEYBOARD, elided, plain

#: Maximum characters of a cell and of a sentence in text, of its lines, and of a warning, which is not shortened.
CELL, SENTENCE, WIDTH, WHOLE = 40, 400, 120, 1500

#: Rows of a table that stand for all others.
MOST_ROWS: Final = 12


class Shown:
    """Mixin of an object that shows itself as blocks of a report, without control characters and secrets."""

    __slots__ = ()

    def blocks(self) -> Sequence[Block]:
        """Return the blocks. The text has no figures, no optional columns of tables, and long sentences shortened."""
        raise NotImplementedError

    @override
    def __repr__(self) -> str:
        return str(masked("\n".join(line for block in self.blocks() for line in _lines(block)))).translate(KEYBOARD)

    def _repr_html_(self) -> str:
        from mptrain.report.html_and_markdown import fragment

        return str(masked(fragment(self.blocks())))


def _cut(text: object, most: int = SENTENCE) -> str:
    """Return `plain` text of at most ``most`` characters, with an ellipsis for the words omitted at its end."""
    whole = plain(text)
    # The end of a word longer than this is cut off, not the whole word.
    return whole if len(whole) <= most else re.sub(r"\s\S{0,39}$|.$", "", whole[:most]) + "…"


def _lines(block: Block) -> list[str]:
    match block:
        case Table(head=head, rows=rows, note=note):
            columns = []
            for at, name in enumerate(head):
                if name not in block.optional:
                    cells = [elided(text, CELL) for text in (name, *(row[at].text for row in rows))]
                    aligned = str.rjust if at in block.numeric else str.ljust
                    columns.append([aligned(cell, max(map(len, cells))) for cell in cells])
            return [
                *("  ".join(row).rstrip() for row in zip(*columns, strict=True)),
                *filter(None, [_cut(note)]),
            ]
        case Facts(rows=pairs):
            return [f"{elided(name, CELL)}: {_cut(value)}" for name, value in pairs]
        case Bullets(items=items, tone=tone):
            whole = [f"- {_cut(item, WHOLE if tone else SENTENCE)}" for item in items]
            return [line for item in whole for line in wrap(item, WIDTH, subsequent_indent="  ")]
        case Text(text=sentence):
            return [_cut(sentence)]
    return []


def first_rows(table: Table, what: str) -> Table:
    """Return a table with its first `MOST_ROWS` rows and the number of the others, ``what`` in the plural, below."""
    left = len(table.rows) - MOST_ROWS
    return replace(table, rows=table.rows[:MOST_ROWS], note=f"... and {left:,} more {what}") if left > 0 else table


def dataframe(*arguments: Any, **named: Any) -> Any:
    """Return a `pandas.DataFrame`; raise EnvironmentRefused if pandas is not installed."""
    return load_extra("pandas", "", "to_dataframe()").DataFrame(*arguments, **named)
