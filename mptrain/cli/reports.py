"""``mptrain report``, ``mptrain recommend`` and ``mptrain replay``: write reports from records, and print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.messages import say
from mptrain.cli.places import place
from mptrain.report.forecast_page import recommend
from mptrain.report.page import Code, Text
from mptrain.report.report_files import write_forecast, write_replay, write_report
from mptrain.runlog.directory import last_run
from mptrain.system.errors import EXIT_DATA, EXIT_OK

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.report.replay_page import Replay
    from mptrain.report.report_files import ReportFiles


def report_folders(arguments: Namespace) -> int:
    """Write the HTML and Markdown report of each folder, and print the paths of its files.

    Args:
        arguments: Parsed command line; its words are folders of runs, sweeps, comparisons or recipes, or ``last`` for
            the run that was started last.

    Returns:
        The exit code 0.

    Raises:
        StorageError: A folder is not a run, sweep or comparison, or it cannot be read or written.
    """
    for word in arguments.words:
        written = write_report(_place(word))
        say(f"{written.html}\n{written.md}")
    return EXIT_OK


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
    found = recommend(_place(run), place(sweep) if sweep else None)
    _show(write_forecast(found))
    known = all(forecast.largest is not None and not forecast.too_few for forecast in found.forecasts.values())
    return EXIT_OK if known else EXIT_DATA


def report_replay(replay: Replay) -> int:
    """Print the effect of a loss scaling rule that was simulated on the recorded steps of a run, and write a report.

    Returns:
        The exit code 0.

    Raises:
        StorageError: The report cannot be written.
    """
    _show(write_replay(replay))
    return EXIT_OK


def _show(written: ReportFiles) -> None:
    """Print a written report without its last section, the run or command, and its paths."""
    *shown, _ = written.page.sections
    print_blocks(Text(written.page.lead), *shown, Code(f"{written.html}\n{written.md}"))


def _place(word: str) -> Path:
    return last_run(Path("outputs")).root if word == "last" else place(word)
