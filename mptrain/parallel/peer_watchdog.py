"""Watchdog that detects that another rank has exited while this rank's device waits for it in a collective.

When a rank exits, gloo's connections close and host collectives fail. NCCL kernels keep waiting, and the host waits for
them: for an event, a value or space in the launch queue. So a thread looks for exited ranks. If a rank has exited and
the device is not idle for `PATIENCE` seconds, the device is waiting for that rank. The watchdog then aborts the device
collectives, which ends their kernels. Their results are invalid, so the watchdog sets `lost` before the abort, and code
that waits for the device checks `lost` afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mptrain.errors import EXIT_PREEMPTED

if TYPE_CHECKING:
    from torch.distributed import Store

#: Seconds between checks of forked ranks, and number of those checks between checks of the store.
LOOK, BEAT = 0.25, 4
#: Checks of the store without a heartbeat after which a rank counts as lost; the only signal from other machines.
SILENT = 30
#: Seconds without an idle device after which it counts as waiting for a lost rank, and seconds between polls.
PATIENCE, GLANCE = 5.0, 0.01
#: Seconds that this rank has to return from its device and exit cleanly.
END = 5.0

_GONE, _ALIVE, _DONE = "gone", "alive", "done"


class PeerWatchdog:
    """Watchdog thread of one rank that aborts the device's collectives if the device waits for a rank that has exited.

    If the process does not react to the abort within `END` seconds, the watchdog kills it.

    Args:
        others: Ranks whose heartbeats are checked: rank 0 checks all other ranks, they check only rank 0.
        store: Key-value store shared by all ranks, for heartbeats and reports of exited ranks.
        ended: Function that returns which rank forked by this process has exited and how; empty if none has.
        idle: Function that returns whether the device has finished all its work.
        silence: Function that returns a message if no rank has responded within the timeout; otherwise empty.
        give_up: Function that aborts the device collectives.
        speaks: Whether to print an error line before killing a process that does not return from its device.

    Attributes:
        lost: Phrase about the rank that has exited while the device waits for it, and how; empty if there is none.
    """

    def __init__(
        self,
        rank: int,
        others: list[int],
        store: Store,
        ended: Callable[[], str],
        idle: Callable[[], bool],
        silence: Callable[[], str],
        give_up: Callable[[], None],
        *,
        speaks: bool,
    ) -> None:
        self.lost = ""
        self._rank, self._others, self._ended, self._idle = rank, others, ended, idle
        self._silence, self._give_up, self._speaks = silence, give_up, speaks
        self._store = store.clone() if hasattr(store, "clone") else store  # a connection of its own, never blocked
        self._signs: dict[int, tuple[bytes, int]] = {}
        self._over, self._noticed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch_peers, name="peer_watchdog", daemon=True)

    def begin(self) -> None:
        """Start the watchdog thread."""
        self._thread.start()

    def end(self, *, done: bool = False) -> None:
        """Stop the watchdog thread, without killing the process any more.

        ``done`` says that this rank has done all its work, so that the others do not miss its heartbeat.
        """
        self._over.set()
        self._noticed.set()
        if self._thread.is_alive():
            self._thread.join(LOOK)  # short, because an abort of collectives may still be running
        if done:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{_DONE}/{self._rank}", "")  # a key of its own: the thread may still set the other

    def notice(self) -> None:
        """Tell the watchdog that this process knows of the lost rank and is exiting, so that it is not killed."""
        self._noticed.set()

    def _watch_peers(self) -> None:
        gone, looks = "", 0
        while not self._over.wait(LOOK):
            looks += 1
            if not gone and (gone := self._ended()):
                with contextlib.suppress(RuntimeError):
                    self._store.set(_GONE, gone)
            if not gone and looks % BEAT == 0:
                gone = self._said(looks)
            if (missed := gone or self._silence()) and self._waits():  # a timeout may clear, an exit does not
                self.lost = missed
                self._give_up()
                if not self._noticed.wait(END):
                    self._end_process()
                return

    def _waits(self) -> bool:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if self._idle() or self._over.wait(GLANCE):
                    return False
            except RuntimeError:  # the device has failed; code that waits for it gets the error
                return False
        return True

    def _said(self, looks: int) -> str:
        """Send a heartbeat and return which rank has exited according to the store."""
        try:
            self._store.set(f"{_ALIVE}/{self._rank}", str(looks))
            if self._store.check([_GONE]):
                return self._store.get(_GONE).decode()
            for rank in self._others:
                key = f"{_ALIVE}/{rank}"
                sign = self._store.get(key) if self._store.check([key]) else b""
                last, silent = self._signs.get(rank, (b"", 0))
                # Counted in own checks, so that a suspended process does not count other ranks as silent.
                silent = silent + 1 if sign and sign == last and not self._store.check([f"{_DONE}/{rank}"]) else 0
                self._signs[rank] = sign, silent
                if silent >= SILENT:
                    self._store.set(_GONE, said := f"rank {rank} sends no heartbeat")
                    return said
        except RuntimeError:
            return "rank 0 has exited or does not respond"
        return ""

    def _end_process(self) -> None:
        """Kill this process: device and collective do not respond, so a clean exit is impossible."""
        if self._speaks:
            said = (
                f"error: {self.lost}, and the device still waits for it; only the last checkpoint is available\n"
                "hint: resume the run\n"
            )
            with contextlib.suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())
        os._exit(EXIT_PREEMPTED)
