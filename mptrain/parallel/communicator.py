"""Communicator of the ranks (processes) of one distributed training run, with its collective operations.

A run on one process uses `SINGLE_PROCESS`, so callers need not check the world size. Host values are exchanged by gloo,
device tensors by the device's library (NCCL on CUDA).

Every collective is called on every rank and in every step, regardless of the values: a collective that only some ranks
enter hangs the run.
"""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import override

from mptrain.parallel.torchrun import (
    RankLost,
    describe_ended_rank,
    error_for_other_ranks,
    is_rank_loss,
    published_error,
)
from mptrain.system.errors import MptrainError, Preempted
from mptrain.system.process_state import seed_everything
from mptrain.system.torch_private import set_group_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

Value = TypeVar("Value")

#: Store key under which a rank publishes its error, and seconds that other ranks wait for it.
_WHY, _WORD = "why", 0.5

_GAMMA = 0x9E3779B97F4A7C15  # from SplitMix64: spreads multiples over the whole range


class Communicator:
    """Communicator of a training run on one process, and the interface of one on several.

    On one process, collectives return their input and errors are raised as they are.

    Attributes:
        rank: Rank of this process, from 0; ``local_rank`` is that on this machine.
        world_size: Number of processes; ``local_world_size`` is that on this machine.
        name: Communication library of device tensors: ``gloo`` or ``nccl``; empty on one process.
    """

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1
    name = ""

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, the rank that writes the run's records and output."""
        return self.rank == 0

    def use(self, device: torch.device) -> None:
        """Select the communication library for device tensors, before the first collective on an accelerator.

        A CUDA device selects NCCL; with any other, gloo stays in use.
        """

    def all_reduce_ints(self, numbers: Sequence[int]) -> list[int]:
        """Return host integers in the range of int64, each summed over all ranks; equally many on every rank."""
        return list(numbers)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a device tensor of equal shape and dtype on every rank over all ranks in place, and return it."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the device tensors ``[...]`` of all N ranks, equal in shape and dtype, as ``[N, ...]`` by rank."""
        return tensor.unsqueeze(0)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite device tensors in place with those of rank 0; order, shapes and dtypes are equal on every rank."""

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return a list of the values of all ranks, in rank order; the values are pickled."""
        return [value]

    def broadcast_object(self, value: Value) -> Value:
        """Return the value of rank 0 on every rank; the value is pickled. Values of other ranks are ignored."""
        return value

    def together(self) -> AbstractContextManager[None]:
        """Return a context manager whose body runs on every rank and raises the error of one rank on all of them."""
        return contextlib.nullcontext()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose body runs on rank 0 before other ranks, which then find its downloads."""
        return contextlib.nullcontext()

    def raise_for_all(self, error: Exception | None) -> None:
        """Raise the error of one rank (None: it has none) on every rank; do nothing if no rank has an error."""
        if error is not None:
            raise error

    def send_error(self, error: BaseException) -> None:
        """Publish the error that ends this rank, so that ranks that notice its exit can report the cause (`why`)."""

    def why(self) -> MptrainError | None:
        """Return the error that another rank published before it exited; None if none did."""
        return None

    def is_lost(self, error: BaseException) -> bool:
        """Return whether an exception is a consequence of the exit or hang of another rank, not this rank's error."""
        return False

    def who_ended(self) -> str:
        """Return a phrase for the user about the exited rank, such as ``rank 1 was killed by SIGKILL``."""
        return "another rank has exited or does not respond"

    def begin_step(self, seed: int, step: int) -> None:
        """Seed the generators of Python and torch from seed, step and rank, before a training step on several ranks.

        So ranks draw different numbers, for example for dropout, and no random state is lost with a rank.
        """

    def describe(self) -> str:
        """Return number of ranks and communication library, such as ``2 ranks (nccl)``; empty for one process."""
        return ""


SINGLE_PROCESS: Communicator = Communicator()


