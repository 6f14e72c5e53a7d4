"""Code of the process of a sweep's job: trains one point and reports the outcome to the sweep's process or in a file.

It must not import torch, directly or indirectly, because ``CUDA_VISIBLE_DEVICES`` must be set first. The process that a
scheduler starts imports this module by name.
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
from typing import TYPE_CHECKING, get_args

from mptrain.engine.interrupt import imports_or_composes
from mptrain.runlog.atomic_files import require_folder_stays, storage_errors, write_atomically
from mptrain.runlog.directory import RunDirectory
from mptrain.runlog.record_writer import Fanout, Sink
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sweeps import JobStatus
from mptrain.study.sweep.executor import JobOutcome, JobProgress, JobSpec, Program, stopped
from mptrain.study.sweep.processes import ENDING_SIGNALS, detach_from_terminal, die_with_parent, reset_after_fork
from mptrain.system.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    MptrainError,
    Preempted,
    StorageError,
)
from mptrain.system.files import open_in_place, read_text
from mptrain.system.machine import load_extra
from mptrain.system.masking import MaskedText
from mptrain.system.records import EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord

if TYPE_CHECKING:
    from mptrain.config.schema import Config

#: Signal that the scheduler sends shortly before a job's time limit. NCCL and data loaders tolerate it.
TIME_IS_UP = signal.SIGUSR1

#: Maximum length of a reason in characters; pickled, it must fit into one atomic write to a pipe (4096 bytes).
_LONGEST_REASON = 600


@dataclass(frozen=True)
class LocalJob:
    """Input of the process of one local job of a sweep.

    Attributes:
        work: The pickled `Program` and `Config`; unpickling may import torch.
        log: File to which the output of the job is appended.
        environment: Environment variables to set before torch is imported.
        threads: Maximum number of torch's CPU threads; None keeps torch's default.
    """

    work: bytes
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None


@dataclass(frozen=True)
class SubmittedJob:
    """Input of one job of a sweep that is submitted to a scheduler such as Slurm.

    It holds overrides, which the job composes to a configuration where it runs, and no secrets.

    Attributes:
        config_dirs: Additional configuration folders.
        config_name: Name of the primary configuration file.
        typed: The overrides that the user typed; None if all are (see `Composer`).
        result: File to which the job writes its status (see `JobOutcome`).
    """

    job: JobSpec
    config_dirs: tuple[str, ...]
    config_name: str
    typed: tuple[str, ...] | None
    result: Path
    program: Program


def run_job(assignment: LocalJob, pipe: Connection) -> None:
    """Train one point of a sweep in a process that a `LocalExecutor` started, and report the outcome.

    Pickled `JobProgress` messages and a final `JobOutcome` are sent through the pipe. Once the outcome is sent, the
    exit code of the process is irrelevant.
    """
    reset_after_fork()
    detach_from_terminal()
    die_with_parent(signal.SIGTERM)  # a graceful stop
    with contextlib.suppress(OSError):  # if memory runs out, the kernel kills a job rather than the sweep
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ.update(assignment.environment)

    def prepare() -> tuple[Program, Config]:
        print_to(assignment.log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        program, config = pickle.loads(assignment.work)
        return program, config

    ended = _train(prepare, assignment.log, print_traceback, _ToParent(pipe), assignment.threads)
    with contextlib.suppress(OSError):  # the reader may be suspended or dead
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.set_blocking(pipe.fileno(), True)
        if select.select([], [pipe.fileno()], [], 10.0)[1]:
            pipe.send_bytes(pickle.dumps(ended))
        pipe.close()


def run_submitted_job(submission: SubmittedJob) -> None:
    """Train one point of a sweep in a process that a scheduler started, and write its status to the result file.

    submitit calls this function. On the time limit signal the run is saved and the job queued again. On other stop
    signals the run is saved; the scheduler queues the job again if it was preempted, but not if a user cancelled it.

    Raises:
        SystemExit: The job was queued again; submitit must not record it as finished.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if imports_or_composes(frame):  # libraries swallow exceptions there, and the job would train on
            _finish(submission, _before_training(name))
            os._exit(EXIT_PREEMPTED)
        raise _Stopped(name)

    for number in (TIME_IS_UP, signal.SIGTERM):  # until the run installs its own handlers, instead of submitit's
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (TIME_IS_UP, signal.SIGTERM))
    job, program = submission.job, submission.program
    print_to(job.log)
    _write_result(submission, JobOutcome("running"))

    def prepare() -> tuple[Program, Config]:
        from mptrain.config.compose import Composer

        composer = Composer(submission.config_dirs, submission.config_name, submission.typed)
        return program, composer.compose(job.words)

    _finish(submission, _train(prepare, job.log, program.report, Fanout(())))  # the run directory has the records


