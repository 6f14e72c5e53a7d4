"""Conversion of signals such as SIGTERM to a stop request, which the training loop obeys between two steps.

The first Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (terminal closed) requests an orderly stop; a second Ctrl-C ends the
process at once. An ignored signal stays ignored, as under nohup, and one that C code handled before Python began keeps
its handler. Before and after the loop listens, and in commands that do not train, there is no step to finish: there,
`end_at_signals` lets the same signals end the process with the same exit code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Preempted

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
    message = "interrupted" if number == signal.SIGINT else f"stopped: {signal.Signals(number).name}, {_AT_ONCE}"
    os.write(2, f"{message}\n".encode())
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