class DistributedCommunicator(Communicator):
    """Communicator of one of the several processes (ranks) of a distributed training run.

    Args:
        timeout: Seconds after which a rank that does not respond counts as lost.
        store: Key-value store that all ranks share, for the rendezvous and for errors.
        meeting: Seconds to wait for all ranks at the rendezvous, at most ``timeout``; None uses ``timeout``.
        children: Rank by process ID, for the ranks that this process has forked; None if it has forked none.

    Attributes:
        group: Process group of device tensors.

    Raises:
        RankLost: Not all ranks have joined.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
        timeout: float,
        store: Store,
        meeting: float | None = None,
        children: Mapping[int, int] | None = None,
    ) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.store = store
        self._children = children or {}
        self._dist = dist
        self._timeout = timedelta(seconds=timeout)
        until_met = timedelta(seconds=timeout if meeting is None else min(meeting, timeout))
        with self._noticing_loss():
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=until_met)
        set_group_timeout(self._timeout, dist.group.WORLD)
        self._host = dist.group.WORLD
        self.group: ProcessGroup = self._host  # type: ignore[assignment]
        self.name = "gloo"

    def use(self, device: torch.device) -> None:
        """Create the NCCL process group of a CUDA device; its own watchdog ends processes that wait for a lost rank."""
        if device.type == "cuda" and self.group is self._host:
            with self._noticing_loss():
                self.group = self._dist.new_group(backend="nccl", timeout=self._timeout)  # type: ignore[assignment]
            self.name = "nccl"

    @override
    def is_lost(self, error: BaseException) -> bool:
        return is_rank_loss(error)

    @override
    def all_reduce_ints(self, numbers: Sequence[int]) -> list[int]:
        table = torch.tensor(list(numbers), dtype=torch.int64)
        with self._noticing_loss():
            self._dist.all_reduce(table, group=self._host)
        totals: list[int] = table.tolist()
        return totals

    @override
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        with self._noticing_loss():
            self._dist.all_reduce(tensor, group=self.group)
        return tensor

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        table = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._noticing_loss():
            self._dist.all_gather(table, tensor, group=self.group)
        return torch.stack(table)

    @override
    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        with self._noticing_loss():
            for tensor in tensors:
                self._dist.broadcast(tensor, 0, group=self.group)

    @override
    def all_gather_object(self, value: Value) -> list[Value]:
        gathered: list[Any] = [None] * self.world_size
        with self._noticing_loss():
            self._dist.all_gather_object(gathered, value, group=self._host)
        return gathered

    @override
    def broadcast_object(self, value: Value) -> Value:
        objects: list[Any] = [value]
        with self._noticing_loss():
            self._dist.broadcast_object_list(objects, 0, group=self._host)
        received: Value = objects[0]
        return received

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of one rank inside the context on all ranks; the end of the context is a barrier.

        The body may use collectives, so an error is published in the store instead of exchanged by a collective. The
        failing rank then leaves the process group, which makes the other ranks stop waiting.

        Raises:
            MptrainError: The error that another rank has published.
            RankLost: Another rank has exited or does not respond, and has published no error.
        """
        try:
            yield
            self.all_reduce_ints([0])  # a barrier that fails if a rank is lost
        except Exception as error:
            if not self.is_lost(error):
                self.send_error(error)
                self.leave()  # closes the connections, so that other ranks stop waiting
                raise
            why = self.why()
            if why is not None:
                raise why from error
            raise RankLost(self.who_ended()) from error

    def raise_for_all(self, error: Exception | None) -> None:
        """Raise the error of the lowest failed rank on every rank; do nothing if no rank has failed.

        Other ranks get it with the rank in its message, as a RankFailed if it is no `MptrainError`. If all ranks have
        failed, each raises its own error.
        """
        errors = self.all_gather_object(None if error is None else error_for_other_ranks(error, self.rank))
        troubles = [failure for failure in errors if failure is not None]
        if not troubles:
            return
        if error is not None and (len(troubles) == self.world_size or errors.index(troubles[0]) == self.rank):
            raise error
        raise troubles[0]

    def send_error(self, error: BaseException) -> None:
        """Publish the error that ends this rank in the store.

        Preemption, the loss of another rank and exceptions such as KeyboardInterrupt are not published.
        """
        if isinstance(error, Exception) and not isinstance(error, Preempted) and not is_rank_loss(error):
            published = error_for_other_ranks(error, self.rank)
            kind = type(published).__name__
            with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited too
                self.store.set(_WHY, json.dumps([kind, str(published), published.hint, published.exit_code]))

    def why(self) -> MptrainError | None:
        """Return the error that another rank has published in the store, after waiting up to half a second for it."""
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + _WORD
            while time.monotonic() < deadline:
                if self.store.check([_WHY]):
                    return published_error(*json.loads(self.store.get(_WHY)))
                time.sleep(0.02)
        return None

    def who_ended(self) -> str:
        """Return a phrase about the lost rank: of the exit of a forked process, or a general one."""
        deadline = time.monotonic() + _WORD
        while self._children and time.monotonic() < deadline:
            if ending := describe_ended_rank(self._children):
                return ending
            time.sleep(0.02)
        return super().who_ended()

    @contextlib.contextmanager
    @override
    def main_process_first(self) -> Iterator[None]:
        if not self.is_rank_zero:
            self.all_reduce_ints([0])
        try:
            yield
        finally:
            if self.is_rank_zero:
                self.all_reduce_ints([0])

    @override
    def begin_step(self, seed: int, step: int) -> None:
        # Two multipliers: with one, a later step would draw the numbers of an earlier step of another seed.
        word = (seed * 0xD1342543DE82EF95 + (step * self.world_size + self.rank + 1) * _GAMMA) & ((1 << 63) - 1)
        seed_everything(word)

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.is_lost(error):
                raise RankLost(self.who_ended()) from error
            raise

    @override
    def describe(self) -> str:
        return f"{self.world_size} ranks ({self.name})"

    def leave(self) -> None:
        """Leave the process group, at the end of the run or after an error."""
        with contextlib.suppress(Exception):  # fails if a rank is lost
            self._dist.destroy_process_group()
