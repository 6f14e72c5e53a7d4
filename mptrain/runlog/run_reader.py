"""Reader of run directories, for all commands that read runs during or after training. It must not import torch.

In a watched loop with sharded parameters (FSDP2) each rank records its own shards, and none waits for another: what
the ranks know is put together when it is read.

An incomplete last line, left by a killed process, is ignored. Any other damage raises an error that names the file and
the line.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from mptrain.numerics.exponents import merged, total
from mptrain.runlog.atomic_files import (
    storage_errors,
)
from mptrain.runlog.directory import open_run
from mptrain.runlog.record_writer import VAL_PREFIX, is_header
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_state import RunState, read_summary
from mptrain.runlog.strict_json import parse_strict, restore_nonfinite
from mptrain.system.errors import StorageError, UsageError
from mptrain.system.fields import NonNegativeInt
from mptrain.system.files import open_to_read, read_bytes
from mptrain.system.records import MAX_TENSORS, EpochRecord, HistogramRecord, OverflowRecord, StepRecord
from mptrain.system.validation import build, line_parser

_Record = TypeVar("_Record", bound=StepRecord | HistogramRecord)


def merged_steps(ranks: Sequence[Iterable[StepRecord]]) -> Iterator[StepRecord]:
    """Yield the steps that all ranks have recorded, with the gradient norm and the overflow of all shards.

    Loss and learning rate are those of rank 0.
    """
    for same in _same_steps(ranks):
        norm = math.hypot(*(record.grad_norm for record in same))
        applied = [record.applied_norm for record in same if record.applied_norm is not None]
        whole = math.hypot(*applied) if len(applied) == len(same) else None
        yield replace(same[0], grad_norm=norm, applied_norm=whole, overflow=any(record.overflow for record in same))


def merged_events(ranks: Sequence[Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the events of rank 0 in the order of their steps, with what was not finite in the shards of all ranks.

    What any of them has not looked at is there too.
    """
    overflows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    others: list[dict[str, Any]] = []
    for rank, events in enumerate(ranks):
        seen: Counter[tuple[Any, ...]] = Counter()
        for event in events:
            if event["event"] in ("overflow", "abandoned"):
                key = event["event"], event.get("step"), event.get("learner")
                seen[key] += 1  # passes of one step
                overflows.setdefault((*key, seen[key]), []).append(event)
            elif rank == 0 or event["event"] == "not_looked_at":
                others.append(event)
    yield from sorted([*map(_merged_overflow, overflows.values()), *others], key=step_of)


def step_of(event: dict[str, Any]) -> int:
    """Return the step of an event; 0 if it has none."""
    step = event.get("step")
    return step if isinstance(step, int) else 0


def merged_histograms(ranks: Sequence[Iterable[HistogramRecord]]) -> Iterator[HistogramRecord]:
    """Yield the histograms of the steps that all ranks have recorded, over all shards and all samples."""
    for same in _same_steps(ranks):
        tensors = {
            kind: {
                name: merged(counts for record in same if (counts := record.tensors.get(kind, {}).get(name)))
                for name in named
            }
            for kind, named in same[0].tensors.items()
        }
        unchanged = {name: _sum(record.unchanged.get(name, (0, 0)) for record in same) for name in same[0].unchanged}
        lost = {name: _sum(record.lost.get(name, (0, 0, 0.0, 0.0, 0.0)) for record in same) for name in same[0].lost}
        names = dict.fromkeys(name for record in same for name in record.sampled)
        sampled = {name: sum(_looked_at(record, name) for record in same) for name in names}
        overflow = any(record.overflow for record in same)
        yield replace(same[0], overflow=overflow, tensors=tensors, unchanged=unchanged, lost=lost, sampled=sampled)


def _looked_at(record: HistogramRecord, name: str) -> int:
    """Return the number of elements of a parameter whose updates were looked at."""
    weight = record.tensors.get("weights", {}).get(name)
    return record.sampled.get(name, total(weight) if weight else 0)


def _sum(several: Iterable[Any]) -> Any:
    """Return the sums of tuples of equal length, entry by entry."""
    return tuple(map(sum, zip(*several, strict=True)))


def _same_steps(ranks: Sequence[Iterable[_Record]]) -> Iterator[list[_Record]]:
    """Yield the records of all ranks for each learner and step, which ranks may have written in different orders."""
    others = [{(record.learner, record.step): record for record in records} for records in ranks[1:]]
    for first in ranks[0]:
        key = first.learner, first.step
        if all(key in by_key for by_key in others):
            yield [first, *(by_key[key] for by_key in others)]


