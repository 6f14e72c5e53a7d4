"""Protocols of experiment trackers such as TensorBoard, the facts that they receive, and records as points of curves.

A tracker receives only what the run records anyway. It may fail in any way, but must never change, stop or
delay training.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveFloat, PositiveInt
from mptrain.system.files import open_to_read, read_text
from mptrain.system.records import EpochRecord, EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord


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


#: Name of a single learner; it is omitted in the names of curves.
ONLY = "main"


def points(record: Record, every_steps: int = 1) -> dict[str, float]:
    """Return the values that a record of a run adds to the curves of an experiment tracker at its step.

    Names of curves are ``train/loss`` (``train/NAME/loss`` with several learners), ``val/top1``, ``epoch/train_loss``,
    ``system/memory_bytes``. ``overflow/PHASE`` is the number of parameters whose gradients are not finite. Steps whose
    number is not a multiple of ``every_steps`` add no values, unless they overflowed.
    """
    match record:
        case StepRecord():
            if record.step % every_steps and not record.overflow:
                return {}
            values = {name: float(getattr(record, name)) for name in _OF_A_STEP}
            return _named("train", record.learner, values)
        case OverflowRecord():
            return _named("overflow", record.learner, {record.phase.replace(" ", "_"): float(record.count)})
        case EvalRecord():
            return {f"{record.split}/{name}": value for name, value in record.metrics.items()}
        case EpochRecord():
            values = {name: float(getattr(record, name)) for name in _OF_AN_EPOCH}
            return _named("epoch", record.learner, values)
        case ProgressRecord():
            return {
                f"system/{record.term}_per_second": record.terms_per_second,
                "system/data_wait": record.data_wait,
                "system/memory_bytes": float(record.memory),
            }
        case _:
            return {}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested mappings to one with dotted names: ``{"train": {"epochs": 3}}`` to ``{"train.epochs": 3}``.

    Numbers, booleans and strings are kept; other values, such as lists and None, become JSON text.
    """
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= {f"{name}.{below}": leaf for below, leaf in flat(value).items()}
        else:
            leaves[str(name)] = value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
    return leaves


def numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """Flatten nested mappings to dotted names (see `flat`), keeping only numbers, as floats; booleans are left out."""
    return {
        name: float(value)
        for name, value in flat(tree).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


#: Names and counts of a step record. Beside them, values that a run may not have (None) are not drawn.
_NOT_DRAWN = ("learner", "step", "updates", "epoch")
_OF_A_STEP = tuple(f.name for f in fields(StepRecord) if f.name not in _NOT_DRAWN and f.default is not None)
_OF_AN_EPOCH = ("epoch", "updates", "skipped", "train_loss", "seconds", "terms_per_second")


def _named(section: str, learner: str, values: Mapping[str, float]) -> dict[str, float]:
    prefix = section if learner == ONLY else f"{section}/{learner}"
    return {f"{prefix}/{name}": value for name, value in values.items()}


def read_table(path: Path) -> list[list[str]]:
    """Read the rows of a TSV file of samples; the first row contains the column names.

    An unreadable table must not stop the tracker. If the file has no rows, or a text longer than the limit of Python's
    csv reader (131,072 characters), the result is a column name and one row with a message. Invalid UTF-8 is replaced.
    """
    try:
        with io.TextIOWrapper(open_to_read(path), encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.reader(file, dialect="excel-tab"))
    except csv.Error as error:
        return [["table"], [f"{path.name} cannot be shown: {error}"]]
    return rows or [["table"], [f"{path.name} is empty"]]


def markdown_table(path: Path) -> str:
    """Convert a TSV file of samples to a Markdown table, escaping characters that are special in Markdown."""
    columns, *rows = [[_cell(text) for text in row] for row in read_table(path)]
    return "\n".join(_row(cells) for cells in (columns, ["---"] * len(columns), *rows))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    special = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|<>"})
    return " ".join(text.split()).translate(special)
