"""The processes of one run, and what they tell each other.

A run on one process is `SINGLE_PROCESS`: it answers every question by itself, so nobody has to ask how many there are. What is
exchanged on the host goes through gloo; what is on devices, through the library of the device (NCCL on CUDA).

Every exchange takes place on every rank and on every step, whatever the values turn out to be: a collective that only some
ranks enter is how a run hangs.
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

#: Seconds between looks at an event, and those in which exchanges on devices are aborted, or it is done without them.
_POLL, _ABORTED = 0.0005, 2.0

#: Under which a rank leaves word, and how many seconds the others look for it.
_WHY, _WORD = "why", 0.5

_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64: multiples of it, and of another odd number, are far apart


class Communicator:
    """A run on one process.

    Attributes:
        rank: Which of the processes this is, from 0.
        world_size: Number of processes.
        local_rank: Which of those on this machine this is.
        local_world_size: Number of processes on this machine.
    """

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1
    name = ""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank keeps records and speaks for all."""
        return self.rank == 0

    def use(self, device: torch.device) -> None:
        """From here on, exchange device tensors by the library that suits the device."""

    def all_reduce_ints(self, numbers: Sequence[int]) -> list[int]:
        """Host numbers, each summed over ranks."""
        return list(numbers)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a device tensor over ranks in place."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, ``[N, ...]`` in ranks' order, on the device."""
        return tensor.unsqueeze(0)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite device tensors by those of the first rank."""

    def all_gather_object(self, value: Value) -> list[Value]:
        """Values of all ranks, in their order."""
        return [value]

    def broadcast_object(self, value: Value) -> Value:
        """The value of the first rank."""
        return value

    def together(self) -> AbstractContextManager[None]:
        """A region that all ranks leave in the same way: an error of one of them is raised by all."""
        return contextlib.nullcontext()

    def main_process_first(self) -> AbstractContextManager[None]:
        """A region that the others enter when the first rank has left it: what it downloads or unpacks is there then."""
        return contextlib.nullcontext()

    def raise_for_all(self, error: Exception | None) -> None:
        """Raise on every rank what one of them has raised; nothing where none has."""
        if error is not None:
            raise error

    def send_error(self, error: BaseException) -> None:
        """Leave word for those who notice that this rank has ended."""

    def why(self) -> MptrainError | None:
        """What a lost rank has left word of."""
        return None

    def abandon(self) -> None:
        """Stop waiting for lost ranks on the device."""

    def wait_for(self, event: torch.Event) -> None:
        """Wait until the device has come to an event; every wait of a run for its device is one of these."""
        event.synchronize()

    def is_lost(self, error: BaseException) -> bool:
        """Return whether an exception came of another rank's end."""
        return False

    def who_ended(self) -> str:
        """Which rank has ended and how, as far as it can be told."""
        return "another rank of the run has ended, or does not answer"

    def begin_step(self, seed: int, step: int) -> None:
        """Called before each step: draws of several ranks must differ, and depend on nothing that a lost rank takes along."""

    def describe(self) -> str:
        """How many there are, for people; empty for one."""
        return ""


SINGLE_PROCESS = Communicator()


class RankLost(Preempted):
    """Another rank does not answer any more; the run can go on from its last checkpoint."""

    def __init__(self, message: str = "another rank of the run has ended, or does not answer") -> None:
        super().__init__(message, "run it again", EXIT_PREEMPTED, saved=False, asked=False)


class RankFailed(MptrainError):
    """Another rank has an error that is none of this program's kinds."""


