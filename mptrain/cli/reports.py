"""``mptrain report``, ``mptrain recommend`` and ``mptrain replay``: write reports from records, and print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
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


def report_folders(arguments: Namespace) -> Outcome:
    """Write the HTML and Markdown report of each folder.

    Args:
        arguments: Parsed command line; its words are folders of runs, sweeps, comparisons or recipes, or ``last`` for
            the run that was started last.

    Returns:
        The written files, whose paths are printed, with the exit code 0.

    Raises:
        StorageError: A folder is not a run, sweep or comparison, or it cannot be read or written.
    """
    written = {}
    for folder in map(_place, arguments.words):
        files = written[folder] = write_report(folder)
        if not arguments.json:  # a later folder may be refused
            say(f"{files.html}\n{files.md}")

    return Outcome(EXIT_OK, lambda: None, lambda answers: answers.ReportAnswer.written(written))


def recommend_scale(arguments: Namespace) -> Outcome:
    """Recommend a static loss scale for a run, with the effect of every other scale, and write a report.

    The report is written into the run's folder.

    Args:
        arguments: Parsed command line: the run, or ``last``; ``--sweep`` with the folder of a sweep over static scales.

    Returns:
        The recommendation; the exit code is 0, or 6 if a learner (a model with its optimizer) has too few histograms.

    Raises:
        StorageError: The run has no histograms, the sweep has no static scales, or a folder cannot be read or written.
    """
    (run,), sweep = arguments.words, arguments.sweep
    found = recommend(_place(run), place(sweep) if sweep else None)
    written = write_forecast(found)
    known = all(forecast.largest is not None and not forecast.too_few for forecast in found.forecasts.values())
    return Outcome(
        EXIT_OK if known else EXIT_DATA,
        lambda: _show(written),
        lambda answers: answers.RecommendAnswer.written(found, written),
    )


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
