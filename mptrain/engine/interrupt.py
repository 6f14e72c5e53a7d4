"""Interruptions of training: signals as stop requests, which the loop obeys between two steps, and stalled runs.

The first Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (terminal closed) requests an orderly stop; a second Ctrl-C ends the
process at once. An ignored signal stays ignored, as under nohup, and one that C code handled before Python began keeps
its handler. Before and after the loop listens, and in commands that do not train, there is no step to finish: there,
`end_at_signals` lets the same signals end the process with the same exit code.

A lost network drive, a lock, or a device or process that does not answer raises no exception. A background thread
checks periodically for progress. It works as long as the hanging call has released Python's global interpreter lock,
which waiting for files, devices and other processes does.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from mptrain.runlog.atomic_files import storage_errors
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted, StorageError
from mptrain.system.files import open_in_place

#: Signals that ask for an end; Ctrl-C is the first.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class EndRequested(KeyboardInterrupt):
    """Signal other than Ctrl-C, by name, that ends the process; ``except Exception`` does not catch it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def _handled(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals in the main thread, but none that is ignored, or whose handler Python could not restore."""
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: set by C code
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def end_at_signals() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGHUP raise `EndRequested` in the main thread, for code outside of training.

    `SignalListener` replaces these handlers while a run trains. Raises Preempted if a signal arrived and the code
    inside did not handle it. While a module is imported or a configuration is composed, a signal ends the process
    without an exception. That would leave C extensions half initialised: torch then aborts, or the interruption is
    reported as an error of a module; clean-up code of Hydra and OmegaConf turns it into an error of the configuration.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        if imports_or_composes(frame):
            leave_at_once(number)
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        raise EndRequested(signal.Signals(number).name)

    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        with _handled(_SIGNALS if own else _SIGNALS[1:], receive):
            yield
    except EndRequested as asked:
        raise Preempted(f"{asked.name}, {_AT_ONCE}", "run it again", EXIT_PREEMPTED) from None


_AT_ONCE = "ended at once; nothing was being trained"


def imports_or_composes(frame: FrameType | None) -> bool:
    """Return whether a frame runs within an import or within code of Hydra, where an exception may be swallowed."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("hydra", "omegaconf") or frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave_at_once(number: int, frame: FrameType | None = None) -> None:
    """End the process with the line and the exit code of a signal, without an exception: a handler during imports."""
    said = "interrupted" if number == signal.SIGINT else f"stopped: {signal.Signals(number).name}, {_AT_ONCE}"
    os.write(2, f"{said}\n".encode())
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED)


class SignalListener:
    """Context manager that records signals during training, so that the run can be saved before it stops.

    ``received`` is the name of the first SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or SIGHUP, or None; a further SIGINT raises
    KeyboardInterrupt. It does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self.received: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 130 after Ctrl-C, 75 (saved, run again) after other signals."""
        return EXIT_INTERRUPTED if self.received == "SIGINT" else EXIT_PREEMPTED

    def __enter__(self) -> SignalListener:
        self._handled = _handled(_SIGNALS, self._receive)
        self._handled.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handled.__exit__(kind, error, trace)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number).name


#: Number of checks within the time after which a run counts as stalled.
LOOKS = 10


class Watchdog:
    """Context manager with a thread that writes all thread stacks to a file after ``seconds`` without a heartbeat."""

    def __init__(self, path: Path, seconds: float | None) -> None:
        self.stalls = 0
        self._path = path
        self._seconds = seconds
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def heartbeat(self) -> None:
        """Tell the watchdog that the run makes progress."""
        self._beats += 1

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._seconds is not None
        pause = self._seconds / LOOKS
        seen, still = -1, 0
        looked = time.monotonic()
        while not self._ended.wait(pause):
            late = time.monotonic() - looked > 2 * pause  # the whole process was suspended, which is no stall
            looked = time.monotonic()
            still = 0 if late or self._beats != seen else still + 1
            seen = self._beats
            if still == LOOKS:
                self.stalls += 1
                self._tell()

    def _tell(self) -> None:
        told = f"no progress for {self._seconds:g} s"
        try:
            with storage_errors(self._path):
                descriptor = open_in_place(self._path, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                print(f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {told}", file=file, flush=True)
                faulthandler.dump_traceback(file)
            where = f"the stacks of all threads are in {self._path}"
        except (OSError, StorageError) as error:
            where = str(error)
        print(f"warning: {told}; {where}", file=sys.stderr, flush=True)
