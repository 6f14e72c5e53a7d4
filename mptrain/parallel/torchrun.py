"""Distributed training without torch: its options, torchrun's environment and rendezvous, and errors of ranks.

Imported before torch, because the command line needs to know which rank prints.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mptrain.system.errors import (
    EXIT_OK,
    EXIT_PREEMPTED,
    ConfigError,
    EnvironmentRefused,
    MptrainError,
    Preempted,
    Problem,
    UsageError,
)
from mptrain.system.fields import PositiveFloat, PositiveInt
from mptrain.system.machine import is_running

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class DistributedOptions:
    """Options of distributed training, the ``distributed`` keys of a configuration; without effect on one rank.

    Attributes:
        kind: ``ddp``: every rank holds all weights (torch's DistributedDataParallel). ``fsdp2``: weights, master
            weights, gradients and optimizer state are sharded over ranks (torch's fully_shard).
        procs: Number of ranks to start on this machine; None uses the ranks that torchrun has started, or one.
        sync_batchnorm: Whether BatchNorm computes its statistics over the samples of all ranks.
        reduce: Dtype in which gradients are summed over ranks: ``float32``, or ``gradients`` for their own dtype.
        find_unused_parameters: Whether ``ddp`` looks in every step for parameters without a gradient on a rank.
            Otherwise this is done only if the first batch has unused parameters, and a later batch with unused
            parameters stops the run.
        units: Qualified names of modules whose weights ``fsdp2`` gathers together; the remaining weights form one unit.
            None selects the composite members of each ``nn.Sequential`` and ``nn.ModuleList``.
        timeout: Seconds after which a rank that does not respond counts as lost.

    Raises:
        ConfigError: ``units`` is set without ``fsdp2``, or ``find_unused_parameters`` without ``ddp``.
    """

    kind: Literal["ddp", "fsdp2"] = "ddp"
    procs: PositiveInt | None = None
    sync_batchnorm: bool = False
    reduce: Literal["float32", "gradients"] = "float32"
    find_unused_parameters: bool = False
    units: tuple[str, ...] | None = None
    timeout: PositiveFloat = 1800.0

    def __post_init__(self) -> None:
        if self.units is not None and self.kind != "fsdp2":
            raise ConfigError(
                Problem(
                    f"distributed.units has no effect with distributed.kind={self.kind}",
                    "remove it, or set distributed.kind=fsdp2: only fsdp2 gathers weights by unit",
                )
            )
        if self.find_unused_parameters and self.kind != "ddp":
            raise ConfigError(
                Problem(
                    f"distributed.find_unused_parameters has no effect with distributed.kind={self.kind}",
                    "remove it, or set distributed.kind=ddp: only ddp supports missing gradients on a rank",
                )
            )


class RankLost(Preempted):
    """Error raised when another rank has exited or stopped responding; the run can resume from its last checkpoint."""

    def __init__(self, message: str = "another rank has exited or does not respond") -> None:
        super().__init__(message, "run the command again", EXIT_PREEMPTED, saved=False, asked=False)


class RankFailed(MptrainError):
    """Error raised on this rank when another rank has failed with an exception that is not an `MptrainError`."""


def published_error(kind: str, message: str, hint: str, code: int) -> MptrainError:
    """Return an error that another rank has published: its class, message, hint and exit code."""
    error = RankFailed(message, hint)
    if kind != RankFailed.__name__:
        error.exit_code = code  # type: ignore[misc]
    return error


def error_for_other_ranks(error: Exception, rank: int) -> MptrainError:
    """Return a picklable form of one rank's error, with the rank in its message, to raise on other ranks.

    It has the type, exit code and hint of an `MptrainError`; preemption and any other error become a `RankFailed`.
    """
    if isinstance(error, MptrainError) and not isinstance(error, RankFailed | Preempted):
        twin = copy.copy(error)
        twin.args = (f"rank {rank}: {error}",)
        twin.__cause__ = twin.__context__ = None
        twin.__traceback__ = None
        return twin
    lines = str(error).splitlines() or ["no message"]
    return RankFailed(f"rank {rank}: {type(error).__name__}: {lines[0]}")


def describe_ended_rank(children: Mapping[int, int]) -> str:
    """Return a phrase about a forked rank that was lost, such as ``rank 1 was killed by SIGKILL``; else empty.

    A rank that exited with exit code 0 has done its work and is not lost. If several have exited, the first cause is
    reported: a rank killed by a signal before one that exited with an error, and that before one that exited because it
    had lost another rank. Exit statuses remain available to `os.waitpid`. ``children`` has the rank by process ID.
    """
    ends: list[tuple[int, str]] = []
    for pid, rank in children.items():
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if status is not None and status.si_code != os.CLD_EXITED:
            ends.append((0, f"rank {rank} was killed by {signal.Signals(status.si_status).name}"))
        elif status is not None and status.si_status != EXIT_OK:
            lost_others = status.si_status == EXIT_PREEMPTED
            ends.append((1 + lost_others, f"rank {rank} exited with exit code {status.si_status}"))
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
    """Return whether an exception means that another rank has exited or does not respond.

    True for `RankLost`, for `torch.distributed.DistError`, and for a RuntimeError whose message says so.
    """
    if isinstance(error, RankLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or any(words in text for words in _LOSSES)


@dataclass(frozen=True)
class TorchrunRank:
    """Rank of this process among the several ranks that torchrun has started, read from its environment variables.

    Attributes:
        count: Number of ranks (world size); ``local_count`` is that on this machine.
        speaks: Whether this rank prints its errors: local rank 0, or a rank without LOCAL_RANK.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    speaks: bool = True


def torchrun_rank() -> TorchrunRank | None:
    """Return this process's rank from torchrun's environment variables; None without them, or with only one rank.

    Raise EnvironmentRefused if the variables are invalid or incomplete.
    """
    rank, count = _number("RANK"), _number("WORLD_SIZE")
    if rank is None or count is None or count < 2:
        return None
    if rank >= count:
        raise EnvironmentRefused(
            f"environment: RANK={rank} is out of range for WORLD_SIZE={count}", f"set RANK from 0 to {count - 1}"
        )
    if not os.environ.get("MASTER_ADDR") or _number("MASTER_PORT", most=_LAST_PORT) is None:
        raise EnvironmentRefused(
            "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
            "start the ranks with torchrun, or set MASTER_ADDR and MASTER_PORT too",
        )
    local_rank, local_count = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    return TorchrunRank(rank, count, rank if local_rank is None else local_rank, local_count or count, not local_rank)


def refuse_torchrun(what: str) -> None:
    """Reject a command that every rank of torchrun would run separately.

    Raises:
        UsageError: torchrun has started this process.
    """
    if torchrun_rank() is not None:
        raise UsageError(
            f"torchrun starts the ranks of a single run, but {what} is not a single run",
            "run it without torchrun; in a sweep, distributed.procs=2 gives each run two ranks",
        )


def torchrun_command(command: str) -> str:
    """Prefix a command line shown to the user with torchrun for as many ranks as now; unchanged without torchrun.

    The command line begins with a module name, such as ``mptrain resume``.
    """
    begun = torchrun_rank()
    if begun is None:
        return command
    count, here = begun.count, begun.local_count
    machines = _number("GROUP_WORLD_SIZE") or -(-count // here)
    if machines == 1:
        return f"torchrun --nproc-per-node={here} -m {command}"
    each = here if machines * here == count else "..."  # machines have different numbers of ranks
    return f"torchrun --nproc-per-node={each} --nnodes={machines} ... -m {command}"


_LAST_PORT = 65535


def _number(name: str, most: float = math.inf) -> int | None:
    word = os.environ.get(name) or None
    if word is not None and not (word.isdecimal() and int(word) <= most):
        what = "a whole number" if most == math.inf else f"a number up to {most}"
        raise EnvironmentRefused(f"environment: {name}={word} is not {what}", f"unset {name}, or let torchrun set it")
    return None if word is None else int(word)


def restarts() -> int:
    """Return the number of times that torchrun has restarted the ranks of this job."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def agent_keeps_the_store() -> bool:
    """Return whether torchrun's agent process hosts the rendezvous store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous_endpoint() -> str:
    """Return the address at which torchrun's ranks meet, ``MASTER_ADDR:MASTER_PORT``, for messages."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


#: Seconds of one attempt to connect to the store, and seconds in which a running store must respond.
_ATTEMPT, _ANSWER = 3.0, 30.0


def store_of_torchrun(timeout: float = 30.0) -> Store:
    """Connect to the key-value store that the ranks started by torchrun share, or host it on rank 0, and return it.

    If torchrun's agent hosts the store, it survives restarts of ranks. ``timeout`` is in seconds.

    Raises:
        EnvironmentRefused: This rank must host the store and cannot.
        RankLost: No process hosts the store.
    """
    import socket
    from datetime import timedelta

    from torch.distributed import TCPStore

    keeps = _number("RANK") == 0 and not agent_keeps_the_store()
    host, port, deadline = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), time.monotonic() + timeout
    while not keeps:  # torch would retry too, but does not handle signals meanwhile
        try:
            with socket.create_connection((host, port), timeout=_ATTEMPT):
                break
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or type(error).__name__
                raise RankLost(
                    f"rank 0 has not responded at {rendezvous_endpoint()} for {timeout:g} s: {why}"
                ) from error
            time.sleep(0.1)
    try:
        store = TCPStore(
            host, port, is_master=keeps, wait_for_workers=False, timeout=timedelta(seconds=min(timeout, _ANSWER))
        )
    except RuntimeError as error:
        if not keeps:
            raise RankLost(f"cannot connect to the store at {rendezvous_endpoint()}") from error
        raise EnvironmentRefused(
            f"rank 0 cannot listen at {rendezvous_endpoint()}",
            "set MASTER_ADDR to the machine of rank 0, and MASTER_PORT to a free port there",
        ) from error
    store.set_timeout(timedelta(seconds=timeout))
    return store


#: Store keys: a rank has joined, with its process, and all ranks have joined, which rank 0 sets; the error of a rank
#: that does not join; rank 0 says why it ends.
_COME, _ALL, _REFUSAL, _SPOKEN = "come", "all", "refusal", "spoken"


#: Number of the run that this program is at or was at last, from 0; -1 before the first. It is the same on all ranks,
#: and again after a restart, because they all run the same program.
_number_of_run = -1


def count_run() -> None:
    """Count a run that the ranks of torchrun begin: those of a second one in a program meet under keys of their own.

    Raise EnvironmentRefused for a second one if rank 0 hosts the store, which ends with the first.
    """
    global _number_of_run
    if _number_of_run >= 0 and not agent_keeps_the_store():
        raise EnvironmentRefused(
            "ranks that torchrun's agent has not started train one run in a program",
            "start them with torchrun, or a program for each run",
        )
    _number_of_run += 1


def ranks_store(timeout: float) -> Store:
    """Connect as `store_of_torchrun`, to the keys of this run of the ranks that torchrun has now started."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"ranks/{restarts()}/{max(_number_of_run, 0)}", store_of_torchrun(timeout))


def tell_refusal(error: MptrainError) -> None:
    """Tell rank 0, which waits in `rendezvous`, why this rank of torchrun ends, and let it print that first.

    torchrun ends all ranks as soon as one has ended, so rank 0 could say nothing, and other ranks print nothing. Does
    nothing once all ranks have joined. Rank 0 tells the others that it says why it ends (`speaks_for_first_rank`).
    """
    if not agent_keeps_the_store():
        return
    with contextlib.suppress(RuntimeError, MptrainError):
        begun = torchrun_rank()
        if begun is not None and begun.rank == 0:
            ranks_store(_ATTEMPT).set(_SPOKEN, "")
        if begun is None or begun.rank == 0 or isinstance(error, Preempted):
            return
        store, refusal = ranks_store(_ANSWER), error_for_other_ranks(error, begun.rank)
        deadline = time.monotonic() + _ANSWER
        if not store.check([_ALL]):
            store.set(_REFUSAL, json.dumps([type(refusal).__name__, str(refusal), refusal.hint, refusal.exit_code]))
        while not store.check([_ALL]) and time.monotonic() < deadline:  # until torchrun ends this rank after rank 0
            time.sleep(0.05)


def speaks_for_first_rank() -> bool:
    """Return whether this silent rank must say why the run ends: rank 0 has died without a word beside it, its second.

    It waits until rank 0 has ended, which saves what it can if it has lost another rank.
    """
    with contextlib.suppress(RuntimeError, MptrainError):
        begun = torchrun_rank()
        if begun is None or (begun.rank, begun.local_rank) != (1, 1) or not agent_keeps_the_store():
            return False
        store, deadline = ranks_store(_ATTEMPT), time.monotonic() + _ANSWER
        first = int(store.get(f"{_COME}/0")) if store.check([_ALL]) else os.getpid()
        while is_running(first) and not store.check([_SPOKEN]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not is_running(first) and not store.check([_SPOKEN])
    return False


def rendezvous(store: Store, rank: int, count: int, timeout: float) -> None:
    """Wait up to ``timeout`` seconds until all ranks have joined the run, handling signals meanwhile.

    A restart of the ranks needs another store, or another key prefix. Raise RankLost if the store is lost or a
    rank is late, and the error of a rank that has ended (`tell_refusal`).
    """
    deadline, keys = time.monotonic() + timeout, [f"{_COME}/{peer}" for peer in range(count)]
    try:
        store.set(keys[rank], str(os.getpid()))
        while not store.check([_ALL]):
            if rank == 0 and store.check(keys):
                store.set(_ALL, "")
            elif rank == 0 and store.check([_REFUSAL]):
                raise published_error(*json.loads(store.get(_REFUSAL)))
            elif time.monotonic() > deadline:
                joined = sum(store.check([key]) for key in keys)
                raise RankLost(f"{joined} of {count} ranks joined at {rendezvous_endpoint()} within {timeout:g} s")
            time.sleep(0.02 + count / 10_000)  # one store serves all ranks
    except RuntimeError as error:
        raise RankLost(f"the store at {rendezvous_endpoint()} was closed before all ranks had joined") from error


#: Store key of the directory of a run, with its number, which rank 0 sets for ranks that torchrun restarts.
_RUN = "mptrain/run/{}"


def remember_run(root: str) -> None:
    """Write the run directory to torchrun's store, so that ranks that torchrun restarts resume this run.

    Does nothing without torchrun, or if the store does not outlive the ranks.
    """
    if torchrun_rank() is not None and agent_keeps_the_store():
        store_of_torchrun().set(_RUN.format(_number_of_run), root)


def run_before_restart() -> str | None:
    """Return the run directory that `remember_run` wrote before torchrun restarted the ranks; None if there is none."""
    if torchrun_rank() is None or not agent_keeps_the_store():
        return None
    store, key = store_of_torchrun(), _RUN.format(_number_of_run)
    return store.get(key).decode() if store.check([key]) else None
