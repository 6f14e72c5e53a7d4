"""``mptrain WORDS`` in a process forked from one that has imported torch and run nothing of it.

So a command is as good as one of a fresh process, as those of `tests.faults.attempts` are, and starts in milliseconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.small_runs import environment


@dataclass
class Begun:
    """A command that runs: the number of its process, and where it prints."""

    pid: int
    folder: str

    def finish(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        code = _ask(wait=self.pid, timeout=timeout)
        out, err = ((Path(self.folder) / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        assert code is not None, f"not ended after {timeout:g} s: {err}"
        return subprocess.CompletedProcess(["mptrain"], code, out, err)


def begin_command(*words: str, cwd: Path, **extra: str) -> Begun:
    folder = tempfile.mkdtemp(dir=cwd)
    return Begun(_ask(words=words, cwd=str(cwd), environment=environment(**extra), folder=folder), folder)


def run_command(*words: str, cwd: Path, timeout: float = 240, **extra: str) -> subprocess.CompletedProcess[str]:
    """Do what `tests.small_runs.run_command` does."""
    return begin_command(*words, cwd=cwd, **extra).finish(timeout)


@functools.cache
def _server() -> subprocess.Popen[str]:
    variables = environment(TORCH_CPP_LOG_LEVEL="ERROR")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.warm_commands"], env=variables, text=True, **pipes
    )
    atexit.register(started.communicate)
    return started


def _ask(**question: object) -> int | None:
    server = _server()
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def _serve() -> None:
    from tests.faults.attempts import warm_up

    warm_up()
    for line in sys.stdin:
        question = json.loads(line)
        answer = _wait(question["wait"], question["timeout"]) if "wait" in question else _fork(**question)
        print(json.dumps(answer), flush=True)


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def _fork(words: list[str], cwd: str, environment: dict[str, str], folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number, name in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(":")
        sys.argv = ["mptrain", *words]
        from mptrain.cli.main import main

        code = main(list(words))
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
