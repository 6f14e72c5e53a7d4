"""The words of torchrun to the ranks that it has begun: who they are, and where they meet again when it begins them anew.

Read before torch is imported: the command line asks who speaks for all.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mptrain.errors import EnvironmentRefused

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class TorchrunRank:
    """One of several ranks that torchrun has begun.

    Attributes:
        rank: Among all.
        count: Of all.
        local_rank: Among those on this machine.
        local_count: Of those on this machine.
        speaks: It says its errors: the first on its machine, or nobody has said whether it is.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    speaks: bool = True


def torchrun_rank() -> TorchrunRank | None:
    """Return what torchrun says of this process; None where it says nothing, or there is only one rank.

    Raises:
        EnvironmentRefused: Variables of torchrun's are there that mean nothing, or some are missing.
    """
    rank, count = _number("RANK"), _number("WORLD_SIZE")
    if rank is None or count is None or count < 2:
        return None
    if rank >= count:
        raise EnvironmentRefused(
            f"the environment says RANK={rank} and WORLD_SIZE={count}", f"ranks count from 0 to {count - 1}"
        )
    if not os.environ.get("MASTER_ADDR") or _number("MASTER_PORT", most=_LAST_PORT) is None:
        raise EnvironmentRefused(
            "the environment names a RANK and a WORLD_SIZE, but not where the ranks meet",
            "begin them by torchrun, or set MASTER_ADDR and MASTER_PORT too",
        )
    local_rank, local_count = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    return TorchrunRank(rank, count, rank if local_rank is None else local_rank, local_count or count, not local_rank)


def torchrun_command(command: str) -> str:
    """Return a command line as it is begun on as many ranks as this process is one of; as it is where torchrun began none."""
    begun = torchrun_rank()
    if begun is None:
        return command
    count, here = begun.count, begun.local_count
    machines = _number("GROUP_WORLD_SIZE") or -(-count // here)
    if machines == 1:
        return f"torchrun --nproc-per-node={here} -m {command}"
    each = here if machines * here == count else "..."  # other machines have other numbers of them
    return f"torchrun --nproc-per-node={each} --nnodes={machines} ... -m {command}"


_LAST_PORT = 65535


def _number(name: str, most: float = math.inf) -> int | None:
    word = os.environ.get(name) or None
    if word is not None and not (word.isdecimal() and int(word) <= most):
        what = "a whole number" if most == math.inf else f"a number up to {most}"
        raise EnvironmentRefused(
            f"the environment says {name}={word}, which is not {what}", f"unset {name}, or let torchrun set it"
        )
    return None if word is None else int(word)


def restarts() -> int:
    """Return how often torchrun has begun the ranks again."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def agent_keeps_the_store() -> bool:
    """Return whether the store of these ranks outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous_endpoint() -> str:
    """Return where the ranks meet, for people."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


#: Seconds of one attempt to reach the store, and those in which one that is there answers.
_ATTEMPT, _ANSWER = 3.0, 30.0


def store_of_torchrun(timeout: float = 30.0) -> Store:
    """Return the store at which the ranks meet that torchrun has begun: it keeps the store while ranks come and go.

    Args:
        timeout: Seconds to look for it.

    Raises:
        EnvironmentRefused: This rank has to keep it and cannot.
        RankLost: Nobody keeps it.
    """
    import socket
    from datetime import timedelta

    from torch.distributed import TCPStore

    from mptrain.parallel.communicator import RankLost

    keeps = _number("RANK") == 0 and not agent_keeps_the_store()
    host, port, deadline = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), time.monotonic() + timeout
    while not keeps:  # torch would look for it too, but hears no signal meanwhile
        try:
            with socket.create_connection((host, port), timeout=_ATTEMPT):
                break
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or type(error).__name__
                raise RankLost(
                    f"no first rank has answered at {rendezvous_endpoint()} for {timeout:g} s: {why}"
                ) from error
            time.sleep(0.1)
    try:
        store = TCPStore(
            host, port, is_master=keeps, wait_for_workers=False, timeout=timedelta(seconds=min(timeout, _ANSWER))
        )
    except RuntimeError as error:
        if not keeps:
            raise RankLost(f"the ranks cannot meet at {rendezvous_endpoint()}") from error
        raise EnvironmentRefused(
            f"the first rank cannot listen at {rendezvous_endpoint()}",
            "MASTER_ADDR must be its machine, and MASTER_PORT a free port of that",
        ) from error
    store.set_timeout(timedelta(seconds=timeout))
    return store


#: Keys under which ranks say that they have come, and the first of them that all have.
_COME, _ALL = "come", "all"


def rendezvous(store: Store, rank: int, count: int, timeout: float) -> None:
    """Wait until all ranks have come to a store, hearing signals meanwhile.

    Args:
        store: Of this beginning of the ranks.
        rank: Which this one is.
        count: How many there must be.
        timeout: Seconds to wait for them.

    Raises:
        RankLost: They do not come, or the store has gone.
    """
    from mptrain.parallel.communicator import RankLost

    deadline, keys = time.monotonic() + timeout, [f"{_COME}/{one}" for one in range(count)]
    try:
        store.set(keys[rank], "")
        while not store.check([_ALL]):
            if rank == 0 and store.check(keys):
                store.set(_ALL, "")
            elif time.monotonic() > deadline:
                found = sum(store.check([key]) for key in keys)
                raise RankLost(f"{found} of {count} ranks have come to {rendezvous_endpoint()} within {timeout:g} s")
            time.sleep(0.02 + count / 10_000)  # one store answers all of them
    except RuntimeError as error:
        raise RankLost(
            f"whoever kept the store at {rendezvous_endpoint()} has ended before all ranks had come"
        ) from error


#: Key under which the first rank says where the run is, for the ranks that torchrun begins when some have died.
_RUN = "mptrain/run"


def remember_run(root: str) -> None:
    """Let ranks that torchrun begins again go on with the run in a folder."""
    if torchrun_rank() is not None and agent_keeps_the_store():
        store_of_torchrun().set(_RUN, root)


def run_before_restart() -> str | None:
    """The folder of the run that these ranks had begun when torchrun had to begin them again."""
    if torchrun_rank() is None or not agent_keeps_the_store():
        return None
    store = store_of_torchrun()
    return store.get(_RUN).decode() if store.check([_RUN]) else None
