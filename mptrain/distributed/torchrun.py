"""What torchrun tells the ranks that it has begun: who they are, and where they meet again when it begins them anew.

Read before torch is imported: the command line asks who speaks for all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mptrain.errors import EnvironmentRefused

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Begun:
    """One of several ranks that torchrun has begun.

    Attributes:
        rank: Among all.
        count: Of all.
        local_rank: Among those on this machine.
        local_count: Of those on this machine.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int


def begun_by_torchrun() -> Begun | None:
    """What torchrun says of this process; None where it says nothing, or there is only one rank.

    Raises:
        EnvironmentRefused: A variable of torchrun's is not a number.
    """
    rank, count = _number("RANK"), _number("WORLD_SIZE")
    if rank is None or count is None or count < 2:
        return None
    local_rank, local_count = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    return Begun(rank, count, rank if local_rank is None else local_rank, local_count or count)


def _number(name: str) -> int | None:
    word = os.environ.get(name) or None
    if word is not None and not word.isdecimal():
        raise EnvironmentRefused(
            f"the environment says {name}={word}, which is not a number", f"unset {name}, or let torchrun set it"
        )
    return None if word is None else int(word)


def restarts() -> int:
    """How often torchrun has begun the ranks again."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def agent_keeps_the_store() -> bool:
    """Whether the store of these ranks outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_torchrun() -> Store:
    """Where the ranks meet that torchrun has begun: it keeps the store while ranks come and go.

    Raises:
        EnvironmentRefused: It is not said where.
        RankLost: Nobody keeps it.
    """
    from torch._C._distributed_c10d import TCPStore

    from mptrain.distributed.ranks import RankLost

    host, port, rank = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT"), _number("RANK")
    if not host or port is None:
        raise EnvironmentRefused(
            "the environment names a RANK and a WORLD_SIZE, but not where the ranks meet",
            "begin them by torchrun, or set MASTER_ADDR and MASTER_PORT too",
        )
    try:
        return TCPStore(host, port, is_master=rank == 0 and not agent_keeps_the_store(), wait_for_workers=False)
    except RuntimeError as error:
        raise RankLost(f"the ranks cannot meet at {host}:{port}") from error


#: Under which the first rank says where the run is, for the ranks that torchrun begins when some have died.
_RUN = "mptrain/run"


def remember_run(root: str) -> None:
    """Let ranks that torchrun begins again go on with the run in a folder."""
    if begun_by_torchrun() is not None and agent_keeps_the_store():
        store_of_torchrun().set(_RUN, root)


def run_before_restart() -> str | None:
    """The folder of the run that these ranks had begun when torchrun had to begin them again."""
    if begun_by_torchrun() is None or not agent_keeps_the_store():
        return None
    store = store_of_torchrun()
    return store.get(_RUN).decode() if store.check([_RUN]) else None
