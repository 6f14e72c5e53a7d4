"""Starts processes, forked from a warm server on a CPU and fresh for CUDA, and sets them up. The calling process itself never forks.

The fork server has imported torch and run nothing of it, so a fork takes milliseconds where an import takes seconds.
Jobs on CUDA are fresh processes, because a GPU's context survives no fork and `CUDA_VISIBLE_DEVICES` is read once.
Must not import torch: which GPU a process sees is decided before that.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any, TypeVar

from mptrain.errors import EXIT_BUG, EnvironmentRefused, MptrainError
from mptrain.interpreter import guard_multiprocessing
from mptrain.machine import ends_with_parent

#: A process that runs points.
Process = ForkServerProcess | SpawnProcess

T = TypeVar("T")

#: What a sweep passes on to its jobs (see `mptrain.engine.interrupt`).
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

#: Variable that holds the names of those that were set for the fork server alone.
OF_THE_SERVER = "MPTRAIN_OF_THE_SERVER"

#: NumPy's OpenBLAS starts a thread for each core when it is imported; a process with threads cannot be forked safely.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

#: How often a process is started anew where the fork server had died.
_TRIES = 3


def warm_up(modules: Sequence[str]) -> None:
    """Start the fork server, which imports what jobs will need while the caller does something else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mptrain.sweep.fork_server", *modules])
    guard_multiprocessing()
    resource_tracker.ensure_running()  # else the server's start would do it, and unblock signals in between
    with _signals_blocked(), _one_thread():
        forkserver.ensure_running()


def run_in_fork(function: Callable[[], T], modules: Sequence[str]) -> T:
    """Return the value of a function, computed in a forked process of which nothing remains.

    Args:
        function: Without parameters; it is pickled.
        modules: What the fork server imports (see `warm_up`).

    Raises:
        MptrainError: As the function raised it.
        EnvironmentRefused: The process died.
    """
    warm_up(modules)
    receiver, sender = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    with receiver:
        with sender:
            process = start(forked(answer, pickle.dumps(function), sender))
        try:
            value, error = pickle.loads(receiver.recv_bytes())
        except EOFError:
            process.join()
            raise EnvironmentRefused(f"checking the points: {describe_exit_code(process.exitcode or 0)}") from None
        except BaseException:
            process.kill()
            raise
        finally:
            process.join()
            process.close()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def answer(question: bytes, pipe: Connection) -> None:
    """Run in the process of `run_in_fork`: compute one value and send ``(value, None)`` or ``(None, error)``, pickled.

    Args:
        question: A pickled function without parameters.
        pipe: Takes the answer.
    """
    reset_after_fork()
    die_with_parent(signal.SIGKILL)
    for number in ENDING_SIGNALS:  # the sweep's process ends this one
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    try:
        found: tuple[Any, BaseException | None] = (pickle.loads(question)(), None)
    except MptrainError as error:
        found = (None, error)
    pipe.send_bytes(pickle.dumps(found))


def forked(target: Callable[..., None], *arguments: Any) -> Process:
    """Return a process of the fork server that will call a function of a module."""
    return multiprocessing.get_context("forkserver").Process(target=target, args=arguments)


def spawned(target: Callable[..., None], *arguments: Any) -> Process:
    """Return a fresh process that will call a function of a module."""
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


def describe_exit_code(code: int) -> str:
    """Return what the exit code of a process that said nothing means."""
    if code >= 0:
        return f"its process ended with {code} and did not say why"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that has not ended."""
    if process.exitcode is None:
        send_to(process.pid, number)


def send_to(pid: int | None, number: signal.Signals) -> None:
    """Send a signal to the process with this id, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:
            os.kill(pid, number)


def reset_after_fork() -> None:
    """Undo in a process what was set for the fork server: disabled garbage collection, and variables.

    Garbage is collected again, but not among what the server imported: that would copy its memory. What is started from
    here, and libraries that are not loaded yet, find the user's environment.
    """
    gc.freeze()
    gc.enable()
    for name in os.environ.pop(OF_THE_SERVER, "").split():
        os.environ.pop(name, None)


def detach_from_terminal() -> None:
    """Become a process that Ctrl-C and the end of the terminal do not reach."""
    with contextlib.suppress(PermissionError):  # it leads a group of its own already
        os.setsid()


def die_with_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when the one that started it ends, whatever ended it."""
    ends_with_parent(number)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():  # it was over before that
        os._exit(EXIT_BUG)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Set `_ONE_THREAD` for a fork server that begins inside, unless the user has set it; its jobs drop it again."""
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
