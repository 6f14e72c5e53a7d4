"""The catalogue of messages: what mistyped, odd and helpful command lines print, and with which exit code.

``messages.txt`` has an entry for each command line: the line, what it prints, and its exit code in brackets. Of output
on standard output that is longer than two lines, the first line is kept. After a change of words,
``python tests/cli/message_catalogue.py`` writes it anew; read what has changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("messages.txt")

#: Width of the terminal for which help is printed.
COLUMNS = "110"

#: Files that the command lines name; they also name the run ``outputs/a``.
_FILES = {"own/model/mine.yaml": "# My network.\n_target_: mine.Net\nwidth: 3\n", "weights.pt": ""}


def prepare(folder: Path) -> None:
    """Make the run and the files that the command lines name."""
    from mptrain.runlog import RunState, create_run

    run = create_run(folder / "outputs", "label", "a")
    run.write_state(RunState(id="a", argv=(), command="mptrain").begin())
    run.write_config("train:\n  epochs: 3\nscaler:\n  init_scale: 8.0\n", [])
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def entries() -> dict[str, str]:
    """Return what each command line prints, ending with the exit code in brackets, by the line."""
    blocks = FILE.read_text().removeprefix("$ mptrain ").split("\n\n$ mptrain ")
    return {line: text.rstrip() for line, _, text in (block.partition("\n") for block in blocks)}


def answer(line: str) -> str:
    """Run a command line in this process, and return what it prints and its exit code."""
    from mptrain.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    os.environ.pop("MPTRAIN_TRACEBACK", None)
    shown = [one.rstrip() for one in out.getvalue().splitlines()]
    shown = [*shown[:1], "..."] if len(shown) > 2 and "query" not in line else shown
    text = "\n".join([*shown, *_messages(err.getvalue()), f"[{code}]"])
    return text.replace(str(ROOT), "ROOT").replace(f"{Path.cwd()}/", "")


def _messages(said: str) -> list[str]:
    """Return lines of standard error without the frames of a traceback."""
    lines = [line for line in said.splitlines() if re.match(r"error|hint|warning|stopped|interrupted", line)]
    return [line.rstrip() for line in lines]


def _write() -> None:
    lines = list(entries())
    os.environ["COLUMNS"] = COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare(Path())
        FILE.write_text("\n\n".join(f"$ mptrain {line}\n{answer(line)}" for line in lines) + "\n")


if __name__ == "__main__":
    _write()
