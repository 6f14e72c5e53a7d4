"""What happens inside a job of a queue: it trains one point, says in a file how that ended, and has itself queued again.

The scheduler's process imports this by name, so importing it must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from mptrain.errors import EXIT_OK, EXIT_PREEMPTED, StorageError
from mptrain.extras import load_extra
from mptrain.files import read_text
from mptrain.runlog.directory import RunDirectory
from mptrain.runlog.layout import RunPaths
from mptrain.runlog.storage import kept_in_place, write_atomically
from mptrain.runlog.sweeps import JobStatus
from mptrain.sweep.worker import Ended, Program, ended_by, one_line, print_to, print_traceback

if TYPE_CHECKING:
    from mptrain.records import Record

#: What comes some time before the end of a job's time. Ranks of NCCL and data loaders are used to it.
TIME_IS_UP = signal.SIGUSR1


@dataclass(frozen=True)
class JobSpec:
    """One point of a sweep, as it is handed to a scheduler: words, which mean the same there, and no secret.

    Attributes:
        number: Of the job.
        words: Its command line, with those that say where its run is.
        config_dirs: Further folders of groups and options.
        config_name: The file at the top.
        typed: Those of the words that the user typed; None for all (see `Composer`).
        run: Its run directory.
        log: Takes what it prints.
        told: Takes how it stands (see `Told`).
        program: What jobs run.
    """

    number: int
    words: tuple[str, ...]
    config_dirs: tuple[str, ...]
    config_name: str
    typed: tuple[str, ...] | None
    run: Path
    log: Path
    told: Path
    program: Program


@dataclass(frozen=True)
class JobResult:
    """What a job says about itself.

    Attributes:
        status: ``waiting`` once it was queued again, ``running``, or how it ended.
        code: Exit code that the training would have had.
        reason: Why it is not done, in one line.
    """

    status: JobStatus
    code: int | None = None
    reason: str = ""


def read_told(path: Path) -> JobResult | None:
    """What a job last said; None where it has said nothing that can be read."""
    try:
        found = JobResult(**json.loads(read_text(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    fine = found.status in get_args(JobStatus) and isinstance(found.reason, str) and isinstance(found.code, int | None)
    return found if fine else None


def do(errand: JobSpec) -> None:
    """The life of a job; called by submitit, in a process that the scheduler started.

    A signal that its time is up saves the run and queues the job again. One that ends it otherwise saves the run: if that was
    for another job, the scheduler will queue this one again, and if somebody cancelled it, not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
    for number in (TIME_IS_UP, signal.SIGTERM):  # until the run listens by itself; submitit would not save it
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (TIME_IS_UP, signal.SIGTERM))
    print_to(errand.log)
    _tell(errand, JobResult("running"))
    ended = _train(errand)
    again = ended.status == "preempted" and ended.reason.startswith(TIME_IS_UP.name)
    if again and not _got_on(errand.run):
        again, ended = False, Ended("preempted", EXIT_PREEMPTED, "no step was made in its time: raise timeout_min")
    if again:
        _tell(errand, JobResult("waiting"))
        try:
            _queue_again()
        except Exception as error:  # no scontrol on this node, or it refuses
            ended = Ended("preempted", EXIT_PREEMPTED, f"saved, but not queued again: {one_line(error)}")
        else:
            raise SystemExit(0)  # past submitit, which would write down that it ended
    _tell(errand, JobResult(ended.status, ended.code, ended.reason))


def _train(errand: JobSpec) -> Ended:
    report: Callable[[BaseException], int] = print_traceback
    try:
        from mptrain.config.compose import Composer

        report = errand.program.report
        config = Composer(errand.config_dirs, errand.config_name, errand.typed).compose(errand.words)
        with kept_in_place(errand.log.parent):  # the sweep's, which a run would else make anew
            errand.program.train(config, _Nobody())
    except _Stopped as stopped:
        return Ended("preempted", EXIT_PREEMPTED, f"{stopped}: stopped before it trained")
    except BaseException as error:
        return ended_by(error, report)
    return Ended("done", EXIT_OK)


class _Stopped(BaseException):
    """A signal came before the run listened; no error, so that nothing on the way takes it for one of its own."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped(signal.Signals(number).name)


def _got_on(run: Path) -> bool:
    """Whether the last attempt came further than it began: a job that does not would be queued for ever."""
    with contextlib.suppress(StorageError):
        state = RunDirectory(RunPaths(run)).read_state()
        if state is not None and state.attempts:
            last = state.attempts[-1]
            return (last.to_step or 0) > last.from_step
    return False


def _queue_again() -> None:
    """Ask the scheduler to run this job once more, from its beginning; it may end this process at once."""
    load_extra("submitit", "slurm", "--launcher").JobEnvironment()._requeue(0)


def _tell(errand: JobSpec, told: JobResult) -> None:
    with contextlib.suppress(StorageError):  # the run directory says it too
        write_atomically(errand.told, json.dumps(asdict(told)) + "\n")


class _Nobody:
    """A sink for records that nobody asked for: the run directory has them."""

    def take(self, record: Record) -> Any: ...
    def close(self) -> None: ...
