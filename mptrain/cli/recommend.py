"""``mptrain recommend RUN [--sweep SWEEP]``: which static loss scale is usable, from the histograms of a run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table as RichTable

from mptrain.cli.messages import drawing_console, printable, say
from mptrain.cli.report import place
from mptrain.cli.rows import width_of
from mptrain.errors import EXIT_DATA, EXIT_OK, UsageError
from mptrain.runlog.directory import last_run

if TYPE_CHECKING:
    from mptrain.report.page import Table

#: Letters of a cell that are kept in one line.
_WIDEST = 24

#: Letters of a row of the table where no terminal says how many it takes.
_WIDTH = 160

_COLOURS = {"good": "green", "bad": "red", "warn": "yellow"}


def recommend_scale(words: Sequence[str]) -> int:
    """Print the recommended scale and what every other one would do, and write it as a page into the run's folder.

    Args:
        words: The run, or ``last``; ``--sweep`` with the folder of a sweep over static scales.

    Returns:
        0, or 6 where the looks of a learner are too few to tell.

    Raises:
        UsageError: Not exactly one run is named, or something else is.
        StorageError: The run has no histograms, the sweep no static scales, or a folder cannot be read or written.
    """
    run, sweep = _read(words)
    path = last_run(Path("outputs")).root if run == "last" else place(run)
    from mptrain.report import recommend, write_forecast

    found = recommend(path, place(sweep) if sweep else None)
    width = width_of(sys.stdout)
    lines: list[str] = []
    for sentence in found.sentences():
        lines += textwrap.wrap(printable(sentence), width, break_on_hyphens=False)
    for learner in found.forecasts:
        if len(found.forecasts) > 1:
            lines += ["", learner]
        if (shown := found.table(learner)) is not None:
            lines += ["", *_drawn(shown), "", *textwrap.wrap(printable(shown.note), width, break_on_hyphens=False)]
            if found.unlike:
                lines += ["", *textwrap.wrap(printable(f"warning: {found.unlike}"), width, subsequent_indent="  ")]
        lines.append("")
        for reason in (*found.reasons(learner), *found.notes):
            lines += textwrap.wrap(printable(reason), width, initial_indent="- ", subsequent_indent="  ")
    written = write_forecast(found)
    say("\n".join([*lines, "", str(written.html), str(written.md)]), styled=True)
    known = all(forecast.largest is not None and not forecast.too_few for forecast in found.forecasts.values())
    return EXIT_OK if known else EXIT_DATA


def _read(words: Sequence[str]) -> tuple[str, str]:
    """The run and the sweep that are named; the sweep is empty where none is."""
    rest, runs, sweep = list(words), [], ""
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--sweep":
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
            if not value:
                raise UsageError("--sweep needs the folder of a sweep", "write --sweep outputs/sweeps/NAME")
            sweep = value
        elif word.startswith("-"):
            raise UsageError(f"unknown option '{word}'", "recommend takes a run, and --sweep SWEEP")
        elif "=" in word and not Path(word).exists():
            hint = "recommend takes a run, and --sweep SWEEP"
            if re.match(r"(learners\.[^.=]+\.)?scaler\b", word):
                hint += f"; what a scaler would have done says mptrain replay RUN {shlex.quote(word)}"
            raise UsageError(f"KEY=VALUE is not taken, but there is '{word}'", hint)
        else:
            runs.append(word)
    if len(runs) != 1:
        what = f"recommend takes one run, but there are {len(runs)}" if runs else "recommend needs a run directory"
        raise UsageError(what, "write mptrain recommend last, or the path of a run with histograms")
    return runs[0], sweep


def _drawn(shown: Table) -> list[str]:
    """A table of a report, for a terminal; heads and names are folded where it is narrow, and no number is ever cut off."""
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    natural, least = _widths(shown)
    gap = 2 if sum(natural) + 2 * len(natural) <= width else 1
    narrow = sum(natural) + gap * len(natural) > width
    table = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for place_, name in enumerate(shown.head):
        justify: Literal["right", "left"] = "right" if place_ in shown.numeric else "left"
        table.add_column(escape(printable(name)), justify=justify, width=least[place_] if narrow else None)
    for row in shown.rows:
        cells = [(escape(printable(cell.text)), _COLOURS.get(cell.tone)) for cell in row]
        table.add_row(*(f"[{colour}]{text}[/]" if colour and text else text for text, colour in cells))
    most = max(width, sum(least) + gap * len(least))
    console = drawing_console(most)
    with console.capture() as drawn:
        console.print(table)
    return [line.rstrip() for line in drawn.get().splitlines()]


def _widths(shown: Table) -> tuple[list[int], list[int]]:
    """Characters of each column: as it is, and at least."""
    columns = [[cell_len(printable(row[at].text)) for row in shown.rows] for at in range(len(shown.head))]
    heads = [printable(name) for name in shown.head]
    natural = [max([*cells, cell_len(head)]) for cells, head in zip(columns, heads, strict=True)]
    least = [
        max(min(max(cells, default=0), _WIDEST), *(cell_len(word) for word in head.split() or [""]))
        for cells, head in zip(columns, heads, strict=True)
    ]
    return natural, least
