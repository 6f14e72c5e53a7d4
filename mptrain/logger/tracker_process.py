"""Isolation of trackers: each runs in a separate process, so that it cannot affect training.

Trackers patch exit hooks, start threads, ask for passwords and wait for networks (W&B 0.31 delays the end of a process
by 86 s if its server does not answer). The training process writes to a non-blocking pipe and kills a tracker that
does not finish in time. The tracker's process ends on a message from the run, or when the pipe closes because training
was killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, BinaryIO, Final, NoReturn

from mptrain.logger.base import Logger, TrackedRun, Tracker
from mptrain.system.files import open_in_place
from mptrain.system.interpreter import command
from mptrain.system.masking import MaskedText
from mptrain.system.records import EventRecord, Record

#: Seconds between two writes to the tracker.
PAUSE: Final = 0.5

#: Maximum number of bytes that wait for a tracker, about 200,000 steps; later records are dropped.
MOST_WAITING: Final = 1 << 24

#: Maximum number of bytes of a tracker's output that an attempt at a run keeps.
MOST_PRINTED: Final = 10_000_000

_PIECE: Final = 1 << 16

#: Signals that the tracker ignores. A batch system sends them to every process of a job, but training decides when to
#: stop.
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

#: Seconds that the end of a run waits for a tracker without ``close_seconds``.
CLOSE_SECONDS: Final = 10.0


class TrackerProcess:
    """Sink that passes a run's records to an experiment tracker in another process.

    Training steps never wait for the tracker: if it does not keep up, records are dropped, and a tracker that fails is
    given up with a warning. Only `close` waits, for a limited time.

    Args:
        logger: Options of the tracker.
        run: Facts about the run for the tracker.
        log: File for everything that the tracker prints.
        warnings: Receiver of one ``warning`` event if the tracker fails; called only inside `take` and `close`.
    """

    def __init__(self, logger: Logger, run: TrackedRun, log: Path, warnings: Tracker) -> None:
        self._name = type(logger).__name__
        self._patience = _patience(logger)
        self._log = log
        self._warnings: Tracker | None = warnings
        self._step = run.from_step
        self._fresh: list[Record] = []
        self._waiting = bytearray()
        self._written = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._waiting += pickle.dumps((logger, run))
            self._process = self._start()
        except Exception as error:  # no process can be started, or a user's class cannot be pickled
            self._warn(f"cannot be started: {error}")

    def take(self, record: Record) -> None:
        """Buffer a record for the tracker without waiting for it.

        Every `PAUSE` seconds, as much of the buffer is written to the pipe as it accepts without blocking.
        """
        if self._process is None:
            return
        self._step = record.step
        self._fresh.append(record)
        if time.monotonic() - self._written >= PAUSE:
            self._write(self._process)
            if self._process.poll() is not None:
                self._bury(self._process)
                self._warn("ended before the run")

    def close(self) -> None:
        """Send the remaining records, wait for the tracker, and kill it if it does not finish in ``close_seconds``."""
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + self._patience
        try:
            self._write(process)
            # Data workers inherit the pipe, so closing it here would not signal the end.
            self._waiting += pickle.dumps(None)
            self._push(process)
            while self._waiting and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
                self._push(process)
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warn(f"did not finish within logger.close_seconds={self._patience:g} and was killed")
        finally:
            self._bury(process)

    def _start(self) -> subprocess.Popen[bytes]:
        with os.fdopen(open_in_place(self._log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            self._began = output.tell()
            process = subprocess.Popen(
                command("-c", "from mptrain.logger.tracker_process import main; main()"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # without Ctrl-C and without a terminal for password prompts
            )
        os.set_blocking(_pipe(process).fileno(), False)
        return process

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        self._written = time.monotonic()
        records, self._fresh = self._fresh, []
        if len(self._waiting) > MOST_WAITING:
            self._warn("does not keep up: records are dropped")
        elif records:
            self._waiting += pickle.dumps(records)
        self._push(process)

    def _push(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(
            OSError
        ):  # the pipe is full, or closed because the process ended, which `poll` detects
            while self._waiting:
                del self._waiting[: os.write(_pipe(process).fileno(), self._waiting[:_PIECE])]

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._fresh = None, []
        unfinished = process.poll() is None
        if process.returncode != 0:  # kill its child processes too
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if unfinished:
            process.wait()
        elif process.returncode > 0:
            self._warn(f"failed: {self._last_words()}")
        elif process.returncode < 0:
            self._warn(f"was killed by {signal.Signals(-process.returncode).name}")
        _pipe(process).close()

    def _warn(self, what: str) -> None:
        warnings, self._warnings = self._warnings, None
        if warnings is not None:
            message = f"{self._name} {what}; the run continues without it; its output is in {self._log}"
            warnings.take(EventRecord("warning", self._step, {"message": message}))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(self._began, self._log.stat().st_size - 2000))
            lines = file.read().decode("utf-8", "replace").split("\n")
            return next((line.strip().rstrip(".") for line in reversed(lines) if line.strip()), "")
        return ""


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def main() -> None:
    """Run an experiment tracker in a child of this process: entry point of the process that `TrackerProcess` starts.

    Standard input has the pickled options and run, then batches of records, each of which is passed to the tracker. At
    the end the tracker is closed. The child exits with code 1 if the tracker raises. This process copies its output,
    also that of its own children, up to `MOST_PRINTED`, and ends as the child does.
    """
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    printed, output = os.pipe()
    if child := os.fork():
        os.close(output)
        os.close(0)  # the records are the child's
        _end_as(_copied(printed, child))
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(printed)
    os.close(output)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, MaskedText(opened, encoding="utf-8", errors="backslashreplace", line_buffering=True))
    stream = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # code that reads standard input must not read records
    try:
        _follow(stream)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skip exit hooks of trackers, which wait for networks


def _copied(printed: int, child: int) -> int:
    """Copy what a child prints into a pipe to standard output, and return its status once it has ended.

    What is left in the pipe is copied too. The pipe may stay open, in children of the child.
    """
    left, ended, status = MOST_PRINTED, 0, 0
    while True:
        readable = select.select([printed], [], [], 0 if ended else 0.05)[0]
        piece = os.read(printed, _PIECE) if readable else b""
        if piece and left > 0:
            more = b"\n[more output is left out]\n" if len(piece) > left else b""
            with contextlib.suppress(OSError):  # the disk is full
                os.write(1, piece[:left] + more)
        left -= len(piece)
        if ended and (not piece or left <= 0):
            return status
        if not ended:
            ended, status = os.waitpid(child, 0 if readable and not piece else os.WNOHANG)  # an end: nobody can print


def _end_as(status: int) -> NoReturn:
    """End this process with the exit code or by the signal of a child's status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _patience(logger: Logger) -> float:
    return float(getattr(logger, "close_seconds", CLOSE_SECONDS))


def _follow(stream: BinaryIO) -> None:
    logger: Logger
    logger, run = pickle.load(stream)
    tracker = logger.open(run)
    while (records := _next(stream)) is not None:
        for record in records:
            tracker.take(record)
    signal.alarm(math.ceil(_patience(logger)) + 60)  # in case no process is left to kill this one
    tracker.close()


def _next(stream: BinaryIO) -> list[Record] | None:
    try:
        records: list[Record] | None = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):  # training was killed, perhaps in the middle of a write
        return None
    return records
