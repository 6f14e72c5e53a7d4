"""Reads run directories, for every command that looks at runs after training. Must never import torch.

What a killed process left half-written at the end of a file is ignored; any other damage is an error that
names the file and the line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.errors import OlderLayout, StorageError
from mptrain.files import open_to_read, read_bytes
from mptrain.records import EpochRecord, HistogramRecord, StepRecord
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.directory import open_run
from mptrain.runlog.record_writer import VAL_PREFIX, is_header
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_state import RunState
from mptrain.runlog.schema_checks import build, is_count
from mptrain.runlog.strict_json import parse_strict, restore_nonfinite
from mptrain.runlog.summary_file import read_summary

#: No exponent of FP64 is farther from 0.
_FARTHEST = 1100

_INTEGERS = frozenset({"epoch", "step", "updates", "skipped"})
_STEP_FIELDS = ("learner", "step", "updates", "epoch", "loss", "loss_scale", "overflow", "skipped", "grad_norm", "lr")
_STEP_TYPES = (str, int, int, int, float, float, bool, bool, float, float)


@dataclass(frozen=True, slots=True)
class Run:
    """Content of a run directory when it was opened; records are read when they are asked for.

    Attributes:
        paths: Where everything is.
        state: The content of ``run.json``.
        config: The resolved configuration as YAML text; empty if it was not written yet.
        overrides: The overrides of the command line.
        summary: The final numbers; empty until the run has written them.
    """

    paths: RunPaths
    state: RunState
    config: str
    overrides: tuple[str, ...]
    summary: dict[str, Any]

    def steps(self) -> Iterator[StepRecord]:
        """Every attempted step in order, non-finite numbers restored.

        Raises:
            StorageError: A line is damaged.
        """
        path = self.paths.steps
        for number, line in self._lines(path):
            usual = _usual_step(line)
            if usual is not None:
                yield usual
                continue
            fields = _object(path, number, line)
            try:
                yield build(StepRecord, fields)
            except ValueError as error:
                raise _damaged(path, number, f"{error}") from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event in order, ``event`` is its kind; non-finite numbers inside nested values are None.

        Raises:
            StorageError: A line is damaged.
        """
        for number, line in self._lines(self.paths.events):
            fields = _object(self.paths.events, number, line)
            if not isinstance(fields.get("event"), str):
                raise _damaged(self.paths.events, number, "it does not say which event it is")
            yield fields

    def histograms(self) -> Iterator[HistogramRecord]:
        """Every step that was looked at, in order; none where the run had no histograms.

        Raises:
            StorageError: A line is damaged.
        """
        for number, line in self._lines(self.paths.histograms):
            fields = _object(self.paths.histograms, number, line)
            try:
                yield _histogram(fields)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise _damaged(self.paths.histograms, number, "it holds no histograms") from None

    def epochs(self) -> Iterator[EpochRecord]:
        """Every epoch in order.

        Raises:
            StorageError: A row is damaged.
        """
        header: list[str] = []
        for number, line in self._lines(self.paths.epochs):
            try:
                cells = next(csv.reader([line]), [])
            except csv.Error:
                raise _damaged(self.paths.epochs, number, "it is not a row") from None
            if number == 1:
                header = cells
                if not is_header(header):
                    raise _damaged(self.paths.epochs, 1, "it is not the header")
            else:
                yield _epoch(self.paths.epochs, number, header, cells)

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """The whole lines of a file with their numbers from 1; a missing file has none."""
        with storage_errors(path, "read"):
            if not path.exists():
                return
            with open_to_read(path) as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):  # only the last line can lack it
                        if self.state.status == "done":
                            raise _damaged(path, number, "it is cut off, though the run ended in order")
                        return
                    yield number, line[:-1].decode("utf-8", "replace")


def read_run(path: Path) -> Run:
    """The run in a directory.

    Raises:
        StorageError: It is no run directory, or one of its small files is damaged.
    """
    directory = open_run(path)
    state = directory.read_state()
    if state is None:
        raise StorageError(f"{path} lost its run.json while it was read", "try again")
    paths = directory.paths
    return Run(paths, state, _text(paths.config), directory.read_overrides(), read_summary(paths.summary))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in some directories, in their order.

    Raises:
        OlderLayout: Older versions of mptrain wrote some of them; names all of these.
        StorageError: As `read_run`.
    """
    found: list[Run] = []
    older: dict[Path, str] = {}
    for path in paths:
        try:
            found.append(read_run(path))
        except OlderLayout as error:
            older |= error.writers
    if older:
        raise OlderLayout(older)
    return found


def _text(path: Path) -> str:
    with storage_errors(path, "read"):
        try:
            return read_bytes(path).decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return ""


def _usual_step(line: str) -> StepRecord | None:
    """Return the step of a line as `mptrain.records.step_json` writes most; None for any other line, which may be right all the same."""
    try:
        fields = parse_strict(line)
        if (
            type(fields) is not dict
            or tuple(map(type, fields.values())) != _STEP_TYPES
            or tuple(fields) != _STEP_FIELDS
        ):
            return None
    except ValueError:
        return None
    record = StepRecord(*fields.values())
    return record if is_count(record.step) and is_count(record.updates) and is_count(record.epoch) else None


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = parse_strict(line)
        _require(isinstance(fields, dict))
        return restore_nonfinite(fields)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _damaged(path, number, "it is not a record") from None


def _histogram(fields: dict[str, Any]) -> HistogramRecord:
    record = build(HistogramRecord, fields)
    _require(record.step > 0)
    for found in (counts for named in record.tensors.values() for counts in named.values()):
        _require(-_FARTHEST <= found.lowest <= _FARTHEST and len(found.counts) <= 2 * _FARTHEST)
        _require(0 <= found.largest < math.inf)
    return record


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _epoch(path: Path, number: int, header: list[str], cells: list[str]) -> EpochRecord:
    if len(cells) != len(header):
        raise _damaged(path, number, f"it has {len(cells)} cells, the header has {len(header)}")
    values: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    try:
        for column, cell in zip(header, cells, strict=True):
            if not column.startswith(VAL_PREFIX):
                values[column] = cell if column == "learner" else _number(column, cell)
            elif cell:
                metrics[column.removeprefix(VAL_PREFIX)] = float(cell)
    except ValueError:
        raise _damaged(path, number, f"{cell!r} is not a number") from None
    return EpochRecord(val=metrics, **values)


def _number(column: str, cell: str) -> float:
    if column not in _INTEGERS:
        return float(cell)
    _require(is_count(int(cell)))
    return int(cell)


def _damaged(path: Path, number: int, why: str) -> StorageError:
    return StorageError(
        f"{path}, line {number} is damaged: {why}", "restore the file from a copy; the run itself can be gone on with"
    )
