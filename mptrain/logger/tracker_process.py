"""Runs a tracker in a process of its own, so that nothing it does reaches training.

Trackers patch exit hooks, start threads, ask for passwords, wait for networks (W&B 0.31 holds up the end of a process
for 86 s where its server does not answer). Here all of that happens elsewhere: training writes to a pipe that never
blocks, and what ends late is ended. The tracker's process ends with the run: when it is told, or when the pipe closes because training
was killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import IO, BinaryIO, Final

from mptrain.files import open_in_place
from mptrain.interpreter import command
from mptrain.logger.base import Logger, TrackedRun, Tracker
from mptrain.masking import MaskedText
from mptrain.records import EventRecord, Record

#: Seconds between two writes to the tracker.
PAUSE: Final = 0.5

#: Bytes that wait for a tracker at most, some 200,000 steps; what comes after is left out.
MOST_WAITING: Final = 1 << 24

_PIECE: Final = 1 << 16

#: A batch system sends these to every process of a job; training decides when it is the end.
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

#: Seconds that the end of a run waits for a tracker that does not say how long.
CLOSE_SECONDS: Final = 10.0


class TrackerProcess:
    """A sink that hands records to a tracker in another process, and gives up on it rather than wait.

    Args:
        logger: The tracker's options.
        run: What it is told about the run.
        log: Takes everything that the tracker prints.
        warnings: Takes one ``warning`` event if the tracker fails; called inside `take` and `close` only.
    """

    def __init__(self, logger: Logger, run: TrackedRun, log: Path, warnings: Tracker) -> None:
        self._name = type(logger).__name__
        self._patience = float(getattr(logger, "close_seconds", CLOSE_SECONDS))
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
        except Exception as error:  # no process to be had, or a class of the user's that cannot be sent to one
            self._warn(f"cannot be started: {error}")

    def take(self, record: Record) -> None:
        """Keep the record, and every now and then write what was kept to the tracker as far as it reads."""
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
        """Let the tracker finish within its time; then it is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + self._patience
        try:
            self._write(process)
            # Data workers hold the pipe open too, so that closing it would not tell the end.
            self._waiting += pickle.dumps(None)
            self._push(process)
            while self._waiting and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
                self._push(process)
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warn(f"did not finish within logger.close_seconds={self._patience:g} and was ended")
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
                start_new_session=True,  # Ctrl-C is meant for the training, and nobody answers a password prompt
            )
        os.set_blocking(_pipe(process).fileno(), False)
        return process

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        self._written = time.monotonic()
        records, self._fresh = self._fresh, []
        if len(self._waiting) > MOST_WAITING:
            self._warn("does not keep up: records are left out")
        elif records:
            self._waiting += pickle.dumps(records)
        self._push(process)

    def _push(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(OSError):  # full for now, or closed by its death, which `poll` tells of
            while self._waiting:
                del self._waiting[: os.write(_pipe(process).fileno(), self._waiting[:_PIECE])]

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        """End the process, if it has not ended; say so once if it failed."""
        self._process, self._fresh = None, []
        unfinished = process.poll() is None
        if process.returncode != 0:  # with whatever it has started
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
            message = f"{self._name} {what}; the run goes on without it, and what it said is in {self._log}"
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
    """Open the tracker that the pipe names, hand it every record, close it; exit code 1 if it raises."""
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, MaskedText(opened, encoding="utf-8", errors="backslashreplace", line_buffering=True))
    stream = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what reads the standard input must not read records
    try:
        _follow(stream)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # exit hooks of trackers wait for networks


def _follow(stream: BinaryIO) -> None:
    logger: Logger
    logger, run = pickle.load(stream)
    tracker = logger.open(run)
    while (records := _next(stream)) is not None:
        for record in records:
            tracker.take(record)
    signal.alarm(math.ceil(logger.close_seconds) + 60)  # for when nobody is left to end this process
    tracker.close()


def _next(stream: BinaryIO) -> list[Record] | None:
    try:
        records: list[Record] | None = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):  # training was killed, perhaps in the middle of a write
        return None
    return records
