"""``mptrain runs [FOLDER]``: lists the runs below a folder, writes them as a page, or removes some of them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import report, say
from mptrain.report.page import Bullets, Text, table
from mptrain.report.run_list import FoundRun, filtered, find_runs, ordered, runs_table, sort_notes
from mptrain.runlog.atomic_files import readable_bytes, storage_errors
from mptrain.runlog.directory import RunDirectory, holder_of
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_reader import Run
from mptrain.runlog.sweeps import SweepPaths
from mptrain.system.errors import EXIT_DATA, EXIT_OK, StorageError, UsageError
from mptrain.system.files import expanded
from mptrain.system.words import counted, moment, plain

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from mptrain.cli.answer import Answer


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
    all_runs, notes = find_runs(folder)
    runs = ordered(filtered(all_runs, arguments.filter), arguments.sort or "started")
    notes += sort_notes(runs, arguments.sort)
    shown = [f"only runs with {', '.join(arguments.filter)}"] if arguments.filter else []
    if arguments.prune:
        return _prune(runs, notes, folder, arguments)
    files = None
    if arguments.html:
        from mptrain.report.html_and_markdown import write_runs

        files = write_runs(folder, runs, [*notes, *shown], arguments.sort)

    def show() -> None:
        if files:
            say(f"{files.html}\n{files.md}")
            return
        none = Text(f"there is no run in {folder}{' that fits' if all_runs else ''}")
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
    from mptrain.cli.answer import RunsAnswer

    return RunsAnswer.from_runs(runs, notes, removed)


#: Name of a folder that is being removed; it is hidden, so that it is no run any more.
_GONE = re.compile(r"\.[0-9a-f]{8}\.removed")


def size_of(root: Path) -> int:
    """Return the bytes of all files in a folder; symbolic links are not followed."""
    size = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                size += os.lstat(Path(folder, name)).st_size
    return size


def remove_run(run: Run, folder: Path) -> None:
    """Remove a run directory inside a folder, with the folders that become empty.

    It is renamed at once and then removed. If the process is killed meanwhile, `remove_leftovers` removes the rest.

    Raises:
        StorageError: The directory is not inside the folder, it has other runs or sweeps inside, a process is writing
            it or its sweep, it has changed since it was read, or it cannot be removed.
    """
    root, directory = run.paths.root, RunDirectory(run.paths)
    if root.is_symlink() or folder.resolve() not in root.resolve().parents:
        raise StorageError(f"{root} does not lie inside {folder}", "name the folder that holds it")
    if inner := _runs_inside(root):
        raise StorageError(f"{root} has another run inside, {inner}", "move it away, or remove it first")
    if writer := holder_of(SweepPaths(root.parent).lock):
        raise StorageError(f"{root} belongs to a sweep that {writer} runs", "wait until it has ended")
    with directory.lock():
        if directory.read_state() != run.state:
            raise StorageError(f"{root} has changed since it was listed", "list the runs again")
        gone = root.with_name(f".{secrets.token_hex(4)}.removed")
        with storage_errors(root, "remove"):
            root.rename(gone)
    with storage_errors(gone, "remove"):
        shutil.rmtree(gone, ignore_errors=True)  # another process may remove the same leftovers
        if gone.exists():
            shutil.rmtree(gone)
        for parent in root.parents:
            if parent.resolve() == folder.resolve() or not parent.is_dir() or any(parent.iterdir()):
                return
            parent.rmdir()


def _runs_inside(root: Path) -> Path | None:
    """Return a run or sweep below a run directory, whose own folders hold none; None if there is none."""
    for folder, _, files in os.walk(root):
        path = Path(folder)
        if path != root and not {RunPaths(path).run_json.name, SweepPaths(path).json.name}.isdisjoint(files):
            return path
    return None


def remove_leftovers(folder: Path) -> None:
    """Remove what removals that were killed have left below a folder."""
    for parent, children, _ in os.walk(folder):
        for child in filter(_GONE.fullmatch, children):
            shutil.rmtree(Path(parent, child), ignore_errors=True)
