"""``mptrain recommend RUN [--sweep SWEEP]``: recommends a static loss scale from a run's gradient histograms."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from mptrain.cli.messages import printable, say, wrapped
from mptrain.cli.places import place
from mptrain.cli.tables import BREAK, Column, render_table
from mptrain.errors import EXIT_DATA, EXIT_OK
from mptrain.runlog.directory import last_run

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.report.page import Table

#: Width of the table in characters if standard output is not a terminal.
_WIDTH = 160

_COLOURS = {"good": "green", "bad": "red", "warn": "yellow"}


def recommend_scale(arguments: Namespace) -> int:
    """Print the static loss scale recommended for a run and the effect of every other scale, and write a report.

    The report is written into the run's folder.

    Args:
        arguments: Parsed command line: the run, or ``last``; ``--sweep`` with the folder of a sweep over static scales.

    Returns:
        The exit code: 0, or 6 if a learner (a model with its optimizer) has too few histograms for a recommendation.

    Raises:
        StorageError: The run has no histograms, the sweep has no static scales, or a folder cannot be read or written.
    """
    (run,), sweep = arguments.words, arguments.sweep
    path = last_run(Path("outputs")).root if run == "last" else place(run)
    from mptrain.report import recommend, write_forecast

    found = recommend(path, place(sweep) if sweep else None)
    lines = [line for sentence in found.sentences() for line in wrapped(sentence, indent="")]
    for learner in found.forecasts:
        if len(found.forecasts) > 1:
            lines += ["", learner]
        if (shown := found.table(learner)) is not None:
            lines += ["", *_drawn(shown), "", *wrapped(shown.note, indent="")]
            if found.unlike:
                lines += ["", *wrapped(found.unlike, "warning: ")]
        lines.append("")
        for reason in (*found.reasons(learner), *found.notes):
            lines += wrapped(reason, "- ")
    written = write_forecast(found)
    say("\n".join([*lines, "", str(written.html), str(written.md)]), styled=True)
    known = all(forecast.largest is not None and not forecast.too_few for forecast in found.forecasts.values())
    return EXIT_OK if known else EXIT_DATA


def _drawn(shown: Table) -> list[str]:
    """Render a report's table for the terminal; on a narrow one, headings are folded but numbers never truncated."""
    columns = []
    for at, name in enumerate(shown.head):
        cells = [(escape(printable(row[at].text)), _COLOURS.get(row[at].tone)) for row in shown.rows]
        coloured = (f"[{colour}]{text}[/]" if colour and text else text for text, colour in cells)
        title = escape(printable(name)).replace(" ", BREAK)
        columns.append(Column(title, tuple(coloured), is_text=at not in shown.numeric))
    return render_table(columns, shutil.get_terminal_size((_WIDTH, 24)).columns, least_gap=1)
