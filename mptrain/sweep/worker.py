"""Runs inside the process of a job: trains one point, and says how it ended, to the sweep's process or in a file.

Must import neither torch nor anything that does: which GPU a process sees is decided before that, and the process that a
scheduler starts imports this by name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, get_args

from mptrain.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, MptrainError, Preempted, StorageError
from mptrain.extras import load_extra
from mptrain.files import open_in_place, read_text
from mptrain.masking import MaskedText
from mptrain.records import EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord
from mptrain.runlog.atomic_files import require_folder_stays, storage_errors, write_atomically
from mptrain.runlog.directory import RunDirectory
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sink import Fanout, Sink
from mptrain.runlog.sweeps import JobStatus
from mptrain.sweep.executor import JobOutcome, JobProgress, JobSpec, Program, stopped
from mptrain.sweep.processes import ENDING_SIGNALS, detach_from_terminal, die_with_parent, reset_after_fork

if TYPE_CHECKING:
    from mptrain.config.schema import Config

#: What comes some time before the end of a job's time at a scheduler. Ranks of NCCL and data loaders are used to it.
TIME_IS_UP = signal.SIGUSR1

#: Characters of a reason; with its frame it must fit into one atomic write to a pipe (4096 bytes).
_LONGEST_REASON = 600


@dataclass(frozen=True)
class LocalJob:
    """What a process of this machine is told.

    Attributes:
        work: The pickled `Program` and `Config`; unpickling may import torch.
        log: Takes what the job prints.
        environment: Variables to be set before torch is imported.
        threads: CPU threads of torch at most; None leaves torch's own choice.
    """

    work: bytes
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None


@dataclass(frozen=True)
class SubmittedJob:
    """One point of a sweep, as it is handed to a scheduler: words, which mean the same there, and no secret.

    Attributes:
        job: Its command line and places.
        config_dirs: Further folders of groups and options.
        config_name: The file at the top.
        typed: Those of the words that the user typed; None for all (see `Composer`).
        result: Takes how it stands (see `JobResult`).
        program: What jobs run.
    """

    job: JobSpec
    config_dirs: tuple[str, ...]
    config_name: str
    typed: tuple[str, ...] | None
    result: Path
    program: Program


@dataclass(frozen=True)
class JobResult:
    """What a submitted job says about itself.

    Attributes:
        status: ``waiting`` once it was queued again, ``running``, or how it ended.
        code: Exit code that the training would have had.
        reason: Why it is not done, in one line.
    """

    status: JobStatus
    code: int | None = None
    reason: str = ""


def run_job(assignment: LocalJob, pipe: Connection) -> None:
    """Run a job in a process of this machine; once it has said how the job ended, its own exit code means nothing.

    Args:
        assignment: What is to be done.
        pipe: Takes `JobProgress` and at last `JobOutcome`, pickled.
    """
    reset_after_fork()
    detach_from_terminal()
    die_with_parent(signal.SIGTERM)  # as if it had been asked for an orderly end
    with contextlib.suppress(
        OSError
    ):  # where memory runs out, the kernel shall end a job, not the sweep that has others
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ.update(assignment.environment)

    def prepare() -> tuple[Program, Config]:
        print_to(assignment.log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        program, config = pickle.loads(assignment.work)
        return program, config

    ended = _train(prepare, assignment.log, print_traceback, _ToParent(pipe), assignment.threads)
    with contextlib.suppress(OSError):  # the reader may be stopped for a while, or gone
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.set_blocking(pipe.fileno(), True)
        if select.select([], [pipe.fileno()], [], 10.0)[1]:
            pipe.send_bytes(pickle.dumps(ended))
        pipe.close()


def run_submitted_job(submission: SubmittedJob) -> None:
    """Run a job; called by submitit, in a process that the scheduler started.

    A signal that its time is up saves the run and queues the job again. One that ends it otherwise saves the run: if that was
    for another job, the scheduler will queue this one again, and if somebody cancelled it, not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
    for number in (TIME_IS_UP, signal.SIGTERM):  # until the run listens by itself; submitit would not save it
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (TIME_IS_UP, signal.SIGTERM))
    job, program = submission.job, submission.program
    print_to(job.log)
    _write_result(submission, JobResult("running"))

    def prepare() -> tuple[Program, Config]:
        from mptrain.config.compose import Composer

        composer = Composer(submission.config_dirs, submission.config_name, submission.typed)
        return program, composer.compose(job.words)

    ended = _train(prepare, job.log, program.report, Fanout(()))  # the run directory has the records
    again = ended.status == "preempted" and ended.reason.startswith(TIME_IS_UP.name)
    if again and not _got_on(job.run):
        again, ended = False, JobOutcome("preempted", EXIT_PREEMPTED, "no step was made in its time: raise timeout_min")
    if again:
        _write_result(submission, JobResult("waiting"))
        try:
            load_extra("submitit", "slurm", "--launcher").JobEnvironment()._requeue(
                0
            )  # it may end this process at once
        except Exception as error:  # no scontrol on this node, or it refuses
            ended = JobOutcome("preempted", EXIT_PREEMPTED, f"saved, but not queued again: {one_line(error)}")
        else:
            raise SystemExit(0)  # past submitit, which would write down that it ended
    _write_result(submission, JobResult(ended.status, ended.code, ended.reason))


