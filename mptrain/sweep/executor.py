"""The `Executor` protocol for running the jobs of a sweep, and the messages between executor, jobs and sweep.

`mptrain.sweep.local_executor` implements it with local processes, `mptrain.sweep.slurm_executor` with Slurm. This
module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from mptrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.runlog.sink import Sink


@dataclass(frozen=True)
class Program:
    """The functions that jobs run. Their modules must not import torch at the top; the functions import it when called.

    Attributes:
        train: Trains a configuration and sends its records to a sink; prints progress; raises on failure.
        report: Prints an error and returns its exit code.
        modules: Modules that the fork server imports in advance, so that jobs start faster.
    """

    train: Callable[[Config, Sink], None]
    report: Callable[[BaseException], int]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobSpec:
    """One job of a sweep.

    Attributes:
        number: Number of the job.
        words: Its overrides, including those that set its run directory.
        run: Its run directory.
        log: File for its output.
    """

    number: int
    words: tuple[str, ...]
    run: Path
    log: Path


@dataclass(frozen=True)
class JobProgress:
    """Progress of a running job.

    Attributes:
        step: Attempted steps so far.
        steps: Planned steps.
        eta: Estimated remaining time in seconds.
        doing: ``training``, ``evaluating`` or ``saving``.
        metric_name: Name of the first metric of the last evaluation; empty before that.
        metric: Value of that metric.
        scales: The loss scale of each learner.
        overflows: Number of overflows of all learners since the process started.
        skipped: Number of skipped updates of all learners.
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
    """Outcome of a job: ``status``, exit ``code`` (negative if killed by a signal) and ``reason`` in one line."""

    status: Literal["done", "failed", "interrupted", "preempted"]
    code: int
    reason: str = ""


def stopped(by_ctrl_c: bool, reason: str, code: int | None = None) -> JobOutcome:
    """Return the outcome of a job stopped by Ctrl-C or another signal; ``code`` overrides the usual exit code."""
    if by_ctrl_c:
        return JobOutcome("interrupted", code or EXIT_INTERRUPTED, reason)
    return JobOutcome("preempted", code or EXIT_PREEMPTED, reason)


class Listener:
    """Callbacks for the events of an executor, called in the calling process. This class ignores all events."""

    def started(self, number: int) -> None:
        """Handle the start of a job's process."""

    def progressed(self, number: int, progress: JobProgress) -> None:
        """Handle a progress report of a job."""

    def ended(self, number: int, ended: JobOutcome, seconds: float) -> None:
        """Handle the end of a job, ``seconds`` after the start of its process."""

    def stopping(self, name: str) -> None:
        """Handle a stop request by the signal ``name``; no further job is started."""

    def tick(self) -> None:
        """Handle the passing of time; called several times a second."""


class Executor(Protocol):
    """Runs jobs, each in its own process, so that a failing job does not affect the others."""

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """Run all jobs in the given order.

        After a signal that requests a stop, no further job is started and running jobs save their state.

        Returns:
            The exit code of the signal that stopped the jobs, or None.

        Raises:
            EnvironmentRefused: The scheduler is not available.
            StorageError: A file cannot be written; no job is running any more.
        """
