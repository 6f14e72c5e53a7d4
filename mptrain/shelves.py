"""The shelves: packages that know the kernel (all other packages), which trains without them and imports none of them.

A shelf has a module ``shelf`` with its commands and with the functions that the kernel asks for by name. The kernel
finds it through this module alone, so that a shelf can be left out, and is then named by what needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mptrain.system.errors import EnvironmentRefused

#: Shelves by name, each with its package and the commands that it brings.
SHELVES = {
    "lab": ("mptrain.lab", ("recommend", "diagnose", "replay", "find", "doctor", "formats")),
    "study": ("mptrain.study", ("compare", "reproduce")),
    "integrations": ("mptrain.integrations", ()),
}

#: Functions for Python programs: the module of each.
FUNCTIONS = {
    "MptrainError": "mptrain.system.errors",
    "compare": "mptrain.study.compare_function",
    "diagnose": "mptrain.lab.other_loop",
    "doctor": "mptrain.lab.other_loop",
    "find_lr": "mptrain.lab.range_test",
    "formats": "mptrain.lab.formats.examine",
    "open_run": "mptrain.api.run",
    "recommend": "mptrain.lab.pages.loss_scale_pages",
    "runs": "mptrain.api.run",
    "train": "mptrain.api.train",
    "watch": "mptrain.integrations.watch",
}

#: Packages that Python programs use without importing them: ``mptrain.optimizer.stochastic(optimizer)``.
MODULES = ("optimizer",)

#: Commands, in the order of the help.
COMMANDS = (
    "train", "compare", "resume", "eval", "predict", "export", "runs", "report", "recommend", "diagnose", "replay",
    "find", "reproduce", "list", "copy", "doctor", "formats", "completion", "help",
)  # fmt: skip


def find(shelf: str) -> Any:
    """Return the module ``shelf`` of a shelf; None if it is not part of this installation."""
    package = SHELVES[shelf][0]
    return importlib.import_module(f"{package}.shelf") if importlib.util.find_spec(package) else None


def load(shelf: str, wanted: str) -> Any:
    """Return the module ``shelf`` of a shelf; raise EnvironmentRefused, naming what is wanted, if it is not there."""
    module = find(shelf)
    if module is None:
        raise missing(shelf, wanted)
    return module


def load_all() -> None:
    """Import the shelves that bring commands and are there, which enters these."""
    for name, (_, commands) in SHELVES.items():
        if commands:
            find(name)


def missing(shelf: str, wanted: str) -> EnvironmentRefused:
    """Return the error for something that needs a shelf which is not there."""
    package = SHELVES[shelf][0]
    return EnvironmentRefused(
        f"{wanted} needs the package {package}, which is not installed here", "install all of mptrain"
    )


def of_command(name: str) -> str:
    """Return the shelf that brings a command; empty for a command of the kernel, and for no command."""
    return next((shelf for shelf, (_, commands) in SHELVES.items() if name in commands), "")
