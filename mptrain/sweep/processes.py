"""Starts processes: forked from a warm server on a CPU, fresh ones for CUDA. The calling process itself never forks.

The fork server has imported torch and run nothing of it, so a fork takes milliseconds where an import takes seconds.
Jobs on CUDA are fresh processes, because a GPU's context survives no fork and `CUDA_VISIBLE_DEVICES` is read once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any, TypeVar

from mptrain.errors import EnvironmentRefused
from mptrain.interpreter import guard_multiprocessing
from mptrain.machine import is_running
from mptrain.sweep.worker import ENDING_SIGNALS, OF_THE_SERVER, Program, answer

#: A process that runs points.
Process = ForkServerProcess | SpawnProcess

T = TypeVar("T")

#: How often a process is started anew where the fork server had died.
_TRIES = 3


def warm_up(program: Program) -> None:
    """Start the fork server, which imports what jobs will need while the caller does something else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mptrain.sweep.fork_server", *program.modules])
    guard_multiprocessing()
    resource_tracker.ensure_running()  # else the server's start would do it, and unblock signals in between
    with _signals_blocked(), _one_thread():
        forkserver.ensure_running()


#: NumPy's OpenBLAS starts a thread for each core when it is imported; a process with threads cannot be forked safely.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def ask(function: Callable[[], T], program: Program) -> T:
    """The value of a function, computed in a process of its own, of which nothing remains.

    Raises:
        MptrainError: As the function raised it.
        EnvironmentRefused: The process died.
    """
    warm_up(program)
    receiver, sender = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    with receiver:
        with sender:
            process = start(forked(answer, pickle.dumps(function), sender))
        try:
            value, error = pickle.loads(receiver.recv_bytes())
        except EOFError:
            process.join()
            raise EnvironmentRefused(f"checking the points: {cause(process.exitcode or 0)}") from None
        except BaseException:
            process.kill()
            raise
        finally:
            process.join()
            process.close()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def forked(target: Callable[..., None], *arguments: Any) -> Process:
    """A process of the fork server that will call a function of a module."""
    return multiprocessing.get_context("forkserver").Process(target=target, args=arguments)


def spawned(target: Callable[..., None], *arguments: Any) -> Process:
    """A fresh process that will call a function of a module."""
    return multiprocessing.get_context("spawn").Process(target=target, args=arguments)


def start(process: Process) -> Process:
    """Start a process; a fork server that died meanwhile is started anew.

    Signals wait until it can obey them: a fresh process inherits that they are blocked.

    Raises:
        OSError, EOFError: There is none to be had.
    """
    guard_multiprocessing()
    for left in reversed(range(_TRIES)):
        try:
            with _signals_blocked(), _one_thread() if _is_forked(process) else contextlib.nullcontext():
                process.start()
            return process
        except (OSError, EOFError):
            if not left:
                raise
            time.sleep(0.1)
    raise AssertionError("unreachable")


def cause(code: int) -> str:
    """What the exit code of a process that said nothing means."""
    if code >= 0:
        return f"its process ended with {code} and did not say why"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that has not ended."""
    if process.exitcode is None:
        send_to(process.pid, number)


def send_to(pid: int | None, number: signal.Signals) -> None:
    """Send a signal to whatever has this process id."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:
            os.kill(pid, number)


def is_alive(pid: int | None) -> bool:
    """Whether a process that is not our child still runs; a zombie does not."""
    return pid is not None and is_running(pid)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A fork server that begins inside inherits `_ONE_THREAD`, unless the user has set it, and that its jobs shall not."""
    added = {name: value for name, value in _ONE_THREAD.items() if name not in os.environ}
    added[OF_THE_SERVER] = " ".join(added)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _is_forked(process: Process) -> bool:
    return isinstance(process, multiprocessing.get_context("forkserver").Process)
