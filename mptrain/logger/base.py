"""Protocols of trackers, and the facts about a run that they receive.

A tracker receives only what the run records anyway. It may fail in any way, but must never change, stop or delay
training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mptrain.errors import ConfigError
from mptrain.fields import PositiveFloat, PositiveInt
from mptrain.files import read_text
from mptrain.records import Record


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run that a tracker receives before the first record.

    Attributes:
        name: Display name: the run's directory relative to the root of all runs.
        folder: The run directory; a tracker keeps its own files in a subfolder named after it.
        samples: Folder of the files that a ``samples`` event lists.
        config: Resolved configuration in plain containers.
        from_step: Number of attempted steps from which the run resumes; 0 for a new run.
    """

    name: str
    folder: Path
    samples: Path
    config: dict[str, Any]
    from_step: int


class Tracker(Protocol):
    """Receiver of the records of one attempt at a run; it has its own process and may block or raise."""

    def take(self, record: Record) -> None:
        """Send or buffer one record. The last is a ``summary`` event with the final numbers if the run is complete."""

    def close(self) -> None:
        """Send all buffered records; called once."""


class Logger(Protocol):
    """Options of a tracker such as TensorBoard: a frozen dataclass that can be pickled.

    Attributes:
        close_seconds: Maximum time in seconds that the end of a run waits for the tracker.
    """

    @property
    def close_seconds(self) -> float:
        """See the class."""

    def require(self) -> None:
        """Check that the tracker can be used, without importing its package.

        Raises:
            ConfigError: A package is missing; the hint says how to install it.
        """

    def open(self, run: TrackedRun) -> Tracker:
        """Return the tracker of a run; called in the tracker's process, and may raise anything."""


@dataclass(frozen=True)
class NoLogger:
    """No tracker: the run directory holds everything."""

    def require(self) -> None:
        """Do nothing, because nothing is required."""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """Options that all trackers of mptrain share.

    A tracker's class name in lower case is also the name of its package, its module and its extra of mptrain.

    Attributes:
        every_steps: Log the curves of every n-th step only; steps with an overflow are always logged.
        close_seconds: Maximum time in seconds that the end of a run waits for unsent records.
    """

    every_steps: PositiveInt = 1
    close_seconds: PositiveFloat = 10.0

    def require(self) -> None:
        """Check that the tracker's package is installed, without importing it.

        Raises:
            ConfigError: The package is missing.
        """
        package = type(self).__name__.lower()
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger={package} needs the package {package}, which is not installed",
                f"pip install 'mptrain[{package}]'",
            )


def load_or_create_id(file: Path, make: Callable[[], str]) -> str:
    """Return the tracker's id of the run from a file; if there is no file, create an id and write it there.

    Args:
        file: File in the tracker's folder of the run directory.
        make: Function that creates an id.

    Raises:
        ValueError: The file is a symbolic link.
    """
    if file.is_symlink():  # possible in an untrusted run directory
        raise ValueError(f"{file} is a symbolic link")
    if file.exists():
        return read_text(file).strip()
    identity = make()
    file.parent.mkdir(exist_ok=True)
    file.write_text(identity + "\n", encoding="utf-8")
    return identity
