"""Makes this process one of several: those that torchrun has begun, or those that it begins itself.

Ranks on this machine are forked before torch has run anything: they begin at once, with the configuration that was
checked already. The process that was started is the first rank, so its end is the run's end, and its output the run's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from mptrain.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, ConfigError, EnvironmentRefused, MptrainError
from mptrain.machine import LOOPBACK, ends_with_parent, usable_cores
from mptrain.parallel.communicator import (
    SINGLE_PROCESS,
    Communicator,
    DistributedCommunicator,
    RankLost,
    describe_ended_rank,
    is_rank_loss,
)
from mptrain.parallel.torchrun import rendezvous, restarts, store_of_torchrun, torchrun_rank

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from mptrain.parallel.options import DistributedOptions


#: Seconds that other ranks have to end after the first one has; after an error, for which they may wait in an exchange.
GRACE, GRACE_AFTER_ERROR = 10.0, 1.0

#: Seconds that ranks which are all there have to connect to each other.
MEETING = 30.0

_HOST = "127.0.0.1"

#: Bytes in which the number of a port is told.
_PORT = 2

#: Keys under which forked ranks say that they are there, and the first of them whether all are.
_HERE, _WORD, _ALL, _LOST = "here", "word", "all", "lost"


@contextlib.contextmanager
def launch_ranks(options: DistributedOptions) -> Iterator[Communicator]:
    """The ranks of a run, met and waiting for each other. A forked one does not leave this region but by ending.

    Args:
        options: How many, and how long to wait for one.

    Raises:
        ConfigError: torchrun has begun another number than is asked for.
        RankLost: They have not all come.
    """
    torchrun = torchrun_rank()
    if torchrun is not None:
        from torch.distributed import PrefixStore

        if options.procs not in (None, torchrun.count):
            raise ConfigError(
                f"distributed.procs={options.procs}, but torchrun has begun {torchrun.count} ranks",
                "write distributed.procs=null: it begins ranks where torchrun does not",
            )
        store = PrefixStore(f"ranks/{restarts()}", store_of_torchrun(options.timeout))
        rendezvous(store, torchrun.rank, torchrun.count, options.timeout)
        group = DistributedCommunicator(
            torchrun.rank,
            torchrun.count,
            torchrun.local_rank,
            torchrun.local_count,
            options.timeout,
            store,
            MEETING + torchrun.count,
        )
        try:
            yield group
        finally:
            group.leave()
    elif options.procs is None or options.procs == 1:
        yield SINGLE_PROCESS
    else:
        yield from _forked(options.procs, options.timeout)


def _forked(count: int, timeout: float) -> Iterator[Communicator]:
    """Fork the other ranks, and be the first."""
    _prepare_environment(count)
    sys.stdout.flush()
    sys.stderr.flush()
    # Closed without a word, it tells the others that the first rank has gone.
    reading, writing = (os.fdopen(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    children: dict[int, int] = {}
    group, grace = None, GRACE
    try:
        for rank in range(1, count):
            child = os.fork()
            if child == 0:
                writing.close()
                yield from _ended_as_process(rank, count, timeout, reading)
            children[child] = rank
        reading.close()
        store = _store(None)
        with contextlib.suppress(OSError):  # all have died already
            writing.write(store.port.to_bytes(_PORT, "big") * len(children))
        writing.close()
        _wait_for_all(store, children, timeout)
        group = DistributedCommunicator(0, count, 0, count, timeout, store, MEETING, children)
        yield group
    except BaseException:
        grace = GRACE_AFTER_ERROR
        raise
    finally:
        reading.close()
        writing.close()
        if group is not None:
            group.leave()
        reap(list(children), grace)


def _wait_for_all(store: Store, children: Mapping[int, int], timeout: float) -> None:
    """Wait until every forked rank has come; those that have wait for the first rank's word.

    Nobody tells who waits inside of gloo that the one it waits for has died.

    Raises:
        RankLost: One has died on the way, or does not come.
    """
    deadline = time.monotonic() + timeout
    word = _LOST
    try:
        while not store.check([f"{_HERE}/{rank}" for rank in children.values()]):
            if ending := describe_ended_rank(children):
                raise RankLost(f"{ending} before training began")
            if time.monotonic() > deadline:
                raise RankLost(f"not all {len(children) + 1} ranks have come within {timeout:g} s")
            time.sleep(0.002)
        word = _ALL
    finally:
        store.set(_WORD, word)


def _come(store: Store, rank: int, timeout: float) -> None:
    """Say to the first rank that this one is here, and wait for all others.

    Raises:
        RankLost: One has died on the way.
    """
    store.set(f"{_HERE}/{rank}", "")
    store.wait([_WORD], timedelta(seconds=timeout))
    if store.get(_WORD).decode() == _LOST:
        raise RankLost


def _prepare_environment(count: int) -> None:
    """Let ranks of one machine share its cores, and find each other without the network."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // count))


def _ended_as_process(rank: int, count: int, timeout: float, reading: IO[bytes]) -> Iterator[Communicator]:
    """Be a forked rank: silent, and ended with the one that began it; never come back."""
    code = EXIT_OK
    try:
        ends_with_parent(signal.SIGKILL)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.close(quiet)
        with reading:
            port = reading.read(_PORT)
        if not port:
            os._exit(EXIT_BUG)  # the first rank has gone
        store = _store(int.from_bytes(port, "big"))
        _come(store, rank, timeout)
        group = DistributedCommunicator(rank, count, rank, count, timeout, store, MEETING)
        yield group
        group.leave()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except MptrainError as error:  # the first rank says it
        code = error.exit_code
    except BaseException as error:
        code = EXIT_BUG
        if not is_rank_loss(error) and os.environ.get("MPTRAIN_TRACEBACK"):  # else the first rank says it in a line
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _store(port: int | None) -> TCPStore:
    """Return the store at which forked ranks meet: made by the first, on a free port; by the others, found."""
    from torch.distributed import TCPStore

    try:
        if port is not None:
            return TCPStore(_HOST, port, is_master=False, wait_for_workers=False)
        with socket.create_server((_HOST, 0)) as listening:  # a store that listens by itself does so on all networks
            return TCPStore(
                _HOST,
                listening.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
    except (RuntimeError, OSError) as error:
        if port is not None:
            raise RankLost from error
        raise EnvironmentRefused(
            f"ranks cannot meet on this machine: {error}",
            f"they need a TCP port of {_HOST}; run without distributed.procs",
        ) from error


def reap(children: list[int], grace: float = GRACE) -> None:
    """Wait for other ranks to end, and end those that do not."""
    deadline = time.monotonic() + grace
    left = list(children)
    while left:
        for pid in list(left):
            try:
                done = os.waitpid(pid, os.WNOHANG)[0]
            except ChildProcessError:  # somebody has waited for it, or nobody can
                done = pid
            if done:
                left.remove(pid)
        if left and time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        if left:
            time.sleep(0.002)
