"""Folders and configurations that a user names on the command line; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.runlog.directory import find_run, last_run
from mptrain.system.errors import UsageError
from mptrain.system.files import expanded

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.schema import Config


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


def place_or_last(word: str) -> Path:
    """Return the folder that an argument names, as `place`, or for ``last`` that of the run that was started last."""
    return last_run(Path("outputs")).root if word == "last" else place(word)


def composed(arguments: Namespace) -> Config:
    """Return the configuration of the words of a command, after its warnings; raise ConfigError if it is invalid."""
    from mptrain.cli.messages import warn
    from mptrain.config.compose import compose

    if ours := [word for word in arguments.overrides if word.startswith(("hydra/", "hydra.sweeper"))]:
        raise UsageError(f"{ours[0]} has no effect on a single run", "add -m, and give several values: KEY=A,B")
    config = compose(arguments.overrides, config_dirs=arguments.config_dir, config_name=arguments.config_name)
    warn(config.warnings)
    return config
