"""Interface between a sweep and its executors, which run its jobs: the `Executor` protocol, its messages and callbacks.

A job trains one point (one run) of the sweep in a process of its own. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mptrain.runlog.sweeps import JobStatus
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.runlog.record_writer import Sink


@dataclass(frozen=True)
class Program:
    """Functions that the processes of a sweep's jobs call to train a run and to report errors.

    Their modules must not import torch at the top; the functions import it when called.

    Attributes:
        train: Function that trains one configuration and sends its records to a sink. It prints progress, and raises an
            exception if the run fails.
        report: Function that prints an error and returns its exit code.
        modules: Names of modules that the fork server (the process from which CPU jobs are forked) imports in advance,
            so that jobs start faster.
    """

    train: Callable[[Config, Sink], None]
    report: Callable[[BaseException], int]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobSpec:
    """Description of one job of a sweep for an executor: the overrides of its run, and its paths.

    Attributes:
        number: Number of the job in the sweep, from 0.
        words: All ``KEY=VALUE`` overrides of the run, including those that set its run directory.
        log: File to which the job's output is appended.
    """

    number: int
    words: tuple[str, ...]
    run: Path
    log: Path


@dataclass(frozen=True)
class JobProgress:
    """Progress of a running job of a sweep, which its process reports for display.

    Attributes:
        step: Number of steps attempted so far, skipped ones included; ``steps`` is the planned number.
        eta: Estimated time to the end of the run in seconds.
        doing: Current activity: ``training``, ``evaluating`` or ``saving``.
        metric_name: Name of the first metric of the last evaluation, preferring any other to ``loss``; empty before
            the first evaluation.
        metric: Value of that metric; NaN before the first evaluation.
        scales: Current loss scale of each learner.
        overflows: Number of overflows (steps with infinite or NaN gradients) since the process started, summed
            over the learners.
        skipped: Number of skipped updates since the first step of the run, summed over the learners.
    """

    step: int
    steps: int
    eta: float
    doing: str
    metric_name: str
    metric: float
    scales: tuple[float, ...]
    overflows: int
    skipped: int


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a job of a sweep; a submitted job also writes it to a file while it has not ended.

    Attributes:
        status: ``done``, ``failed``, ``interrupted`` (by Ctrl-C) or ``preempted`` (by another signal); in the file also
            ``running``, or ``waiting`` if the job is queued again.
        code: Exit code of the job; negative if a signal of that number killed it; None before its end.
        reason: Reason why the job is not done, in one line; empty if there is none.
    """

    status: JobStatus
    code: int | None = None
    reason: str = ""


def stopped(by_ctrl_c: bool, reason: str, code: int | None = None) -> JobOutcome:
    """Return the outcome of a job that a signal has stopped before the end of its run.

    After Ctrl-C the status is ``interrupted`` and the exit code 130, after any other signal ``preempted`` and 75.
    ``code`` replaces these codes.
    """
    if by_ctrl_c:
        return JobOutcome("interrupted", code or EXIT_INTERRUPTED, reason)
    return JobOutcome("preempted", code or EXIT_PREEMPTED, reason)


class Listener:
    """Callbacks for the events of the jobs that an executor runs, called in the process of the sweep.

    The callbacks of this class do nothing; subclasses override them. ``number`` is that of the job in its
    sweep, from 0.
    """

    def started(self, number: int) -> None:
        """React to the start of a job's process."""

    def progressed(self, number: int, progress: JobProgress) -> None:
        """React to a progress report of a running job."""

    def ended(self, number: int, ended: JobOutcome, seconds: float) -> None:
        """React to the end of a job, ``seconds`` after its process started; 0 if it could not be started."""

    def stopping(self, name: str) -> None:
        """React to a signal (``name``, such as ``SIGTERM``) after which the executor starts no further job."""

    def tick(self) -> None:
        """React to the passing of time, for example refresh a display; called several times a second."""


class Executor(Protocol):
    """Protocol of objects that run a sweep's jobs, each in its own process, so that a failing job affects no other."""

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """Run jobs, started in the given order, and return when all of them have ended.

        After a signal that requests a stop, no further job is started and running jobs save their state. The result is
        the exit code of that signal, or None.

        Raises:
            EnvironmentRefused: The scheduler is not available.
            StorageError: A file cannot be written; no job is running any more.
        """