def _finish(submission: SubmittedJob, ended: JobOutcome) -> None:
    """Write the outcome of a submitted job, and queue it again if its time was up and it can go on."""
    again = ended.status == "preempted" and ended.reason.startswith(TIME_IS_UP.name)
    if again and not _got_on(submission.job.run):
        reason = "no step was completed within the time limit: raise timeout_min"
        again, ended = False, JobOutcome("preempted", EXIT_PREEMPTED, reason)
    if again:
        _write_result(submission, JobOutcome("waiting"))
        try:  # _requeue may end this process at once
            load_extra("submitit", "slurm", "--launcher").JobEnvironment()._requeue(0)
        except Exception as error:  # scontrol is missing on this node, or fails
            ended = JobOutcome("preempted", EXIT_PREEMPTED, f"saved, but not queued again: {one_line(error)}")
        else:
            raise SystemExit(0)  # returning would let submitit record the job as finished
    _write_result(submission, ended)


def read_result(path: Path) -> JobOutcome | None:
    """Read the status that a submitted job wrote last; None if there is none yet or the file is unreadable."""
    try:
        saved = JobOutcome(**json.loads(read_text(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    fine = saved.status in get_args(JobStatus) and isinstance(saved.reason, str) and isinstance(saved.code, int | None)
    return saved if fine else None


def one_line(error: BaseException) -> str:
    """Return an exception as a reason in one line of at most 600 characters, for the status of a job.

    The line is the first of the message, after the type for exceptions other than `MptrainError`. For SystemExit it
    states the exit code and the place of the call.
    """
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"sys.exit({error.code!r}) in {Path(last.filename).name}:{last.lineno}"[:_LONGEST_REASON]
    lines = str(error).strip().splitlines()
    name = "" if isinstance(error, MptrainError) else f"{type(error).__name__}: "
    return (name + (lines[0] if lines else "no message"))[:_LONGEST_REASON]


def print_traceback(error: BaseException) -> int:
    """Print the traceback of an unexpected exception, and return 1, the exit code of a bug."""
    traceback.print_exception(error)
    return EXIT_BUG


def print_to(log: Path) -> None:
    """Append all further output of this process to a file, including that of libraries and of Python's crash handler.

    Secrets in text that Python prints are masked. Raise StorageError if the file cannot be opened.
    """
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
    faulthandler.enable()  # prints the stack if a library crashes


def _train(
    prepare: Callable[[], tuple[Program, Config]],
    log: Path,
    report: Callable[[BaseException], int],
    sink: Sink,
    threads: int | None = None,
) -> JobOutcome:
    """Train a point and return the outcome of its job.

    ``prepare`` returns the program and the configuration of the point; ``report`` reports errors until then. The folder
    of the log file, the sweep's, must stay in place. ``threads`` of None keeps torch's default.
    """
    try:
        with require_folder_stays(log.parent):  # so that a run does not create a removed sweep folder again
            program, config = prepare()
            report = program.report
            if threads is not None:
                import torch

                torch.set_num_threads(min(threads, torch.get_num_threads()))
            program.train(config, sink)
    except _Stopped as error:
        return _before_training(str(error))
    except Preempted as error:
        report(error)
        return stopped(error.exit_code == EXIT_INTERRUPTED, one_line(error), error.exit_code)
    except KeyboardInterrupt:
        return stopped(True, "interrupted before training started")
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
    """Stop signal that arrives before the run handles signals itself; not caught by ``except Exception``."""


def _before_training(name: str) -> JobOutcome:
    return stopped(False, f"{name}: stopped before training started")


def _got_on(run: Path) -> bool:
    """Return whether the last attempt completed a step; without this check a job could be queued again for ever."""
    with contextlib.suppress(StorageError):
        state = RunDirectory(RunPaths(run)).read_state()
        if state is not None and state.attempts:
            last = state.attempts[-1]
            return (last.to_step or 0) > last.from_step
    return False


def _write_result(submission: SubmittedJob, result: JobOutcome) -> None:
    with contextlib.suppress(StorageError):  # the run directory has the same information
        write_atomically(submission.result, json.dumps(asdict(result)) + "\n")


class _ToParent:
    """Sink that sends the progress of a run to the sweep's process. It drops messages instead of blocking."""

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
        """Do nothing: the pipe is still needed for the outcome."""

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
        with contextlib.suppress(OSError):  # the pipe is full or closed; a later message replaces this one
            self._pipe.send_bytes(pickle.dumps(progress))
