"""Protocols of trackers, and what they are told about the run.

A tracker is shown what the run writes down anyway. It may fail in any way: it never changes, stops or delays training.
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
    """Facts that a tracker knows about a run before its first record.

    Attributes:
        name: The run's directory relative to the root of all runs, its name for people.
        folder: The run directory; a tracker keeps its own files in a folder of its name below.
        samples: Where the files are that a ``samples`` event names.
        config: The resolved configuration, plain containers.
        from_step: Attempted steps that the run goes on from; 0 for a new one.
    """

    name: str
    folder: Path
    samples: Path
    config: dict[str, Any]
    from_step: int


class Tracker(Protocol):
    """Takes the records of one attempt at a run; lives in a process of its own and may block or raise."""

    def take(self, record: Record) -> None:
        """Send or keep one record. A ``summary`` event, the last, says that the run is done and holds its numbers."""

    def close(self) -> None:
        """Send what is still held back; called once."""


class Logger(Protocol):
    """The options of a kind of tracker: a frozen dataclass that can be pickled.

    Attributes:
        close_seconds: How long the end of a run may wait for the tracker.
    """

    @property
    def close_seconds(self) -> float:
        """See the class."""

    def require(self) -> None:
        """Refuse a run that the tracker could not even begin to follow; imports nothing.

        Raises:
            ConfigError: A package is missing; says how to install it.
        """

    def open(self, run: TrackedRun) -> Tracker:
        """The tracker of a run, called in the tracker's process; may raise anything."""


@dataclass(frozen=True)
class NoLogger:
    """No tracker: the run directory holds everything."""

    def require(self) -> None:
        """Nothing is needed."""


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """The options that all our trackers have. The package, the module and the extra of mptrain that bring a tracker have one name.

    Attributes:
        every_steps: Show the curves of each n-th step only; those of overflows are always shown.
        close_seconds: How long the end of a run may wait for what is not sent yet.
    """

    every_steps: PositiveInt = 1
    close_seconds: PositiveFloat = 10.0

    def require(self) -> None:
        """Refuse a run whose tracker's package is not installed; it is looked for, not imported.

        Raises:
            ConfigError: It is missing.
        """
        package = type(self).__name__.lower()
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger={package} needs the package {package}, which is not installed",
                f"pip install 'mptrain[{package}]'",
            )


def load_or_create_id(file: Path, make: Callable[[], str]) -> str:
    """The id under which a tracker knows the run: the one in the file, or a new one, which is written there.

    Args:
        file: In the tracker's folder of the run directory.
        make: Makes a new id.

    Raises:
        ValueError: The file is a symbolic link.
    """
    if file.is_symlink():  # of a run that somebody else made
        raise ValueError(f"{file} is a symbolic link")
    if file.exists():
        return read_text(file).strip()
    identity = make()
    file.parent.mkdir(exist_ok=True)
    file.write_text(identity + "\n", encoding="utf-8")
    return identity
