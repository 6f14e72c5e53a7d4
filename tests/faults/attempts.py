"""One attempt at a run: ``mptrain WORDS`` in a process forked from this warm one, or in a fresh one.

This process has imported torch and run nothing of it, with one thread, as the fork server of a sweep has
(`mptrain.study.sweep.fork_server`); so a fork is as good as a fresh process, and costs milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.faults.hooks import Hooks
from tests.faults.trace import Trace

#: Seconds after which an attempt is hung.
LONGEST = 120

#: <linux/capability.h>: the version of its sets, and the two rights by which root passes over what files permit.
_CAPABILITIES, _OVERRIDING = 0x20080522, 0b110


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended: its exit code (negative: killed by that signal), what it printed, what it told."""

    words: tuple[str, ...]
    code: int
    output: str
    trace: Trace
    seconds: float
    hung: bool
    ended: float

    def describe(self):
        return (
            f"$ mptrain {' '.join(self.words)}\n{self.output.rstrip()}\n-> {self.code}{' (hung)' if self.hung else ''}"
        )


def warm_up():
    """Import what attempts need, before the first of them."""
    import torch  # noqa: F401
    import torchvision  # noqa: F401

    import mptrain.cli.main
    import mptrain.cli.train
    import mptrain.config.compose  # noqa: F401

    gc.freeze()
    assert threading.active_count() == 1
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"  # noqa: PTH208


def attempt(words, folder, prepare=None, outside=None, *, fresh=False, lawful=False):
    """One attempt in a folder.

    Args:
        words: The command line.
        folder: The working directory.
        prepare: Called in the forked process with its trace; returns the `Hooks` to be installed.
        outside: ``(seconds, deed)``: the deed is called with the process's id, unless it has ended before.
        fresh: A process of its own, that imports everything itself; nothing is prepared in it.
        lawful: What files permit holds for it, even where this is root's.
    """
    trace = Trace()
    began = time.monotonic()
    pid = _spawn(words, folder) if fresh else _fork(words, folder, prepare, trace, lawful)
    code, hung = None, False
    if outside is not None:
        code = _wait(pid, outside[0])
        if code is None:
            trace.strike()
            outside[1](pid)
    if code is None:
        code = _wait(pid, LONGEST)
    if code is None:
        hung = True
        os.kill(pid, signal.SIGKILL)
        code = _wait(pid, LONGEST)
    ended = time.monotonic()
    output = (folder / "output.txt").read_text(errors="replace")
    return Attempt(tuple(words), code, output, trace, ended - began, hung, ended)


def computed(function, *arguments):
    """The value of a function that runs operators of torch, computed in a process of its own."""
    return at_once(function, [arguments])[0]


def at_once(function, calls):
    """The values of several calls of a function, each in a process of its own; a failed one's is its traceback."""
    return [_answer(*begun) for begun in [_ask(function, arguments) for arguments in calls]]


def _ask(function, arguments):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    try:
        answer = function(*arguments)
    except BaseException:
        answer = traceback.format_exc()
    with os.fdopen(writing, "wb") as pipe:
        pickle.dump(answer, pipe)
    sys.stdout.flush()
    os._exit(0)


def _answer(pid, reading):
    with os.fdopen(reading, "rb") as pipe:
        answer = pickle.load(pipe)
    os.waitpid(pid, 0)
    return answer


def children_of(pid):
    """The processes that a process has started, as ranks are, in the order of their numbers."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return sorted(found)


def _fork(words, folder, prepare, trace, lawful):
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _be_a_process_of_its_own(folder, lawful)
        gc.enable()
        hooks = prepare(trace) if prepare else Hooks(trace)
        hooks.install()
        from mptrain.__main__ import main

        sys.argv = ["mptrain", *words]
        code = main()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _be_a_process_of_its_own(folder, lawful):
    os.setsid()
    os.chdir(folder)
    descriptor = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if lawful and os.geteuid() == 0:
        _give_up_overriding()


def _give_up_overriding():
    """Let the permissions of files hold for this process, root or not."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, for the low and the high half
    system = ctypes.CDLL(None, use_errno=True)
    assert system.capget(header, sets) == 0
    for index in (0, 1):
        sets[index] &= ~_OVERRIDING
    assert system.capset(header, sets) == 0


def _spawn(words, folder):
    with (folder / "output.txt").open("wb") as output:
        root = str(Path(__file__).resolve().parents[2])
        process = subprocess.Popen(
            [sys.executable, "-m", "mptrain", *words],
            cwd=folder, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "PYTHONPATH": root},
        )  # fmt: skip
    process.returncode = 0  # it is waited for here, not by its object
    return process.pid


def _wait(pid, seconds):
    """Its exit code, or None if it is still there after so long."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 0.01)