class DistributedCommunicator(Communicator):
    """One of several processes.

    Args:
        rank: Which.
        world_size: Number of processes.
        local_rank: Which of those on this machine.
        local_world_size: Number of processes on this machine.
        timeout: Seconds after which one that does not answer counts as lost.
        store: Where they meet.
        meeting: Seconds after which one that does not meet the others counts as lost; None takes ``timeout``.
        children: Process numbers of the ranks that this one has forked, with their numbers as ranks.

    Raises:
        RankLost: They have not all come.
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
            # torch would end the process where an exchange is aborted, or takes too long; `PeerWatchdog` aborts it in order. Torchrun sets it.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            with self._noticing_loss():
                self.group = self._dist.new_group(backend="nccl", timeout=self._timeout)  # type: ignore[assignment]
            self.name = "nccl"
            self.watch_peers(current_stream(device).query)

    def watch_peers(self, idle: Callable[[], bool]) -> None:
        """From here on, notice ranks that end while the device waits for them.

        Args:
            idle: Whether the device has done all that it was given.
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
            RankLost: The device waits for a rank that has ended; what it has come to since is not to be used.
        """
        while not event.query() and not self._missed():
            time.sleep(_POLL)
        if self._missed():
            self._notice()
            raise RankLost(self._missed())
        self._heard = time.monotonic()  # a device that gets on waits for nobody

    def is_lost(self, error: BaseException) -> bool:
        """See `Communicator.is_lost`; exchanges that were given up fail in many words."""
        own = not isinstance(error, Exception) or isinstance(error, MptrainError)
        return is_rank_loss(error) or (bool(self._missed()) and not own)

    def _silence(self) -> str:
        """That for too long no exchange was begun or ended, nor has the device come to an event; empty if it is not so."""
        timeout = self._timeout.total_seconds()
        return f"no rank has answered for {timeout:g} s" if time.monotonic() - self._heard > timeout else ""

    def _missed(self) -> str:
        """Whom the device waits for in vain; empty if for nobody."""
        return "" if self._peer_watchdog is None else self._peer_watchdog.lost

    def _notice(self) -> None:
        if self._peer_watchdog is not None:
            self._peer_watchdog.notice()

    def _give_up(self) -> None:
        """Abort the exchanges on devices, which may take long itself."""
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
        """See `Communicator.together`. What is done inside may exchange something; so an error cannot be exchanged, but is left word of."""
        try:
            yield
            self.all_reduce_ints([0])  # all are here, or it is noticed
        except Exception as error:
            if not self.is_lost(error):
                self.send_error(error)
                self.leave()  # which closes the connections: whatever the others are waiting for, they wait no longer
                raise
            why = self.why()
            if why is not None:
                raise why from error
            raise RankLost(self.who_ended()) from error

    def raise_for_all(self, error: Exception | None) -> None:
        """Raise on every rank what the first of those in trouble has raised; nothing where none is.

        Raises:
            MptrainError: Of the kind that the rank has raised, which it names where all others know of none.
            RankFailed: The rank's error is none of this program's.
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
            with contextlib.suppress(RuntimeError):  # whoever kept the words may have gone as well
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
        """See `Communicator.abandon`; gloo waits for nobody whose connection has closed."""
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
        """Seed the generators by (seed, step, rank)."""
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
        """Take leave of the others."""
        if self._peer_watchdog is not None:
            self._peer_watchdog.end()
        with contextlib.suppress(Exception):  # who has lost one cannot part in order
            self._dist.destroy_process_group()


def _said(kind: str, message: str, hint: str, code: int) -> MptrainError:
    """An error that another rank has left word of."""
    error = RankFailed(message, hint)
    if kind != RankFailed.__name__:
        error.exit_code = code  # type: ignore[misc]
    return error


def error_for_other_ranks(error: Exception, rank: int) -> MptrainError:
    """An error as another rank can raise it: one of ours keeps kind, code and hint, and says whose it is."""
    if isinstance(error, MptrainError) and not isinstance(error, RankFailed | Preempted):
        twin = copy.copy(error)
        twin.args = (f"rank {rank}: {error}",)
        twin.__cause__ = twin.__context__ = None
        twin.__traceback__ = None
        return twin
    lines = str(error).splitlines() or ["no message"]
    return RankFailed(f"rank {rank}: {type(error).__name__}: {lines[0]}")


def describe_ended_rank(children: Mapping[int, int]) -> str:
    """Which of the ranks that this process has forked has ended and how; empty if none has.

    Where several have, the one that the others have lost: that of a signal, or else of an error.

    Args:
        children: Numbers of ranks by those of processes.
    """
    ends: list[tuple[int, str]] = []
    for pid, rank in children.items():
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if found is not None and found.si_code != os.CLD_EXITED:
            ends.append((0, f"rank {rank} was ended by {signal.Signals(found.si_status).name}"))
        elif found is not None:
            lost_others = found.si_status == EXIT_PREEMPTED
            ends.append((1 + lost_others, f"rank {rank} has ended with exit code {found.si_status}"))
    return min(ends, default=(0, ""), key=lambda end: end[0])[1]


#: What gloo, NCCL and their sockets say where a peer has gone or does not answer.
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
    """Whether an exception says that another rank has gone, or does not answer."""
    if isinstance(error, RankLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or any(words in text for words in _LOSSES)