def read_result(path: Path) -> JobResult | None:
    """Return what a submitted job last said; None where it has said nothing that can be read."""
    try:
        found = JobResult(**json.loads(read_text(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    fine = found.status in get_args(JobStatus) and isinstance(found.reason, str) and isinstance(found.code, int | None)
    return found if fine else None


def one_line(error: BaseException) -> str:
    """Return an error as a reason."""
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"sys.exit({error.code!r}) in {Path(last.filename).name}:{last.lineno}"[:_LONGEST_REASON]
    lines = str(error).strip().splitlines()
    name = "" if isinstance(error, MptrainError) else f"{type(error).__name__}: "
    return (name + (lines[0] if lines else "no message"))[:_LONGEST_REASON]


def print_traceback(error: BaseException) -> int:
    """Print where an error came from; returns the exit code of a bug."""
    traceback.print_exception(error)
    return EXIT_BUG


def print_to(log: Path) -> None:
    """Send everything that is printed from here on, by any library, to a file."""
    with storage_errors(log):
        descriptor = open_in_place(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        opened = open(number, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, MaskedText(opened, encoding="utf-8", errors="backslashreplace", line_buffering=True))
    faulthandler.enable()  # a crash of a library leaves the place where it happened


def _train(
    prepare: Callable[[], tuple[Program, Config]],
    log: Path,
    report: Callable[[BaseException], int],
    sink: Sink,
    threads: int | None = None,
) -> JobOutcome:
    """Train what ``prepare`` returns, and report what it raises; ``report`` does until the program is known."""
    try:
        with require_folder_stays(log.parent):  # the sweep's, which a run would else make anew
            program, config = prepare()
            report = program.report
            if threads is not None:
                import torch

                torch.set_num_threads(min(threads, torch.get_num_threads()))
            program.train(config, sink)
    except _Stopped as error:
        return stopped(False, f"{error}: stopped before it trained")
    except Preempted as error:
        report(error)
        return stopped(error.exit_code == EXIT_INTERRUPTED, one_line(error), error.exit_code)
    except KeyboardInterrupt:
        return stopped(True, "interrupted before it began to train")
    except SystemExit as error:
        print_traceback(error)
        return JobOutcome(
            "failed", error.code if isinstance(error.code, int) and error.code else EXIT_BUG, one_line(error)
        )
    except BaseException as error:
        if not isinstance(error, MptrainError):
            print_traceback(error)
        return JobOutcome("failed", report(error), one_line(error))
    return JobOutcome("done", EXIT_OK)


class _Stopped(BaseException):
    """A signal came before the run listened; no error, so that nothing on the way takes it for one of its own."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped(signal.Signals(number).name)


def _got_on(run: Path) -> bool:
    """Return whether the last attempt came further than it began: a job that does not would be queued for ever."""
    with contextlib.suppress(StorageError):
        state = RunDirectory(RunPaths(run)).read_state()
        if state is not None and state.attempts:
            last = state.attempts[-1]
            return (last.to_step or 0) > last.from_step
    return False


def _write_result(submission: SubmittedJob, result: JobResult) -> None:
    with contextlib.suppress(StorageError):  # the run directory says it too
        write_atomically(submission.result, json.dumps(asdict(result)) + "\n")


class _ToParent:
    """A sink that tells the sweep how far the job is, and rather says nothing than waits."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        os.set_blocking(pipe.fileno(), False)
        self._steps: dict[str, StepRecord] = {}
        self._overflows = 0
        self._metric = ("", float("nan"))
        self._last: ProgressRecord | None = None

    def take(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._steps[record.learner] = record
        elif isinstance(record, OverflowRecord):
            self._overflows += 1
        elif isinstance(record, EvalRecord):
            self._metric = min(record.metrics.items(), key=lambda item: item[0] == "loss")
            self._send()
        elif isinstance(record, ProgressRecord):
            self._last = record
            self._send()

    def close(self) -> None:
        """The pipe outlives the training."""

    def _send(self) -> None:
        if self._last is None:
            return
        progress = JobProgress(
            step=self._last.step,
            steps=self._last.steps,
            eta=self._last.eta,
            doing=self._last.doing,
            metric_name=self._metric[0],
            metric=self._metric[1],
            scales=tuple(step.loss_scale for step in self._steps.values()),
            overflows=self._overflows,
            skipped=sum(step.step - step.updates for step in self._steps.values()),
        )
        with contextlib.suppress(OSError):  # full, or nobody reads it: the next one will do
            self._pipe.send_bytes(pickle.dumps(progress))
