"""Folders that a user names on the command line; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mptrain.runlog.directory import find_run
from mptrain.system.files import expanded


def place(word: str) -> Path:
    """Return the folder that an argument names: a path, or else the name of a run under ``outputs``.

    Args:
        word: The argument; ``run.name=`` puts runs under ``outputs``. A path that does not exist is returned as it is.
    """
    path, named = expanded(word), Path("outputs") / word
    return named if named.is_dir() and not path.exists() else path


def place_of(run: str, overrides: Sequence[str]) -> str:
    """Return the directory of an existing run that the user named, without importing torch.

    Args:
        run: Path of the run directory, the run's name below ``run.root``, or ``last`` for the newest run there.
        overrides: Overrides of the command, of which ``run.root`` counts here.

    Raises:
        StorageError: There is no such run (see `mptrain.runlog.directory.find_run`).
    """
    root = next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("run.root=")), "outputs")
    return str(find_run(run, expanded(root.strip("'\""))).root)
