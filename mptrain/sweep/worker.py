"""What happens inside the process of a job: it cuts itself off from the sweep's process, trains, says how it ended.

Must import neither torch nor anything that does: which GPU a process sees is decided before that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mptrain.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, MptrainError, Preempted
from mptrain.files import open_in_place
from mptrain.machine import ends_with_parent
from mptrain.masking import MaskedText
from mptrain.records import EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord
from mptrain.runlog.storage import kept_in_place, storing

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.runlog.sink import Sink

#: What a sweep passes on to its jobs (see `mptrain.engine.interrupt`).
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

#: Characters of a reason; with its frame it must fit into one atomic write to a pipe (4096 bytes).
_LONGEST_REASON = 600

#: Variable that holds the names of those that were set for the fork server alone.
OF_THE_SERVER = "MPTRAIN_OF_THE_SERVER"


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
class Assignment:
    """What a process is told.

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
class Progress:
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
class Ended:
    """How a job ended: ``status``, exit ``code`` (negative: killed by that signal), and why, in one line."""

    status: Literal["done", "failed", "interrupted", "preempted"]
    code: int
    reason: str = ""


def work(assignment: Assignment, pipe: Connection) -> None:
    """The life of a job's process; once it has said how the job ended, its own exit code means nothing.

    Args:
        assignment: What is to be done.
        pipe: Takes `Progress` and at last `Ended`, pickled.
    """
    _collect_garbage_of_its_own()
    _drop_variables_of_the_server()
    leave_the_terminal()
    die_with_parent(signal.SIGTERM)  # as if it had been asked for an orderly end
    _be_the_first_to_go()
    os.environ.update(assignment.environment)
    _tell(pipe, _work(assignment, pipe))


def answer(question: bytes, pipe: Connection) -> None:
    """The life of a process that computes one value and sends it: ``(value, None)`` or ``(None, error)``, pickled.

    Args:
        question: A pickled function without parameters.
        pipe: Takes the answer.
    """
    _collect_garbage_of_its_own()
    _drop_variables_of_the_server()
    die_with_parent(signal.SIGKILL)
    for number in ENDING_SIGNALS:  # the sweep's process ends this one
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    try:
        found: tuple[Any, BaseException | None] = (pickle.loads(question)(), None)
    except MptrainError as error:
        found = (None, error)
    pipe.send_bytes(pickle.dumps(found))


def _collect_garbage_of_its_own() -> None:
    """Look for garbage again, but not among what the fork server imported: that would copy its memory."""
    gc.freeze()
    gc.enable()


def _drop_variables_of_the_server() -> None:
    """Let what is started from here, and libraries that are not loaded yet, find the user's environment."""
    for name in os.environ.pop(OF_THE_SERVER, "").split():
        os.environ.pop(name, None)


def leave_the_terminal() -> None:
    """Become a process that Ctrl-C and the end of the terminal do not reach."""
    with contextlib.suppress(PermissionError):  # it leads a group of its own already
        os.setsid()


def die_with_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when the one that started it ends, whatever ended it."""
    ends_with_parent(number)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():  # it was over before that
        os._exit(EXIT_BUG)


def one_line(error: BaseException) -> str:
    """An error as a reason."""
    if isinstance(error, SystemExit):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"sys.exit({error.code!r}) in {Path(last.filename).name}:{last.lineno}"[:_LONGEST_REASON]
    lines = str(error).strip().splitlines()
    name = "" if isinstance(error, MptrainError) else f"{type(error).__name__}: "
    return (name + (lines[0] if lines else "no message"))[:_LONGEST_REASON]


def _be_the_first_to_go() -> None:
    """Where memory runs out, the kernel shall end a job, not the sweep that has others."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _work(assignment: Assignment, pipe: Connection) -> Ended:
    report: Callable[[BaseException], int] = print_traceback
    try:
        with kept_in_place(assignment.log.parent):  # the sweep's, which a run would else make anew
            print_to(assignment.log)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
            program, config = pickle.loads(assignment.work)
            report = program.report
            if assignment.threads is not None:
                import torch

                torch.set_num_threads(min(assignment.threads, torch.get_num_threads()))
            program.train(config, _ToParent(pipe))
    except BaseException as error:
        return ended_by(error, report)
    return Ended("done", EXIT_OK)


def ended_by(error: BaseException, report: Callable[[BaseException], int]) -> Ended:
    """How a job ended whose training raised this, which is printed."""
    if isinstance(error, Preempted):
        report(error)
        status: Literal["interrupted", "preempted"] = "preempted"
        if error.exit_code == EXIT_INTERRUPTED:
            status = "interrupted"
        return Ended(status, error.exit_code, one_line(error))
    if isinstance(error, KeyboardInterrupt):
        return Ended("interrupted", EXIT_INTERRUPTED, "interrupted before it began to train")
    if isinstance(error, SystemExit):
        print_traceback(error)
        return Ended("failed", error.code if isinstance(error.code, int) and error.code else EXIT_BUG, one_line(error))
    if not isinstance(error, MptrainError):
        print_traceback(error)
    return Ended("failed", report(error), one_line(error))


def print_traceback(error: BaseException) -> int:
    """Print where an error came from; returns the exit code of a bug."""
    traceback.print_exception(error)
    return EXIT_BUG


def print_to(log: Path) -> None:
    """Send everything that is printed from here on, by any library, to a file."""
    with storing(log):
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


def _tell(pipe: Connection, ended: Ended) -> None:
    """Say how it ended, to a reader that may be stopped for a while, or gone."""
    with contextlib.suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.set_blocking(pipe.fileno(), True)
        if select.select([], [pipe.fileno()], [], 10.0)[1]:
            pipe.send_bytes(pickle.dumps(ended))
        pipe.close()


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
        progress = Progress(
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
