"""Protocols of experiment trackers such as TensorBoard, and the facts about a training run that they receive.

A tracker receives only what the run records anyway. It may fail in any way, but must never change, stop or
delay training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveFloat, PositiveInt
from mptrain.system.files import read_text
from mptrain.system.records import Record


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a training run that an experiment tracker receives before the first record.

    Attributes:
        name: Display name: the run's directory relative to the root of all runs.
        folder: The run directory; a tracker keeps its own files in a subfolder named after it.
        samples: Folder of the files (images, sounds, tables) that a ``samples`` event lists.
        config: Resolved configuration in plain containers.
        from_step: Number of attempted steps from which the run resumes; 0 for a new run.
    """

    name: str
    folder: Path
    samples: Path
    config: dict[str, Any]
    from_step: int


class Tracker(Protocol):
    """Receiver of a training run's records that forwards them to an experiment tracker such as TensorBoard.

    It serves one attempt at a run (from a start or resume to its end), runs in a process of its own, and may
    block or raise.
    """

    def take(self, record: Record) -> None:
        """Send or buffer one record; the last one of a complete run is a ``summary`` event with the final numbers."""

    def close(self) -> None:
        """Send all buffered records; called once, at the end of the run."""


class Logger(Protocol):
    """Options of an experiment tracker such as TensorBoard, which open it: a frozen dataclass that can be pickled."""

    @property
    def close_seconds(self) -> float:
        """Maximum time in seconds that the end of a run waits for the tracker."""

    def require(self) -> None:
        """Raise ConfigError if the tracker's package is not installed, without importing it."""

    def open(self, run: TrackedRun) -> Tracker:
        """Start tracking a run, and return the receiver of its records.

        Called in the tracker's own process; any exception ends only that process.
        """


@dataclass(frozen=True)
class NoLogger:
    """Option ``logger=none``: no experiment tracker; all records are in the run directory only."""

    def require(self) -> None:
        """Do nothing, because no package is required."""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """Options that all experiment trackers of mptrain share.

    The lower-case name of a subclass is also the name of the tracker's package, its module and its extra of mptrain.

    Attributes:
        every_steps: Interval in training steps between points of the curves; steps with an overflow are always logged.
        close_seconds: Maximum time in seconds that the end of a run waits for unsent records.
    """

    every_steps: PositiveInt = 1
    close_seconds: PositiveFloat = 10.0

    def require(self) -> None:
        """Raise ConfigError, with a hint how to install it, if the tracker's package is missing; do not import it."""
        package = type(self).__name__.lower()
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger={package} needs the package {package}, which is not installed",
                f"pip install 'mptrain[{package}]'",
            )


def load_or_create_id(file: Path, make: Callable[[], str]) -> str:
    """Return the ID under which an experiment tracker knows a run, so that all attempts at the run share it.

    The ID is read from a file in the tracker's folder of the run directory. If there is no file, an ID is created and
    written there. Raise ValueError if the file is a symbolic link.
    """
    if file.is_symlink():  # possible in an untrusted run directory
        raise ValueError(f"{file} is a symbolic link")
    if file.exists():
        return read_text(file).strip()
    identity = make()
    file.parent.mkdir(exist_ok=True)
    file.write_text(identity + "\n", encoding="utf-8")
    return identity
