"""Runs the points of a sweep, one after another, and knows how each ended.

How a point is run is a `Launcher`: here one process runs them in turn; one that starts processes in parallel
takes the same points and yields the same outcomes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mptrain.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_SWEEP,
    MptrainError,
    StorageError,
)
from mptrain.runlog.layout import RunPaths
from mptrain.runlog.naming import fresh_name
from mptrain.runlog.storage import storing
from mptrain.runlog.summary import read_summary

if TYPE_CHECKING:
    from pathlib import Path

    from mptrain.campaign.points import Point
    from mptrain.config.compose import Composer
    from mptrain.config.schema import Config

_STATUS = {EXIT_OK: "done", EXIT_INTERRUPTED: "interrupted", EXIT_PREEMPTED: "preempted"}
_STOPPING = (EXIT_INTERRUPTED, EXIT_PREEMPTED)


@dataclass(frozen=True)
class Job:
    """A point and where it runs.

    Attributes:
        point: What is run.
        config: Its configuration, run directory included.
        root: Its run directory.
    """

    point: Point
    config: Config
    root: Path


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        job: The job.
        code: Its exit code; None where it was never started.
        summary: Its final numbers; empty where it has none.
        reason: Why it failed, in one line; empty where nothing was raised.
    """

    job: Job
    code: int | None
    summary: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def status(self) -> str:
        """One word: done, failed, interrupted, preempted, not run."""
        return "not run" if self.code is None else _STATUS.get(self.code, "failed")


Train = Callable[["Config"], int]
Report = Callable[[BaseException], int]
Launcher = Callable[[Sequence[Job]], Iterator[JobOutcome]]


def in_this_process(train: Train, report: Report, announce: Callable[[Job], None]) -> Launcher:
    """A launcher that runs jobs in turn; what one raises never ends the others, except Ctrl-C and signals.

    Args:
        train: Trains one configuration and returns an exit code.
        report: Prints an error and returns its exit code.
        announce: Called before each job.
    """

    def launch(jobs: Sequence[Job]) -> Iterator[JobOutcome]:
        for job in jobs:
            announce(job)
            code, reason = _run(job, train, report)
            yield JobOutcome(job, code, _summary(job), reason)
            if code in _STOPPING:
                return

    return launch


def prepare(points: Sequence[Point], composer: Composer, folder: Path) -> list[Job]:
    """Gives each point its run directory, ``FOLDER/NNN-OVERRIDES``; nothing is written.

    Raises:
        ConfigError: A point is wrong; `mptrain.campaign.points.validate` says so earlier and better.
    """
    jobs = []
    for point in points:
        name = directory_name(point)
        words = (*point.overrides, f"run.root={quoted(str(folder))}", f"run.name={quoted(name)}")
        jobs.append(Job(point, composer.compose(words), folder / name))
    return jobs


def run(jobs: Sequence[Job], launcher: Launcher) -> tuple[list[JobOutcome], int]:
    """Runs all jobs.

    Returns:
        The outcome of every job in order, and the exit code: 0, 7 where a job failed, or that of the signal
        that ended the sweep.
    """
    outcomes = {}
    for outcome in launcher(jobs):
        outcomes[outcome.job.point.number] = outcome
    every = [outcomes.get(job.point.number, JobOutcome(job, None)) for job in jobs]
    for outcome in every:
        if outcome.code in _STOPPING:
            return every, int(outcome.code or EXIT_INTERRUPTED)
    return every, EXIT_OK if all(outcome.code == EXIT_OK for outcome in every) else EXIT_SWEEP


def sweep_folder(root: Path, name: str | None) -> Path:
    """The folder of a sweep's runs: ``ROOT/NAME``, or ``ROOT/sweeps/DATE/TIME-xxxx`` that no other has.

    Raises:
        StorageError: It cannot be made.
    """
    if name is not None:
        return root / name
    for _ in range(100):
        date, moment = fresh_name("sweep")
        folder = root / "sweeps" / date / moment.replace("-sweep-", "-")
        with storing(folder, "create"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    raise StorageError(f"no free name for a sweep below {root}", "choose one with run.name=NAME")


def words_to_finish(words: Sequence[str], root: Path, folder: Path) -> list[str]:
    """The overrides under which the same sweep goes on in its folder: what is done stays, the rest is run.

    Args:
        words: The overrides that it was started with.
        root: Its ``run.root``.
        folder: Its folder, below ``root``.
    """
    kept = [word for word in words if word.lstrip("+").split("=", 1)[0] not in ("run.name", "run.resume")]
    name = folder.relative_to(root).as_posix()
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", name, re.ASCII)
    return [*kept, f"run.name={name if plain else quoted(name)}", "run.resume=auto"]


def directory_name(point: Point) -> str:
    """``NNN-OVERRIDES``: sortable, readable, safe in a path."""
    text = re.sub(r"[^A-Za-z0-9._=+,-]+", "_", ",".join(point.varied))[:100].strip("_.")
    return f"{point.number:03d}-{text}" if text else f"{point.number:03d}"


def quoted(text: str) -> str:
    """A value in Hydra's quotes, where a backslash counts only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), text) + "'"


def exit_code_of(leaving: SystemExit) -> int:
    """The exit code that a SystemExit asks for."""
    if leaving.code is None:
        return EXIT_OK
    return leaving.code if isinstance(leaving.code, int) else EXIT_BUG


def _run(job: Job, train: Train, report: Report) -> tuple[int, str]:
    try:
        return train(job.config), ""
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED, ""
    except SystemExit as leaving:
        return exit_code_of(leaving), ""
    except Exception as error:
        lines = str(error).strip().splitlines()
        name = "" if isinstance(error, MptrainError) else f"{type(error).__name__}: "
        return report(error), name + (lines[0] if lines else "no message")


def _summary(job: Job) -> dict[str, Any]:
    try:
        return read_summary(RunPaths(job.root).summary)
    except MptrainError:
        return {}
