"""``mptrain report``: writes reports from records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain import shelves
from mptrain.cli.command import Outcome
from mptrain.cli.messages import say
from mptrain.cli.places import place_or_last
from mptrain.report.html_and_markdown import ReportFiles, write_report
from mptrain.runlog.directory import RunDirectory, open_run
from mptrain.system.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from mptrain.cli.answers.answer import Answer


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

    def data() -> Answer:
        from mptrain.cli.answers.report import answer_of

        return answer_of(written)

    return Outcome(EXIT_OK, lambda: None, data)


def _write(arguments: Namespace) -> Iterator[tuple[Path, ReportFiles]]:
    folders = list(dict.fromkeys(map(place_or_last, arguments.words)))
    if arguments.together and (arguments.follow or len(folders) < 2):
        raise UsageError(
            "--together takes two runs or more, and no --follow", "write mptrain report RUN RUN --together"
        )
    if arguments.follow and len(folders) > 1:
        raise UsageError("--follow takes one run", "write mptrain report RUN --follow 10")
    if arguments.together:
        yield shelves.load("study", "--together").written_together(folders)
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
