"""``mptrain runs [FOLDER]``: lists the runs below a folder, the newest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.numerics.words import UNKNOWN, moment, number
from mptrain.report.page import Bullets, Text, table
from mptrain.runlog.directory import runs_below
from mptrain.runlog.run_reader import Run, read_run
from mptrain.system.errors import EXIT_OK, StorageError

if TYPE_CHECKING:
    from argparse import Namespace


@dataclass(frozen=True)
class ListedRun:
    """Run in a list.

    Attributes:
        path: The run directory.
        status: ``done``, ``failed``, ``preempted``, ``running``, or ``killed`` while running.
        started: Start of its last attempt in UTC, ISO 8601; empty if unknown.
        overrides: Its ``KEY=VALUE`` overrides.
        steps: Number of attempted steps at the end of its last attempt; null if that has not ended.
        metric_name: Name of its final metric; null without one, and ``metric`` its value.
        reason: Reason why it ended; empty if it is done.
    """

    path: str
    status: str
    started: str
    overrides: tuple[str, ...]
    steps: int | None
    metric_name: str | None
    metric: float | None
    reason: str


def list_runs(arguments: Namespace) -> Outcome:
    """List the runs below a folder, the newest first.

    Args:
        arguments: Parsed command line: at most one folder, ``outputs`` by default.

    Returns:
        The runs, with the exit code 0.

    Raises:
        StorageError: The folder does not exist.
    """
    folder = Path(next(iter(arguments.words), "outputs")).expanduser()
    if not folder.is_dir():
        raise StorageError(f"there is no folder {folder}", "give the folder that holds the runs, run.root")
    runs, notes = [], []
    for directory in runs_below(folder):
        try:
            runs.append(_listed(read_run(directory.root), held=directory.holder() is not None))
        except StorageError as error:
            notes.append(str(error))
    runs.sort(key=lambda run: run.started, reverse=True)

    data = {"runs": runs, "notes": notes}
    return Outcome(EXIT_OK, lambda: _print(runs, notes, folder), lambda answers: answers.RunsAnswer(**data))


def _listed(run: Run, *, held: bool) -> ListedRun:
    state, summary = run.state, run.summary
    last = state.attempts[-1] if state.attempts else None
    return ListedRun(
        path=str(run.paths.root),
        status="killed" if state.status == "running" and not held else state.status,
        started=last.started if last else "",
        overrides=run.overrides,
        steps=last.to_step if last else None,
        metric_name=summary.get("metric_name"),
        metric=summary.get("metric"),
        reason=state.reason,
    )


def _print(runs: list[ListedRun], notes: list[str], folder: Path) -> None:
    rows = [
        (
            run.path,
            run.status,
            moment(run.started),
            UNKNOWN if run.steps is None else f"{run.steps:,}",
            f"{run.metric_name} {number(run.metric)}" if run.metric_name else "",
            " ".join(run.overrides),
        )
        for run in runs
    ]
    head = ("run", "status", "started", "steps", "metric", "overrides")
    print_blocks(
        table(head, rows, numeric=(3,)) if rows else Text(f"there is no run in {folder}"), Bullets(tuple(notes))
    )
