"""What must be known before each step: its batch, and whether the run is asked to end. Ranks agree on it on the host.

What one rank alone knows (a signal, a sample that cannot be used, the time) would otherwise make it leave the others
waiting. One exchange of a few numbers before each step does for all of it; the host is ahead of a CUDA device there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mptrain.engine.interrupt import SignalListener
    from mptrain.parallel.communicator import Communicator
    from mptrain.workloads.base.batch import Batch


class SyncedBatch(NamedTuple):
    """A step to come.

    Attributes:
        batch: This rank's part of it, on the host.
        samples: Of all ranks.
        terms: Loss terms of all ranks.
    """

    batch: Batch
    samples: int
    terms: int


class BatchSync:
    """Those of a run on one rank.

    Args:
        interrupts: Hears signals.
        late: Whether the run's time is over.
    """

    def __init__(self, interrupts: SignalListener, late: Callable[[], bool]) -> None:
        self._interrupts = interrupts
        self._late = late

    @property
    def asked(self) -> str | None:
        """The signal that asks the run to end, as far as all ranks know of it."""
        return self._interrupts.received

    @property
    def late(self) -> bool:
        """Whether the run's time is over, as far as all ranks know."""
        return self._late()

    def should_stop(self) -> bool:
        """Find out whether the run is asked to end; all ranks ask at the same places."""
        return self.asked is not None

    def next(self, batches: Iterator[Batch]) -> SyncedBatch | None:
        """Fetch the next batch; None where there is none.

        Raises:
            DataError: A sample cannot be used.
        """
        batch = next(batches, None)
        return None if batch is None else SyncedBatch(batch, batch.samples, batch.terms)


class DistributedBatchSync(BatchSync):
    """Those of a run on several ranks.

    Args:
        interrupts: Hears this rank's signals.
        late: Whether the run's time is over; the first rank's clock counts.
        comm: Who they are.
    """

    def __init__(self, interrupts: SignalListener, late: Callable[[], bool], comm: Communicator) -> None:
        super().__init__(interrupts, late)
        self._comm = comm
        self._asked: str | None = None
        self._over = False

    @property
    def asked(self) -> str | None:
        """See `BatchSync`."""
        return self._asked

    @property
    def late(self) -> bool:
        """See `BatchSync`."""
        return self._over

    def should_stop(self) -> bool:
        """See `BatchSync`."""
        self._hear(*self._comm.all_reduce_ints(self._wishes()))
        return self._asked is not None

    def next(self, batches: Iterator[Batch]) -> SyncedBatch | None:
        """See `BatchSync`; an error of one rank is raised by all."""
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
            self._interrupts.received = self._asked  # of which the exit code speaks
        self._over = self._over or late > 0
