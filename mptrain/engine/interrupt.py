"""Turns signals into a wish that the loop obeys between two steps.

The first Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (the terminal has gone) asks for an orderly end; a second Ctrl-C ends the
process at once. A signal that is ignored stays ignored, as under nohup.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from mptrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupts:
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

    def __enter__(self) -> Interrupts:
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
