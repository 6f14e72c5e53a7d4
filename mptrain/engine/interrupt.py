"""Conversion of signals such as SIGTERM to a stop request, which the training loop obeys between two steps.

The first Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (terminal closed) requests an orderly stop; a second Ctrl-C ends the
process at once. An ignored signal stays ignored, as under nohup. Before and after the loop listens there is no step to
finish: there, `end_at_signals` and, during imports, `exit_at_signals` let the same signals end the process with the
same exit code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class EndRequested(KeyboardInterrupt):
    """Signal other than Ctrl-C, by name, that ends the process; ``except Exception`` does not catch it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def end_at_signals() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGHUP raise `EndRequested` in the main thread, for code outside of training.

    `SignalListener` replaces these handlers while a run trains. Raises Preempted if a signal arrived and the code
    inside did not handle it.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        raise EndRequested(signal.Signals(number).name)

    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, receive)
        yield
    except EndRequested as asked:
        raise Preempted(
            f"{asked.name}, ended at once; nothing was being trained", "run it again", EXIT_PREEMPTED
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """Let a signal end the process without an exception, for imports of large libraries.

    An exception that a signal raises inside an import leaves C extensions half initialised. torch then aborts, or the
    interruption is reported as an error of a module.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        said = "interrupted" if number == signal.SIGINT else f"error: {name}, ended at once; nothing was being trained"
        os.write(2, f"{said}\n".encode())
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalListener:
    """Context manager that records signals during training, so that the run can be saved before it stops.

    ``received`` is the name of the first SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or SIGHUP, or None; a further SIGINT raises
    KeyboardInterrupt. It does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 130 after Ctrl-C, 75 (saved, run again) after other signals."""
        return EXIT_INTERRUPTED if self.received == "SIGINT" else EXIT_PREEMPTED

    def __enter__(self) -> SignalListener:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number).name