def _merged_overflow(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the overflow of a step with the parameters of all ranks; the boundary is left empty if they disagree."""
    kinds: dict[str, str] = {}
    for event in same:
        for name, kind in event.get("tensors", ()):
            kinds[name] = "nan" if "nan" in (kind, kinds.get(name)) else kind
    overflowed = [event for event in same if event.get("count")]
    worst = next((event for event in same if event.get("phase") == "unexpected"), same[0])
    boundaries = {tuple(event.get("boundary", ())) for event in overflowed}
    return {
        **{name: value for name, value in worst.items() if name != "rank"},
        "tensors": [[name, kinds[name]] for name in _in_one_order(same)[:MAX_TENSORS]],
        "count": max([len(kinds), *(event["count"] for event in overflowed)]),
        "boundary": list(boundaries.pop()) if len(boundaries) == 1 else ["", ""],
    }


def _in_one_order(same: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of all ranks' tensors in an order that contains that of each rank, which is that of modules."""
    names: list[str] = []
    for event in same:
        at = 0
        for name, _ in event.get("tensors", ()):
            if name in names:
                at = names.index(name) + 1
            else:
                names.insert(at, name)
                at += 1
    return names


_INTEGERS = frozenset({"epoch", "step", "updates", "skipped"})


@dataclass(frozen=True)
class _Abandoned:
    """Fields of an event ``abandoned`` that are merged."""

    learner: str
    step: NonNegativeInt
    tensors: tuple[tuple[str, str], ...]
    count: NonNegativeInt
    boundary: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Run:
    """Content of one run directory at the time of reading; the record files are read lazily, by the methods.

    Attributes:
        state: The content of ``run.json``: identity, status and attempts.
        config: The resolved configuration as YAML text; empty if not yet written.
        overrides: The ``KEY=VALUE`` overrides of the command line.
        summary: The final numbers of ``summary.json``; empty if not yet written.
    """

    paths: RunPaths
    state: RunState
    config: str
    overrides: tuple[str, ...]
    summary: dict[str, Any]

    def steps(self) -> Iterator[StepRecord]:
        """Yield the record of every attempted step and learner in order, with non-finite numbers restored."""
        if shards := self._shards():
            yield from merged_steps([self._steps_of(each.steps) for each in shards])
        else:
            yield from self._steps_of(self.paths.steps)

    def _shards(self) -> list[RunPaths]:
        """Return the folders of all ranks of a watched loop with sharded parameters; empty for other runs."""
        if not RunPaths(self.paths.ranks / "0").steps.exists():
            return []
        there = sum(1 for _ in self.paths.ranks.iterdir())
        ranks = [RunPaths(self.paths.ranks / str(rank)) for rank in range(min(self.state.ranks, there + 1))]
        if missing := [str(each.steps) for each in ranks if not each.steps.exists()]:
            raise StorageError(
                f"{', '.join(missing)} is missing: each rank has the records of its own shards",
                "copy it from the machine of that rank",
            )
        return ranks

    def _steps_of(self, path: Path) -> Iterator[StepRecord]:
        parse = line_parser(StepRecord)
        for number, line in self._lines(path):
            usual = parse(line)
            if usual is not None and _is_finite(usual):  # NaN is not JSON
                yield usual
                continue
            fields = _object(path, number, line)
            try:
                yield build(StepRecord, fields)
            except ValueError as error:
                raise _damaged(path, number, f"{error}") from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of every event of the run in order, such as overflows, scale changes and evaluations.

        The field ``event`` is the kind. Non-finite numbers are restored. Events that other ranks of a watched loop
        wrote, such as ``rank_overflow``, stand at their steps, beside the overflow of all if there is one; of sharded
        parameters there is one for all shards.
        """
        if shards := self._shards():
            yield from merged_events([self._events_of(each.events) for each in shards])
            return
        files = sorted(self.paths.ranks.glob("*/events.jsonl"), key=lambda path: (len(path.parent.name), path))
        others = deque(sorted((event for path in files for event in self._events_of(path)), key=step_of))
        for fields in self._events_of(self.paths.events):
            while others and step_of(others[0]) < step_of(fields):
                yield others.popleft()
            yield fields
            if fields["event"] == "overflow":
                beside = [event for event in others if step_of(event) == step_of(fields)]
                beside = [event for event in beside if event.get("learner") == fields.get("learner")]
                yield from beside
                others = deque(event for event in others if event not in beside)
        yield from others

    def _events_of(self, path: Path) -> Iterator[dict[str, Any]]:
        for number, line in self._lines(path):
            fields = _object(path, number, line)
            if not isinstance(fields.get("event"), str):
                raise _damaged(path, number, "it has no field 'event'")
            merged = {"overflow": OverflowRecord, "abandoned": _Abandoned}.get(fields["event"])
            if path.parent.parent == self.paths.ranks and merged is not None:  # with those of others
                try:
                    build(merged, fields, lenient=True)
                except ValueError as error:
                    raise _damaged(path, number, f"it is not the record of an overflow: {error}") from None
            yield fields

    def histograms(self) -> Iterator[HistogramRecord]:
        """Yield the exponent histograms of the run's tensors at every sampled step; nothing if it recorded none."""
        if shards := self._shards():
            yield from merged_histograms([self._histograms_of(each.histograms) for each in shards])
        else:
            yield from self._histograms_of(self.paths.histograms)

    def _histograms_of(self, path: Path) -> Iterator[HistogramRecord]:
        for number, line in self._lines(path):
            fields = _object(path, number, line)
            try:
                yield build(HistogramRecord, fields)
            except ValueError as error:
                raise _damaged(path, number, f"it is not a histogram record: {error}") from None

    def epochs(self) -> Iterator[EpochRecord]:
        """Yield the record of every epoch and learner in order."""
        header: list[str] = []
        for number, line in self._lines(self.paths.epochs):
            try:
                cells = next(csv.reader([line]), [])
            except csv.Error:
                raise _damaged(self.paths.epochs, number, "it is not a CSV row") from None
            if number == 1:
                header = cells
                if not is_header(header):
                    raise _damaged(self.paths.epochs, 1, "it is not the header of an epochs.csv")
            else:
                yield _epoch(self.paths.epochs, number, header, cells)

    def columns(self, records: Literal["steps", "events", "epochs"]) -> dict[str, list[Any]]:
        """Return all records of a kind as one list for each field, for arrays or ``pandas.DataFrame(columns)``.

        Validation metrics of epochs are fields named ``val_METRIC``. Where a record lacks a field, its entry is None.
        """
        match records:
            case "steps":
                rows = [asdict(record) for record in self.steps()]
            case "events":
                rows = list(self.events())
            case "epochs":
                whole = [asdict(record) for record in self.epochs()]
                rows = [
                    {**row, **{VAL_PREFIX + name: metric for name, metric in row.pop("val").items()}} for row in whole
                ]
            case _:
                raise UsageError(f"there are no records called {records}", "they are steps, events and epochs")
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield the complete lines of a file with their numbers, counted from 1; nothing if the file is missing."""
        with storage_errors(path, "read"):
            if not path.exists():
                return
            with open_to_read(path) as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):  # only the last line can lack it
                        if self.state.status == "done":
                            raise _damaged(path, number, "it is incomplete, although the run is done")
                        return
                    yield number, line[:-1].decode("utf-8", "replace")


#: Largest configuration; pages show it whole.
_MOST_BYTES = 5_000_000


def read_run(path: Path | str) -> Run:
    """Read the run in a directory; its record files are read later, by the methods of `Run`.

    Raise OtherVersion if another version of mptrain wrote the run.
    """
    directory = open_run(Path(path), any_version=True)
    state = directory.read_state()
    if state is None:
        raise StorageError(f"{path}: run.json was removed while the run was being read", "try again")
    paths = directory.paths
    return Run(paths, state, _text(paths.config), directory.read_overrides(), read_summary(paths.summary))


def _text(path: Path) -> str:
    with storage_errors(path, "read"):
        try:
            content = read_bytes(path)
        except FileNotFoundError:
            return ""
    if len(content) > _MOST_BYTES:
        raise StorageError(f"{path} has {len(content):,} bytes, more than any configuration", "restore it from a copy")
    return content.decode("utf-8", "surrogateescape")


_floats = attrgetter(*(name for name, kind in StepRecord.__annotations__.items() if kind == "float"))


def _is_finite(record: StepRecord) -> bool:
    return math.isfinite(sum(_floats(record)))


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = parse_strict(line)
        _require(isinstance(fields, dict))
        return restore_nonfinite(fields)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _damaged(path, number, "it is not a record") from None


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _epoch(path: Path, number: int, header: list[str], cells: list[str]) -> EpochRecord:
    if len(cells) != len(header):
        raise _damaged(path, number, f"it has {len(cells)} cells; the header has {len(header)}")
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
    _require(0 <= int(cell) < 2**63)
    return int(cell)


def _damaged(path: Path, number: int, why: str) -> StorageError:
    return StorageError(
        f"{path}, line {number} is damaged: {why}", "restore the file from a copy; the run can still be resumed"
    )
