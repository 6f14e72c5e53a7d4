"""The protocol of what runs the jobs of a sweep, and the values that pass between it, the jobs and the sweep.

`mptrain.sweep.local_executor` has processes of this machine, `mptrain.sweep.slurm_executor` a scheduler's queue. Must not import torch.
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
    """What jobs run. The functions are those of modules that do not import torch; they import it when called.

    Attributes:
        train: Trains a configuration, shows what happens on standard output and to a sink; raises where it fails.
        report: Prints an error, and returns its exit code.
        modules: What the fork server imports beforehand, so that jobs need not.
    """

    train: Callable[[Config, Sink], None]
    report: Callable[[BaseException], int]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobSpec:
    """One job of a sweep.

    Attributes:
        number: Of the job.
        words: Its command line, with those that say where its run is.
        run: Its run directory.
        log: Takes what it prints.
    """

    number: int
    words: tuple[str, ...]
    run: Path
    log: Path


@dataclass(frozen=True)
class JobProgress:
    """How a job is going.

    Attributes:
        step: Attempts so far.
        steps: Attempts planned.
        eta: Estimated seconds to its end.
        doing: ``training``, ``evaluating`` or ``saving``.
        metric_name: The first metric of the last evaluation; empty before that.
        metric: Its value.
        scales: The loss scale of each learner.
        overflows: Of all learners, since this process began.
        skipped: Refused updates of all learners.
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
    """How a job ended: ``status``, exit ``code`` (negative: killed by that signal), and why, in one line."""

    status: Literal["done", "failed", "interrupted", "preempted"]
    code: int
    reason: str = ""


def stopped(by_ctrl_c: bool, reason: str, code: int | None = None) -> JobOutcome:
    """Return the end of a job that Ctrl-C or another signal stopped; ``code`` takes the place of the usual exit code."""
    if by_ctrl_c:
        return JobOutcome("interrupted", code or EXIT_INTERRUPTED, reason)
    return JobOutcome("preempted", code or EXIT_PREEMPTED, reason)


class Listener:
    """Is told what happens, in the calling process; this one ignores it."""

    def started(self, number: int) -> None:
        """A job's process was started."""

    def progressed(self, number: int, progress: JobProgress) -> None:
        """A job said how far it is."""

    def ended(self, number: int, ended: JobOutcome, seconds: float) -> None:
        """A job has ended, so many seconds after its process was started."""

    def stopping(self, name: str) -> None:
        """A signal of this name asked for the end; no job is started any more."""

    def tick(self) -> None:
        """Some time has passed; called several times a second."""


class Executor(Protocol):
    """Runs jobs, each in a process of its own; whatever happens to one, the others go on."""

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """Run all jobs in this order; once a signal asks for the end, none is started, and those that run save themselves.

        Returns:
            None, or the exit code of the signal that ended it.

        Raises:
            EnvironmentRefused: What runs them is not there.
            StorageError: The disk refuses; nothing runs any more.
        """
