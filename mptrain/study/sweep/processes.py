"""Start and setup of the processes of a sweep's jobs: forked from a fork server on CPU, new interpreters on CUDA.

The calling process itself never forks. The fork server has imported torch but not used it, so a fork takes milliseconds
instead of the seconds of an import. CUDA jobs need new processes, because a CUDA context does not survive a fork and
``CUDA_VISIBLE_DEVICES`` is read only once. This module must not import torch, because that variable must be set first.
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

from mptrain.system.errors import EXIT_BUG, EnvironmentRefused, MptrainError
from mptrain.system.interpreter import guard_multiprocessing
from mptrain.system.machine import ends_with_parent

#: A process that runs a point.
Process = ForkServerProcess | SpawnProcess

T = TypeVar("T")

#: Signals that a sweep forwards to its jobs (see `mptrain.engine.interrupt`).
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

#: Environment variable that lists the variables set only for the fork server.
OF_THE_SERVER = "MPTRAIN_OF_THE_SERVER"

#: NumPy's OpenBLAS starts a thread per core on import, and a process with threads cannot be forked safely.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

#: Number of attempts to start a process if the fork server has died.
_TRIES = 3


def warm_up(modules: Sequence[str]) -> None:
    """Start the fork server, the process from which CPU jobs are forked; do nothing if it is running.

    The server imports ``modules`` in the background, while this process continues, so that forked
    processes start faster.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mptrain.study.sweep.fork_server", *modules])
    guard_multiprocessing()
    with _signals_blocked():  # SIGHUP of a closed terminal, which it does not ignore, would end it before the sweep
        resource_tracker.ensure_running()  # the server would start it otherwise and unblock signals meanwhile
    with _signals_blocked(), _one_thread():
        forkserver.ensure_running()


def run_in_fork(function: Callable[[], T], modules: Sequence[str]) -> T:
    """Call a picklable function in a process forked from the fork server, and return its value.

    The calling process keeps neither the memory nor the side effects of the call. The fork server imports ``modules``.

    Raises:
        MptrainError: The function raised it.
        EnvironmentRefused: The process died before it answered.
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
    """Call a pickled function and send its result to the caller of `run_in_fork`; entry point of the forked process.

    The process sends ``(value, None)``, or ``(None, error)`` for an `MptrainError`, pickled. Any other
    exception ends it.
    """
    reset_after_fork()
    die_with_parent(signal.SIGKILL)
    for number in ENDING_SIGNALS:  # the default action ends this process
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    try:
        reply: tuple[Any, BaseException | None] = (pickle.loads(question)(), None)
    except MptrainError as error:
        reply = (None, error)
    with contextlib.suppress(BrokenPipeError):  # a signal has ended the caller
        pipe.send_bytes(pickle.dumps(reply))


def forked(target: Callable[..., None], *arguments: Any) -> Process:
    """Return an unstarted process that will be forked from the fork server and call a function.

    The function must be at the top level of a module, because it is pickled by name, and its arguments picklable.
    """
    return multiprocessing.get_context("forkserver").Process(target=target, args=arguments)


def spawned(target: Callable[..., None], *arguments: Any) -> Process:
    """Return an unstarted process that will call a function in a new Python interpreter; arguments as for `forked`."""
    return multiprocessing.get_context("spawn").Process(target=target, args=arguments)


def start(process: Process) -> Process:
    """Start a process made by `forked` or `spawned`, restarting the fork server if it has died, and return it.

    The signals that request a stop (`ENDING_SIGNALS`) are blocked in a new process until it can handle them. Raise
    OSError or EOFError if it cannot be started.
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
    """Describe in words how a process ended that did not report an outcome, such as ``killed by SIGTERM``.

    A negative exit code means that a signal of that number killed it.
    """
    if code >= 0:
        return f"its process ended with exit code {code} and no message"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a job's process; do nothing if it has ended."""
    if process.exitcode is None:
        send_to(process.pid, number)


def send_to(pid: int | None, number: signal.Signals) -> None:
    """Send a signal to the process with an id; do nothing if it does not exist, is another user's, or has no id."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:
            os.kill(pid, number)


def reset_after_fork() -> None:
    """Undo settings of the fork server in a process forked from it: disabled garbage collection, environment variables.

    Objects that the server imported are frozen, because collecting them would copy shared memory. Child processes and
    libraries loaded later see the user's environment.
    """
    gc.freeze()
    gc.enable()
    for name in os.environ.pop(OF_THE_SERVER, "").split():
        os.environ.pop(name, None)


def detach_from_terminal() -> None:
    """Move this process to a new session, so that Ctrl-C and a closed terminal send it no signal.

    Does nothing if the process leads a process group.
    """
    with contextlib.suppress(PermissionError):  # it is already a process group leader
        os.setsid()


def die_with_parent(number: signal.Signals) -> None:
    """Arrange that this process receives a signal when its parent process ends for any reason.

    If the process that created it through `multiprocessing` has already ended, exit at once with code 1.
    """
    ends_with_parent(number)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():  # it ended before the call
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
    """Set `_ONE_THREAD` while a fork server starts, unless the user has set it; `reset_after_fork` removes it again."""
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
