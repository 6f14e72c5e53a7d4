"""Communicator of the ranks of one run, with its collectives.

A run on one process uses `SINGLE_PROCESS`, whose collectives return their input, so callers need not check the world
size. Host values are exchanged by gloo, device tensors by the device's library (NCCL on CUDA).

Every collective is called on every rank and in every step, regardless of the values: a collective that only some ranks
enter hangs the run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mptrain.device import current_stream
from mptrain.errors import EXIT_PREEMPTED, MptrainError, Preempted
from mptrain.parallel.peer_watchdog import PeerWatchdog
from mptrain.torch_private import abort_group, set_group_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

Value = TypeVar("Value")

#: Seconds between polls of an event, and seconds to wait for device collectives to abort.
_POLL, _ABORTED = 0.0005, 2.0

#: Store key under which a rank publishes its error, and seconds that other ranks wait for it.
_WHY, _WORD = "why", 0.5

_GAMMA = 0x9E3779B97F4A7C15  # from SplitMix64: spreads multiples over the whole range


class Communicator:
    """Communicator of a run on one process, and the interface for several.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        local_rank: Rank of this process on this machine.
        local_world_size: Number of processes on this machine.
    """

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1
    name = ""

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, which writes records and output."""
        return self.rank == 0

    def use(self, device: torch.device) -> None:
        """Use the communication library of a device for device tensors from now on."""

    def all_reduce_ints(self, numbers: Sequence[int]) -> list[int]:
        """Return host integers, each summed over ranks."""
        return list(numbers)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a device tensor over ranks in place."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked as ``[N, ...]`` in rank order, on the device."""
        return tensor.unsqueeze(0)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite device tensors with those of rank 0."""

    def all_gather_object(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in rank order."""
        return [value]

    def broadcast_object(self, value: Value) -> Value:
        """Return the value of rank 0."""
        return value

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which an error on one rank is raised on all ranks."""
        return contextlib.nullcontext()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 leaves before other ranks enter it, so its downloads are available to them."""
        return contextlib.nullcontext()

    def raise_for_all(self, error: Exception | None) -> None:
        """Raise the error of one rank on every rank; do nothing if no rank has an error."""
        if error is not None:
            raise error

    def send_error(self, error: BaseException) -> None:
        """Publish an error for the ranks that notice that this rank has exited."""

    def why(self) -> MptrainError | None:
        """Return the error that a lost rank has published, if any."""
        return None

    def abandon(self) -> None:
        """Abort device collectives that wait for lost ranks."""

    def wait_for(self, event: torch.Event) -> None:
        """Wait for a device event; a run waits for its device only through this method."""
        event.synchronize()

    def is_lost(self, error: BaseException) -> bool:
        """Return whether an exception was caused by the exit of another rank."""
        return False

    def who_ended(self) -> str:
        """Return which rank has exited and how, as far as it is known."""
        return "another rank has exited or does not respond"

    def begin_step(self, seed: int, step: int) -> None:
        """Seed the random generators before a step: differently on each rank, without state that dies with a rank."""

    def describe(self) -> str:
        """Return the number of ranks for display; empty for one."""
        return ""


SINGLE_PROCESS = Communicator()


class RankLost(Preempted):
    """Error raised when another rank has stopped responding; the run can be resumed from its last checkpoint."""

    def __init__(self, message: str = "another rank has exited or does not respond") -> None:
        super().__init__(message, "run the command again", EXIT_PREEMPTED, saved=False, asked=False)


class RankFailed(MptrainError):
    """Error raised when another rank has failed with an exception that is not an `MptrainError`."""


