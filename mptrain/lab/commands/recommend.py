"""``mptrain recommend`` and ``mptrain replay``: write what records show about other scales, and print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome, place, place_or_last
from mptrain.lab.pages.forecast_page import forecast_page, recommend
from mptrain.lab.pages.replay_page import Replay, file_name, replay_page
from mptrain.report.html_and_markdown import ReportFiles, write_page
from mptrain.report.page import Code, Text
from mptrain.system.errors import EXIT_DATA, EXIT_OK

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.cli.answer import Answer
    from mptrain.lab.pages.forecast_page import Recommendation


def recommend_scale(arguments: Namespace) -> Outcome:
    """Recommend a static loss scale for a run, with the effect of every other scale, and write a report.

    The report is written into the run's folder.

    Args:
        arguments: Parsed command line: the run, or ``last``; ``--sweep`` with the folder of a sweep over static scales.

    Returns:
        The recommendation; the exit code is 0, or 6 if a learner (a model with its optimizer) has too few histograms,
        or gradients that FP16 may have rounded to zero unseen.

    Raises:
        StorageError: The run has no histograms, the sweep has no static scales, or a folder cannot be read or written.
    """
    (run,), sweep = arguments.words, arguments.sweep
    found = recommend(place_or_last(run), place(sweep) if sweep else None)
    written = write_forecast(found)
    known = all(forecast.is_answered for forecast in found.forecasts.values())

    def data() -> Answer:
        from mptrain.lab.answers import RecommendAnswer

        return RecommendAnswer.written(found, written)

    return Outcome(EXIT_OK if known else EXIT_DATA, lambda: _show(written), data)


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


def write_replay(replay: Replay) -> ReportFiles:
    """Write the report of a replayed loss-scaling rule into the run directory.

    The files are ``replay-NAME-KEY-VALUE.html`` and ``.md``. Earlier files of the same rule and words are replaced.
    """
    name = file_name(replay)
    return write_page(replay_page(replay), replay.root, replay.root / f"{name}.html", replay.root / f"{name}.md")


def write_forecast(found: Recommendation) -> ReportFiles:
    """Write the report of recommended loss scales into the run directory: ``forecast.html`` and ``forecast.md``."""
    paths = found.opened.run.paths
    return write_page(forecast_page(found), paths.root, paths.forecast_html, paths.forecast_md)
