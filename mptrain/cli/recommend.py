"""``mptrain recommend RUN [--sweep SWEEP]``: recommends a static loss scale from a run's gradient histograms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.places import place
from mptrain.report.page import Code, Text
from mptrain.runlog.directory import last_run
from mptrain.system.errors import EXIT_DATA, EXIT_OK

if TYPE_CHECKING:
    from argparse import Namespace


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
    written = write_forecast(found)
    *shown, _ = written.page.sections  # the last one is the run
    print_blocks(Text(written.page.lead), *shown, Code(f"{written.html}\n{written.md}"))
    known = all(forecast.largest is not None and not forecast.too_few for forecast in found.forecasts.values())
    return EXIT_OK if known else EXIT_DATA
