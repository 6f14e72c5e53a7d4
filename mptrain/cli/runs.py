"""``mptrain runs [FOLDER]``: lists the runs below a folder, writes them as a page, or removes some of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import report, say
from mptrain.numerics.words import counted, moment, plain
from mptrain.report.page import Bullets, Text, table
from mptrain.report.run_list import FoundRun, filtered, find_runs, ordered, runs_table, sort_notes
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.removal import remove_leftovers, remove_run, size_of
from mptrain.system.errors import EXIT_DATA, EXIT_OK, StorageError, UsageError
from mptrain.system.files import expanded

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from mptrain.cli.answers.answer import Answer


def list_runs(arguments: Namespace) -> Outcome:
    """List the runs below a folder, the newest first, as a table or a page, or remove some of them.

    Args:
        arguments: Parsed command line: at most one folder, ``outputs`` by default, and options.

    Returns:
        The runs, with the exit code 0, or 6 if one could not be removed.

    Raises:
        StorageError: The folder does not exist.
        UsageError: No run has a key that is asked for, or options contradict each other.
    """
    if arguments.prune and arguments.html:
        raise UsageError("--prune removes runs, and --html lists them", "give one of them")
    if arguments.yes and not arguments.prune:
        raise UsageError("--yes confirms --prune", "add --prune, or remove it")
    folder = expanded(next(iter(arguments.words), "outputs"))
    found, notes = find_runs(folder)
    runs = ordered(filtered(found, arguments.filter), arguments.sort or "started")
    notes += sort_notes(runs, arguments.sort)
    shown = [f"only runs with {', '.join(arguments.filter)}"] if arguments.filter else []
    if arguments.prune:
        return _prune(runs, notes, folder, arguments)
    files = None
    if arguments.html:
        from mptrain.report.report_files import write_runs  # a list needs none of what pages need

        files = write_runs(folder, runs, [*notes, *shown], arguments.sort)

    def show() -> None:
        if files:
            say(f"{files.html}\n{files.md}")
            return
        none = Text(f"there is no run in {folder}{' that fits' if found else ''}")
        print_blocks(runs_table(runs, arguments.sort) if runs else none, Bullets(tuple(notes)))

    return Outcome(EXIT_OK, show, lambda: _answer(runs, notes))


def _prune(runs: list[FoundRun], unread: list[str], folder: Path, arguments: Namespace) -> Outcome:
    """Remove runs that failed or were killed, or those of the status that a filter names, after the user has agreed."""
    remove_leftovers(folder)  # of removals that were killed, which the user has agreed to
    if not any(word.startswith("status=") for word in arguments.filter):
        runs = [run for run in runs if run.status in ("failed", "killed")]
    notes = [*unread, *(f"{run.path} is running: it stays" for run in runs if run.held)]
    runs = [run for run in runs if not run.held]
    sizes = [size_of(run.run.paths.root) for run in runs]
    rows = [
        (run.path, run.status, moment(run.started), readable_bytes(size), run.reason)
        for run, size in zip(runs, sizes, strict=True)
    ]
    total = f"{counted(len(runs), 'run')}, {readable_bytes(sum(sizes))}"
    if not arguments.json:
        shown = table(("run", "status", "started", "size", "reason"), rows, numeric=(3,), note=total)
        print_blocks(shown if runs else Text(f"there is no run to remove in {folder}"), Bullets(tuple(notes)))
    removed: list[str] = []
    failed: list[StorageError] = []
    if runs and (arguments.yes or (not arguments.json and _agreed(total))):
        for run in runs:
            try:
                remove_run(run.run, folder)
                removed.append(run.path)
                if not arguments.json:
                    say(f"removed {plain(run.path)}")
            except StorageError as error:
                failed.append(error)

    def show() -> None:
        for error in failed:
            report(error)
        if runs and not removed:
            say("nothing was removed" if failed else "nothing was removed; --yes removes them")

    code = EXIT_DATA if failed else EXIT_OK
    notes += [f"{error}; {error.hint}" if error.hint else str(error) for error in failed]
    return Outcome(code, show, lambda: _answer(runs, notes, removed))


def _agreed(what: str) -> bool:
    """Return whether the user types yes; False without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    say(f"\nremove {what}? This cannot be undone. Type yes:", styled=True)
    return sys.stdin.readline().strip().lower() == "yes"


def _answer(runs: Sequence[FoundRun], notes: Sequence[str], removed: Sequence[str] = ()) -> Answer:
    from mptrain.cli.answers.runs import RunsAnswer

    return RunsAnswer.found(runs, notes, removed)
