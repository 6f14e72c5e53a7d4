"""Launch of the ranks of a training run: join the ranks that torchrun has started, or fork them on this machine.

Ranks are forked before torch has run anything, so they start at once, with the configuration already checked. The
process that the user started is rank 0: its exit code and output are those of the run.
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

from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator, DistributedCommunicator
from mptrain.parallel.torchrun import (
    RankLost,
    count_run,
    describe_ended_rank,
    is_rank_loss,
    ranks_store,
    rendezvous,
    torchrun_rank,
)
from mptrain.system.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, ConfigError, EnvironmentRefused, MptrainError
from mptrain.system.machine import LOOPBACK, ends_with_parent, usable_cores

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from mptrain.parallel.torchrun import DistributedOptions


#: Seconds that other ranks have to exit after rank 0; and after an error, when they may be waiting in a collective.
GRACE, GRACE_AFTER_ERROR = 10.0, 1.0

#: Seconds that ranks have to connect to each other once all have started.
MEETING = 30.0

_HOST = "127.0.0.1"

#: Bytes of a port number.
_PORT = 2

#: Store keys: a forked rank is ready; rank 0's answer; the two values of the answer.
_HERE, _WORD, _ALL, _LOST = "here", "word", "all", "lost"


@contextlib.contextmanager
def launch_ranks(options: DistributedOptions) -> Iterator[Communicator]:
    """Launch or join the ranks of a training run, and yield this rank's communicator.

    The context manager's body is the run and executes on every rank. A forked rank exits at the end of the body and
    never leaves the context.

    Raises:
        ConfigError: torchrun has started another number of ranks than ``distributed.procs``.
        EnvironmentRefused: torchrun's variables are invalid, or ranks cannot connect on this machine.
        RankLost: Not all ranks have joined.
    """
    torchrun = torchrun_rank()
    if torchrun is not None:
        if options.procs not in (None, torchrun.count):
            raise ConfigError(
                f"distributed.procs={options.procs}, but torchrun has started {torchrun.count} ranks",
                "set distributed.procs=null: the option is for runs without torchrun",
            )
        count_run()
        store = ranks_store(options.timeout)
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
    _prepare_environment(count)
    sys.stdout.flush()
    sys.stderr.flush()
    # If the pipe closes without data, the other ranks know that rank 0 has exited.
    reading, writing = (os.fdopen(end, mode, buffering=0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    children: dict[int, int] = {}
    group, grace = None, GRACE
    try:
        for rank in range(1, count):
            child = os.fork()
            if child == 0:
                # Else this rank itself would hold the pipe open after rank 0 has exited.
                writing.close()
                yield from _ended_as_process(rank, count, timeout, reading)
            children[child] = rank
        reading.close()
        store = _store(None)
        with contextlib.suppress(OSError):  # all ranks have died already
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
    """Wait for all forked ranks here, not in gloo, which does not notice that a rank has died before connecting."""
    deadline = time.monotonic() + timeout
    word = _LOST
    try:
        while not store.check([f"{_HERE}/{rank}" for rank in children.values()]):
            if ending := describe_ended_rank(children):
                raise RankLost(f"{ending} before training began")
            if time.monotonic() > deadline:
                raise RankLost(f"not all {len(children) + 1} ranks joined within {timeout:g} s")
            time.sleep(0.002)
        word = _ALL
    finally:
        store.set(_WORD, word)


def _come(store: Store, rank: int, timeout: float) -> None:
    store.set(f"{_HERE}/{rank}", "")
    store.wait([_WORD], timedelta(seconds=timeout))
    if store.get(_WORD).decode() == _LOST:
        raise RankLost


def _prepare_environment(count: int) -> None:
    # Like the store, gloo's connections are to be reached from this machine only.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    import torch

    # Threads of one rank would otherwise spin on the cores of another.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // count))


def _ended_as_process(rank: int, count: int, timeout: float, reading: IO[bytes]) -> Iterator[Communicator]:
    """Run as a forked rank, without standard output and killed if its parent dies; exit the process at the end."""
    code = EXIT_OK
    try:
        ends_with_parent(signal.SIGKILL)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.close(quiet)
        with reading:
            port = reading.read(_PORT)
        if not port:
            os._exit(EXIT_BUG)  # rank 0 has exited
        store = _store(int.from_bytes(port, "big"))
        _come(store, rank, timeout)
        group = DistributedCommunicator(rank, count, rank, count, timeout, store, MEETING)
        yield group
        group.leave()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except MptrainError as error:  # rank 0 reports it
        code = error.exit_code
    except BaseException as error:
        code = EXIT_BUG
        if not is_rank_loss(error) and os.environ.get("MPTRAIN_TRACEBACK"):  # otherwise rank 0 reports it in one line
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _store(port: int | None) -> TCPStore:
    from torch.distributed import TCPStore

    try:
        if port is not None:
            return TCPStore(_HOST, port, is_master=False, wait_for_workers=False)
        with socket.create_server((_HOST, 0)) as listening:  # by default TCPStore would listen on all interfaces
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
            f"ranks cannot connect on this machine: {error}",
            f"allow TCP ports on {_HOST}, or run without distributed.procs",
        ) from error


def reap(children: list[int], grace: float = GRACE) -> None:
    """Wait for forked ranks (process IDs) to exit, and kill those still running after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    left = list(children)
    while left:
        for pid in list(left):
            try:
                done = os.waitpid(pid, os.WNOHANG)[0]
            except ChildProcessError:  # already waited for, or not a child
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
