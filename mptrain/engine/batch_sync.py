"""Agreement of all ranks, before each step, on its batch and on whether the run is asked to stop.

A signal, an unusable sample or the time limit may be known to one rank only. If that rank acted on it alone, the others
would wait for it forever. One all_reduce of a few integers on the host before each step shares all of this; on CUDA the
host runs ahead of the device there, so the exchange costs no device time.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from mptrain.engine.failure_diagnosis import SAME_MODULES
from mptrain.system.errors import ConfigError

if TYPE_CHECKING:
    from mptrain.engine.buffer_guard import BufferGuard
    from mptrain.engine.interrupt import SignalListener
    from mptrain.parallel.strategy import ParallelStrategy
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
    and an error of one rank is raised on all. Its methods raise ConfigError if the ranks' last step was not the same:
    with sharded weights, ranks that run different modules are given each other's; buffers that grow may have other
    sizes. Those of one size get the values of rank 0.
    """

    def __init__(
        self, interrupts: SignalListener, late: Callable[[], bool], strategy: ParallelStrategy, guard: BufferGuard
    ) -> None:
        super().__init__(interrupts, late)
        self._comm, self._strategy, self._guard = strategy.comm, strategy, guard
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
        # 20 bits, so that the squares of all ranks add up within int64.
        number = zlib.crc32(repr(self._last_step()).encode()) >> 12
        late = self._comm.is_rank_zero and self._late()
        return [heard == "SIGINT", heard not in (None, "SIGINT"), late, number, number**2]

    def _hear(self, interrupted: int, signalled: int, late: int, number: int, squares: int) -> None:
        if number**2 != squares * self._comm.world_size:  # equal only of equal numbers
            self._refuse_other_step()
        self._strategy.gathered.clear()
        if reshaped := self._guard.lasting_reshaped:
            self._guard.agree()
            self._strategy.broadcast_buffers([*reshaped.values()])
        if interrupted or signalled:
            own = self._interrupts.received
            self._asked = "SIGINT" if interrupted else own if own not in (None, "SIGINT") else "SIGTERM"
            self._interrupts.received = self._asked  # determines the exit code
        self._over = self._over or late > 0

    def _last_step(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the modules whose weights the last step gathered, and kinds of the buffers that training reshaped."""
        reshaped = self._guard.lasting_reshaped.items()
        return self._strategy.gathered, [(name, f"{buffer.numel()} of {buffer.dtype}") for name, buffer in reshaped]

    def _refuse_other_step(self) -> None:
        everyones = self._comm.all_gather_object(self._last_step())
        rank, other = next((rank, step) for rank, step in enumerate(everyones) if step != everyones[0])
        (modules, sizes), (own_modules, own_sizes) = everyones[0], other
        if sizes != own_sizes:
            name = min({*sizes} ^ {*own_sizes})[0]
            raise ConfigError(
                f"in the last step the buffer {name} was given another size or dtype on rank {rank} than on rank 0, "
                "and ranks exchange the values of buffers",
                "let it grow alike on all ranks, or register it with persistent=False, which keeps it for each rank",
            )
        pairs = itertools.zip_longest(modules, own_modules, fillvalue="no other module")
        zero, name = next((module or "the model", own or "the model") for module, own in pairs if module != own)
        raise ConfigError(
            f"in the last step rank 0 ran {zero} where rank {rank} ran {name}, and each was given weights of the "
            "other: what they learnt in it is wrong, and is not saved",
            SAME_MODULES,
        )
