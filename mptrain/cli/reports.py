"""``mptrain report``, ``mptrain recommend`` and ``mptrain replay``: write reports from records, and print them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import say
from mptrain.cli.places import place
from mptrain.report.forecast_page import recommend
from mptrain.report.page import Code, Text
from mptrain.report.report_files import ReportFiles, write_forecast, write_page, write_replay, write_report
from mptrain.runlog.atomic_files import folder_at_once
from mptrain.runlog.directory import RunDirectory, last_run, open_run
from mptrain.system.errors import EXIT_DATA, EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from mptrain.report.replay_page import Replay


def report_folders(arguments: Namespace) -> Outcome:
    """Write the HTML and Markdown report of each folder, or with ``--together`` one report of several runs.

    Args:
        arguments: Parsed command line; its words are folders of runs, sweeps, comparisons or recipes, or ``last`` for
            the run that was started last. With ``--follow N`` the report of one run is written again every N seconds
            until the run has ended.

    Returns:
        The written files, whose paths are printed, with the exit code 0.

    Raises:
        StorageError: A folder is not a run, sweep or comparison, or it cannot be read or written.
        UsageError: The options do not fit the number of folders.
    """
    written = {}
    for folder, files in _write(arguments):
        written[folder] = files
        if not arguments.json:  # a later folder may be refused
            say(f"{files.html}\n{files.md}")
    return Outcome(EXIT_OK, lambda: None, lambda answers: answers.ReportAnswer.written(written))


def _write(arguments: Namespace) -> Iterator[tuple[Path, ReportFiles]]:
    folders = list(dict.fromkeys(map(_place, arguments.words)))
    if arguments.together and (arguments.follow or len(folders) < 2):
        raise UsageError(
            "--together takes two runs or more, and no --follow", "write mptrain report RUN RUN --together"
        )
    if arguments.follow and len(folders) > 1:
        raise UsageError("--follow takes one run", "write mptrain report RUN --follow 10")
    if arguments.together:
        from mptrain.report.runs_page import runs_page
        from mptrain.sweep.runner import fresh_place

        page = runs_page(folders)  # first: a run that cannot be read leaves no folder
        folder = fresh_place(Path("outputs"), "reports")
        with folder_at_once(folder) as draft:
            write_page(page, draft, draft / "report.html", draft / "report.md")
        yield folder, ReportFiles(page, folder / "report.html", folder / "report.md")
        return
    if arguments.follow:
        _follow(folders[0], arguments.follow, quiet=arguments.json)
    for folder in folders:
        yield folder, write_report(folder)


def _follow(folder: Path, seconds: int, *, quiet: bool) -> None:
    """Write the report of a run every so many seconds while it trains; its page reloads itself until then."""
    run = open_run(folder)
    try:
        _rewrite(folder, run, seconds, quiet=quiet)
    except KeyboardInterrupt:  # or another signal, `EndRequested`
        write_report(folder)  # a page that no longer reloads itself
        raise


def _rewrite(folder: Path, run: RunDirectory, seconds: int, *, quiet: bool) -> None:
    while (state := run.read_state()) is not None and state.status == "running" and run.holder() is not None:
        files = write_report(folder, reload=seconds)
        if not quiet:
            say(f"{files.html}: written again every {seconds} s until the run has ended")
            quiet = True
        time.sleep(seconds)


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
    found = recommend(_place(run), place(sweep) if sweep else None)
    written = write_forecast(found)
    known = all(forecast.is_answered for forecast in found.forecasts.values())
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
