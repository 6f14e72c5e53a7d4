"""Notices that a rank has ended while the device of this one waits for it.

Where a rank ends, gloo's connections close and whoever exchanges something on the host hears of it. NCCL's kernels wait on, and with
them the host: for an event, for a value, or for room among the launches. So a thread looks for ranks that have ended. If one has, and
the device is never idle for `PATIENCE` seconds, then it waits for that rank: the exchanges on devices are given up, which ends
their kernels. What they leave in memory is no value; so `lost` is set before, and whoever has waited for the device asks for it after.
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

#: Seconds between looks at forked ranks, and looks between those at the store.
LOOK, BEAT = 0.25, 4
#: Looks at the store in which a rank gives no sign of life and counts as ended: nothing else is known of other machines.
SILENT = 30
#: Seconds without an idle moment after which the device is waiting for a rank that has ended, and between looks at it.
PATIENCE, GLANCE = 5.0, 0.01
#: Seconds that this rank has to come back from its device and end in order.
END = 5.0

_GONE, _ALIVE = "gone", "alive"


class PeerWatchdog:
    """Looks out from `begin` to `end`.

    Args:
        rank: Which this one is.
        others: Those whose signs of life it looks for: all of them for the first, which tells the rest; for these the first.
        store: Where they meet.
        ended: Says which of the forked ranks has ended and how; empty if none has.
        idle: Whether the device has done all that it was given.
        silence: Says that no rank has answered for too long; empty if one has.
        give_up: Ends the exchanges on devices.
        speaks: Says in a line why it ends the process, where the process does not come back.

    Attributes:
        lost: Who has ended while the device waits for it, and how; empty as long as none is missed.
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
        self._store = store.clone() if hasattr(store, "clone") else store  # a connection on which nobody waits
        self._signs: dict[int, tuple[bytes, int]] = {}
        self._over, self._noticed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch_peers, name="peer_watchdog", daemon=True)

    def begin(self) -> None:
        """Look out from now on."""
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self._noticed.set()
        if self._thread.is_alive():
            self._thread.join(LOOK)  # it may be aborting exchanges, which nobody waits for

    def notice(self) -> None:
        """This rank knows that another is lost, and ends."""
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
            if (missed := gone or self._silence()) and self._waits():  # silence may end, an end does not
                self.lost = missed
                self._give_up()
                if not self._noticed.wait(END):
                    self._end_process()
                return

    def _waits(self) -> bool:
        """Return whether the device has had no idle moment for so long that it must be waiting."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if self._idle() or self._over.wait(GLANCE):
                    return False
            except RuntimeError:  # the device has failed, of which whoever waits for it hears
                return False
        return True

    def _said(self, looks: int) -> str:
        """Return who has gone by what the store knows; gives a sign of life itself."""
        try:
            self._store.set(f"{_ALIVE}/{self._rank}", str(looks))
            if self._store.check([_GONE]):
                return self._store.get(_GONE).decode()
            for rank in self._others:
                key = f"{_ALIVE}/{rank}"
                sign = self._store.get(key) if self._store.check([key]) else b""
                last, silent = self._signs.get(rank, (b"", 0))
                silent = (
                    silent + 1 if sign and sign == last else 0
                )  # counted in own looks: who is stopped counts nobody's
                self._signs[rank] = sign, silent
                if silent >= SILENT:
                    self._store.set(_GONE, said := f"rank {rank} gives no sign of life")
                    return said
        except RuntimeError:
            return "the first rank has ended, or does not answer"
        return ""

    def _end_process(self) -> None:
        """End at once: neither the device nor the exchange answers, so nothing can be done in order any more."""
        if self._speaks:
            said = f"error: {self.lost}, and the device waits for it; the last checkpoint is what there is\nhint: resume the run\n"
            with contextlib.suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())
        os._exit(EXIT_PREEMPTED)
