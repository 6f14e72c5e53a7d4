"""Turns signals into a wish that the loop obeys between two steps.

The first Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (the terminal has gone) asks for an orderly end; a second Ctrl-C ends the
process at once. A signal that is ignored stays ignored, as under nohup. Before the loop listens, and when it has done so,
there is no step to be finished: `ending_at_once` lets the same signals end the process there with the same exit code.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from mptrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class EndRequested(KeyboardInterrupt):
    """A signal other than Ctrl-C asked for the end where nothing is finished first; no `except Exception` takes it for a fault.

    Attributes:
        name: Of the signal.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, SIGTERM, SIGUSR1 and SIGHUP raise `EndRequested` in the main thread, as Ctrl-C raises KeyboardInterrupt.

    `SignalListener` takes its place while a run trains.

    Raises:
        Preempted: One came, and nobody inside had anything more to say about it.
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


class SignalListener:
    """Listens to signals while the context lasts; does nothing outside the main thread.

    Attributes:
        received: Name of the first signal that asked the run to end, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 75 (saved, run me again) after the others."""
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