class DistributedCommunicator(Communicator):
    """Communicator of one of several processes.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        local_rank: Rank of this process on this machine.
        local_world_size: Number of processes on this machine.
        timeout: Seconds after which a rank that does not respond counts as lost.
        store: Store for the rendezvous.
        meeting: Seconds to wait for all ranks at the rendezvous, at most ``timeout``; None uses ``timeout``.
        children: Ranks by process ID, for the ranks that this process has forked.

    Raises:
        RankLost: Not all ranks have joined.
    """

    _peer_watchdog: PeerWatchdog | None = None
    _aborted = False

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
        self._timeout, self._heard = timedelta(seconds=timeout), time.monotonic()
        until_met = timedelta(seconds=timeout if meeting is None else min(meeting, timeout))
        with self._noticing_loss():
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=until_met)
        set_group_timeout(self._timeout, dist.group.WORLD)
        self._host = dist.group.WORLD
        self.group: ProcessGroup = self._host  # type: ignore[assignment]
        self.name = "gloo"

    def use(self, device: torch.device) -> None:
        """See `Communicator.use`."""
        if device.type == "cuda" and self.group is self._host:
            # Otherwise torch kills the process when a collective is aborted or times out; torchrun sets this variable
            # too. `PeerWatchdog` aborts collectives instead.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            with self._noticing_loss():
                self.group = self._dist.new_group(backend="nccl", timeout=self._timeout)  # type: ignore[assignment]
            self.name = "nccl"
            self.watch_peers(current_stream(device).query)

    def watch_peers(self, idle: Callable[[], bool]) -> None:
        """Start the watchdog for ranks that exit while the device waits for them.

        Args:
            idle: Function that returns whether the device has finished all its work.
        """
        self._peer_watchdog = PeerWatchdog(
            self.rank,
            list(range(1, self.world_size)) if self.is_rank_zero else [0],
            self.store,
            lambda: describe_ended_rank(self._children),
            idle,
            self._silence,
            self._give_up,
            speaks=self.local_rank == 0,
        )
        self._peer_watchdog.begin()

    def wait_for(self, event: torch.Event) -> None:
        """See `Communicator.wait_for`.

        Raises:
            RankLost: The device waits for a rank that has exited; results computed since then must not be used.
        """
        while not event.query() and not self._missed():
            time.sleep(_POLL)
        if self._missed():
            self._notice()
            raise RankLost(self._missed())
        self._heard = time.monotonic()  # a device that makes progress is not waiting for a rank

    def is_lost(self, error: BaseException) -> bool:
        """See `Communicator.is_lost`; aborted collectives raise many different errors."""
        own = not isinstance(error, Exception) or isinstance(error, MptrainError)
        return is_rank_loss(error) or (bool(self._missed()) and not own)

    def _silence(self) -> str:
        """Return a message if no collective or device event has completed within the timeout; otherwise empty."""
        timeout = self._timeout.total_seconds()
        return f"no rank has responded for {timeout:g} s" if time.monotonic() - self._heard > timeout else ""

    def _missed(self) -> str:
        """Return a message about the lost rank that the device waits for; empty if there is none."""
        return "" if self._peer_watchdog is None else self._peer_watchdog.lost

    def _notice(self) -> None:
        if self._peer_watchdog is not None:
            self._peer_watchdog.notice()

    def _give_up(self) -> None:
        """Abort device collectives; the abort runs in a thread, because it may take long."""
        group, self._aborted = self.group, True

        def abort() -> None:
            with contextlib.suppress(Exception):
                abort_group(group)

        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        thread.join(_ABORTED)

    def all_reduce_ints(self, numbers: Sequence[int]) -> list[int]:
        """See `Communicator.all_reduce_ints`."""
        table = torch.tensor(list(numbers), dtype=torch.int64)
        with self._noticing_loss():
            self._dist.all_reduce(table, group=self._host)
        found: list[int] = table.tolist()
        return found

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """See `Communicator.all_reduce_`."""
        with self._noticing_loss():
            self._dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        table = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._noticing_loss():
            self._dist.all_gather(table, tensor, group=self.group)
        return torch.stack(table)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """See `Communicator.broadcast_`."""
        with self._noticing_loss():
            for tensor in tensors:
                self._dist.broadcast(tensor, 0, group=self.group)

    def all_gather_object(self, value: Value) -> list[Value]:
        """See `Communicator.all_gather_object`."""
        found: list[Any] = [None] * self.world_size
        with self._noticing_loss():
            self._dist.all_gather_object(found, value, group=self._host)
        return found

    def broadcast_object(self, value: Value) -> Value:
        """See `Communicator.broadcast_object`."""
        said: list[Any] = [value]
        with self._noticing_loss():
            self._dist.broadcast_object_list(said, 0, group=self._host)
        found: Value = said[0]
        return found

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See `Communicator.together`.

        The body may use collectives, so an error is published in the store instead of exchanged by a collective.
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

        Raises:
            MptrainError: The error of that rank, prefixed with the rank on other ranks. If all ranks have failed, each
                raises its own error.
            RankFailed: The error of that rank is not an `MptrainError`.
        """
        said = self.all_gather_object(None if error is None else error_for_other_ranks(error, self.rank))
        troubles = [one for one in said if one is not None]
        if not troubles:
            return
        if error is not None and (len(troubles) == self.world_size or said.index(troubles[0]) == self.rank):
            raise error
        raise troubles[0]

    def send_error(self, error: BaseException) -> None:
        """See `Communicator.send_error`."""
        if isinstance(error, Exception) and not isinstance(error, Preempted) and not is_rank_loss(error):
            said = error_for_other_ranks(error, self.rank)
            kind = type(said).__name__
            with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited too
                self.store.set(_WHY, json.dumps([kind, str(said), said.hint, said.exit_code]))

    def why(self) -> MptrainError | None:
        """See `Communicator.why`."""
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + _WORD
            while time.monotonic() < deadline:
                if self.store.check([_WHY]):
                    return _said(*json.loads(self.store.get(_WHY)))
                time.sleep(0.02)
        return None

    def abandon(self) -> None:
        """See `Communicator.abandon`; gloo does not wait for a closed connection."""
        self._notice()
        if self.group is not self._host and not self._aborted:
            self._give_up()

    def who_ended(self) -> str:
        """See `Communicator.who_ended`."""
        if missed := self._missed():
            return missed
        deadline = time.monotonic() + _WORD
        while self._children and time.monotonic() < deadline:
            if ending := describe_ended_rank(self._children):
                return ending
            time.sleep(0.02)
        return super().who_ended()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """See `Communicator.main_process_first`."""
        if not self.is_rank_zero:
            self.all_reduce_ints([0])
        try:
            yield
        finally:
            if self.is_rank_zero:
                self.all_reduce_ints([0])

    def begin_step(self, seed: int, step: int) -> None:
        """Seed the random generators from (seed, step, rank)."""
        word = (seed * 0xD1342543DE82EF95 + (step * self.world_size + self.rank + 1) * _GAMMA) & ((1 << 63) - 1)
        random.seed(word)
        torch.manual_seed(word)

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
            self._heard = time.monotonic()
        except Exception as error:
            if self.is_lost(error):
                self._notice()
                raise RankLost(self.who_ended()) from error
            raise

    def describe(self) -> str:
        """See `Communicator.describe`."""
        return f"{self.world_size} ranks ({self.name})"

    def leave(self) -> None:
        """Leave the process group."""
        if self._peer_watchdog is not None:
            self._peer_watchdog.end()
        with contextlib.suppress(Exception):  # fails if a rank is lost
            self._dist.destroy_process_group()


def _said(kind: str, message: str, hint: str, code: int) -> MptrainError:
    """Return the error that another rank has published."""
    error = RankFailed(message, hint)
    if kind != RankFailed.__name__:
        error.exit_code = code  # type: ignore[misc]
    return error


def error_for_other_ranks(error: Exception, rank: int) -> MptrainError:
    """Convert an error for other ranks: prefix the rank, and keep type, exit code and hint of an `MptrainError`."""
    if isinstance(error, MptrainError) and not isinstance(error, RankFailed | Preempted):
        twin = copy.copy(error)
        twin.args = (f"rank {rank}: {error}",)
        twin.__cause__ = twin.__context__ = None
        twin.__traceback__ = None
        return twin
    lines = str(error).splitlines() or ["no message"]
    return RankFailed(f"rank {rank}: {type(error).__name__}: {lines[0]}")


def describe_ended_rank(children: Mapping[int, int]) -> str:
    """Return which rank forked by this process has exited and how; empty if none has.

    If several have exited, the first cause is reported: a rank killed by a signal before one that exited with an error.

    Args:
        children: Ranks by process ID.
    """
    ends: list[tuple[int, str]] = []
    for pid, rank in children.items():
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if found is not None and found.si_code != os.CLD_EXITED:
            ends.append((0, f"rank {rank} was killed by {signal.Signals(found.si_status).name}"))
        elif found is not None:
            lost_others = found.si_status == EXIT_PREEMPTED
            ends.append((1 + lost_others, f"rank {rank} exited with exit code {found.si_status}"))
    return min(ends, default=(0, ""), key=lambda end: end[0])[1]


#: Parts of the messages of gloo, NCCL and their sockets when a peer has exited or does not respond.
_LOSSES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "gloo/transport",
    "timed out waiting",
    "nccl communicator was aborted",
    "remote process exited",
    "socket timeout",
    "failed to recv",
    "failed to send",
)


def is_rank_loss(error: BaseException) -> bool:
    """Return whether an exception means that another rank has exited or does not respond."""
    if isinstance(error, RankLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or any(words in text for words in _LOSSES)
