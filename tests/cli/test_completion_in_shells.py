"""What TAB does in real shells."""

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mptrain.runlog import RunState, create_run
from tests.small_runs import environment

pytestmark = pytest.mark.process


class Shell:
    """An interactive shell on a terminal of its own, in which mptrain shows its words instead of training."""

    START = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"], "fish": ["--interactive"]}
    LOAD = {"fish": "mptrain completion fish | source"}

    def __init__(self, name, folder):
        binaries = folder / "bin"
        binaries.mkdir()
        program = binaries / "mptrain"
        shows = 'printf "ARGS<"; printf "[%s]" "$@"; echo ">"'
        program.write_text(
            f'#!/bin/sh\nif [ "$1" = completion ]; then exec {sys.executable} -m mptrain "$@"; fi\n{shows}\n'
        )
        program.chmod(0o755)
        env = environment(PATH=f"{binaries}:{os.environ['PATH']}", HOME=str(folder), TERM="dumb", PS1="> ")
        env.pop("XDG_CONFIG_HOME", None)
        terminal = "import pty, sys; pty.spawn(sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", terminal, name, *self.START[name]],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.seen = ""
        load = self.LOAD.get(name, f'eval "$(mptrain completion {name})"')
        self.type(f"{load}; echo REA''DY\n")
        self.wait("READY")

    def type(self, keys):
        self.process.stdin.write(keys.encode())
        self.process.stdin.flush()

    def wait(self, pattern, seconds=60):
        """The first match in what is shown from now on, blanks and control sequences left out."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.plain())):
            assert time.monotonic() < end, (pattern, self.seen)
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                self.seen += os.read(self.process.stdout.fileno(), 65536).decode("utf-8", "replace")
        return match

    def plain(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|[\x07\x08\r]", "", self.seen)

    def complete(self, typed, until, then=""):
        """The arguments that a line has after TAB, once what is shown matches; ``then`` is typed after it."""
        self.seen = ""
        self.type(typed + "\t")
        self.wait(until)
        time.sleep(0.2)
        self.seen = ""
        self.type(then + "\n")
        return self.wait(r"ARGS<(.*?)>")[1]

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request, tmp_path, monkeypatch):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.chdir(tmp_path)
    run = create_run(Path("outputs"), "label", "my run:1")
    run.write_state(RunState(id="my run:1", argv=(), command="").begin())
    run.write_config("", [])
    opened = Shell(request.param, tmp_path)
    opened.name = request.param
    yield opened
    opened.close()


def test_a_real_shell_completes(shell):
    assert shell.complete("mptrain precision=fp16_st", "fp16_static", "x=1") == "[precision=fp16_static][x=1]"
    assert shell.complete("mptrain optimizer.mom", "momentum=", "0.5") == "[optimizer.momentum=0.5]"
    lists = shell.complete("mptrain -m precision=fp32,amp_d", "amp_dynamic", "x=1")
    assert lists == "[-m][precision=fp32,amp_dynamic][x=1]"
    assert shell.complete("mptrain resume outputs/m", "run", "seed=1") == "[resume][outputs/my run:1][seed=1]"
    assert shell.complete("mptrain doct", "doctor") == "[doctor]"
    assert shell.complete("~/bin/mptrain doct", "doctor") == "[doctor]"
    assert shell.complete("mptrain list sche", "schedule") == "[list][schedule]"
    assert shell.complete("mptrain 'precision=fp16_st", "fp16_static", "x=1") == "[precision=fp16_static][x=1]"
    lists = "complete -C 'mptrain precision=fp16_'\n"  # fish's own list needs a terminal that can move its cursor
    shell.type(lists if shell.name == "fish" else "mptrain precision=fp16_\t\t")
    shell.wait("fp16_noscale")
    shell.wait("fp16_pure")
    shell.wait("fp16_dynamic")


#: Names of runs that are code in some place of a command line, and those that are only unusual.
HOSTILE = ("`touch PWN`", "$(touch PWN)", "a'$(touch PWN)'", 'b"$(touch PWN)"', "'`touch PWN`'", "x;touch PWN", "x|touch PWN", "x&touch PWN",
           "$((1))${HOME}", "a\ntouch PWN", "a\n$(touch PWN)", "a\tb`touch PWN`", "!!", "back\\slash`touch PWN`", "<(touch PWN)", "~root", "--help",
           "\x1b[2J`touch PWN`", "\u202egnp`touch PWN`", "a{b,c}", "*", "caf\udce9", "it's", "two words", "q'\"", "$'\\x60touch PWN'")  # fmt: skip


def test_no_name_is_run_in_an_open_quote_or_outside(shell, tmp_path):
    for number, name in enumerate(HOSTILE):
        folder = tmp_path / f"t{number}" / "outputs"
        run = create_run(folder, "label", "run").paths.root
        (run / "run.json").write_text("{}")
        run.rename(folder / name)
        for quote in ("", '"', "'"):
            shell.seen = ""
            shell.type(f"cd {folder.parent}; echo NEX''T\n")
            shell.wait(r"NEXT\s+(> )?$")
            time.sleep(0.05)  # until the shell reads keys one by one
            shell.seen = ""
            shell.type(f"mptrain report {quote}outputs/\tZ")
            shell.wait(r"report .*Z$")  # the letter is shown when the completion has ended
            open_still = not re.search(rf"outputs/.*{quote or 'never'} ?Z$", shell.plain())
            shell.type(f"\x7f{quote if open_still else ''}\n")
            found = shell.wait(r"ARGS<\[report\]\[(.*?)\]>(?=\n|$)")[1]
            typed = shell.seen
            whole = [f"outputs/{name}", f"outputs/{name}/"]
            if any(not letter.isprintable() for letter in name):
                assert found == "outputs/", typed
            elif shell.name == "bash":
                assert found in (["outputs/"] if quote and set(name) & set("'\"`$\\!") else whole), typed
            else:
                assert found in ["outputs/", *whole], typed
            assert not [*tmp_path.rglob("PWN")], (name, quote)
