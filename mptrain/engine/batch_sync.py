"""Agreement of all ranks, before each step, on its batch and on whether the run is asked to stop.

A signal, an unusable sample or the time limit may be known to one rank only. If that rank acted on it alone, the others
would wait for it forever. One all_reduce of a few integers on the host before each step shares all of this; on CUDA the
host runs ahead of the device there, so the exchange costs no device time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

if TYPE_CHECKING:
    from mptrain.engine.interrupt import SignalListener
    from mptrain.parallel.communicator import Communicator
    from mptrain.workloads.base.batch import Batch


class SyncedBatch(NamedTuple):
    """This rank's part of the next batch, on the host, and its numbers of samples and loss terms over all ranks."""

    batch: Batch
    samples: int
    terms: int


class BatchSync:
    """Source of training batches and of requests to stop by signal or time limit, for a run on one rank."""

    def __init__(self, interrupts: SignalListener, late: Callable[[], bool]) -> None:
        self._interrupts = interrupts
        self._late = late

    @property
    def asked(self) -> str | None:
        """Name of the signal that asked the run to stop, such as ``SIGTERM``, once all ranks know of it; else None."""
        return self._interrupts.received

    @property
    def late(self) -> bool:
        """True if the time limit (``train.max_minutes``) is reached, once all ranks know of it."""
        return self._late()

    def should_stop(self) -> bool:
        """Return whether a signal has asked the run to stop. All ranks must call this at the same places."""
        return self.asked is not None

    def next(self, batches: Iterator[Batch]) -> SyncedBatch | None:
        """Return the next batch of an epoch or None; raises DataError. All ranks must call this together."""
        batch = next(batches, None)
        return None if batch is None else SyncedBatch(batch, batch.samples, batch.terms)


class DistributedBatchSync(BatchSync):
    """Source of training batches and of requests to stop, agreed between several ranks.

    Only the clock of rank 0 counts for the time limit. An epoch ends for all as soon as one rank has no more batches,
    and an error of one rank is raised on all.
    """

    def __init__(self, interrupts: SignalListener, late: Callable[[], bool], comm: Communicator) -> None:
        super().__init__(interrupts, late)
        self._comm = comm
        self._asked: str | None = None
        self._over = False

    @property
    @override
    def asked(self) -> str | None:
        return self._asked

    @property
    @override
    def late(self) -> bool:
        return self._over

    @override
    def should_stop(self) -> bool:
        self._hear(*self._comm.all_reduce_ints(self._wishes()))
        return self._asked is not None

    @override
    def next(self, batches: Iterator[Batch]) -> SyncedBatch | None:
        batch, error = None, None
        try:
            batch = next(batches, None)
        except Exception as raised:
            error = raised
        counts = not (batch is None or batch.is_dummy)
        samples, terms = (batch.samples, batch.terms) if batch is not None and counts else (0, 0)
        mine = [samples, terms, batch is None and error is None, error is not None, *self._wishes()]
        samples, terms, ended, failed, *wishes = self._comm.all_reduce_ints(mine)
        if failed:
            self._comm.raise_for_all(error)
        self._hear(*wishes)
        if ended or batch is None:
            return None
        return SyncedBatch(replace(batch, whole=terms), samples, terms)

    def _wishes(self) -> list[int]:
        heard = self._interrupts.received
        return [heard == "SIGINT", heard not in (None, "SIGINT"), self._comm.is_rank_zero and self._late()]

    def _hear(self, interrupted: int, signalled: int, late: int) -> None:
        if interrupted or signalled:
            own = self._interrupts.received
            self._asked = "SIGINT" if interrupted else own if own not in (None, "SIGINT") else "SIGTERM"
            self._interrupts.received = self._asked  # determines the exit code
        self._over = self._over or late > 0
