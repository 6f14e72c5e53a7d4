"""Consumers of a run's records, and the writer of the files steps.jsonl, events.jsonl, epochs.csv and histograms.jsonl.

Lines are buffered and written in large pieces, so a record costs no system call. All files are append-only and binary.
A checkpoint stores their byte lengths, which is enough to remove the records that came after it.

Records (`mptrain.system.records`) describe steps, epochs, evaluations and other events as frozen dataclasses. A sink
displays or stores them. It must not change training and never receives a tensor.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

from mptrain.runlog.atomic_files import digest_of, storage_errors, sync_folder, write_all, write_atomically
from mptrain.runlog.run_paths import EPOCHS, EVENTS, HISTOGRAMS, RUN_JSON, STEPS, RunPaths
from mptrain.system.errors import StorageError
from mptrain.system.files import open_in_place, open_to_read, read_bytes
from mptrain.system.masking import masker
from mptrain.system.records import (
    EpochRecord,
    EvalRecord,
    EventRecord,
    HistogramRecord,
    OverflowRecord,
    ProgressRecord,
    Record,
    ScaleRecord,
    StepRecord,
    as_json,
)

BUFFER_BYTES: Final = 1 << 16
EPOCHS_BEFORE: Final = ("learner", "epoch", "step", "updates", "skipped", "train_loss", "loss_scale", "lr")
EPOCHS_AFTER: Final = ("seconds", "terms_per_second")
VAL_PREFIX: Final = "val_"


class RecordWriter:
    """Sink (consumer of records) that appends every record of a training run to its file in the run directory.

    The files are created at once, so that a disk error shows before training; histograms.jsonl is created with the
    first histogram. Existing files are appended to; to resume, call `truncate_records` first. A record given to `take`
    is in the file after `flush` and on the disk after `force`.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths.records()
        self._mask = masker()
        self._files = {
            name: _AppendFile(path) for name, path in self._paths.items() if name != HISTOGRAMS or path.exists()
        }
        self._columns = _header_of(paths.epochs)
        self._continues = bool(self._columns)
        with storage_errors(paths.root):
            sync_folder(paths.root)

    def take(self, record: Record) -> None:
        """Add one record to the buffer of its file. Progress records are ignored, because they depend on the clock.

        Raises ValueError for an epoch with a metric that the first one lacks, or an event with a field of a reserved
        name; StorageError if the existing header of ``epochs.csv`` does not match this run.
        """
        match record:
            case StepRecord():
                self._files[STEPS].add(step_json(record) + "\n")
            case EpochRecord():
                self._take_epoch(record)
            case HistogramRecord():
                if HISTOGRAMS not in self._files:
                    self._files[HISTOGRAMS] = _AppendFile(self._paths[HISTOGRAMS])
                fields = {name: value for name, value in asdict(record).items() if name != "sampled" or value}
                self._files[HISTOGRAMS].add(as_json(fields) + "\n")
            case ProgressRecord():
                pass
            case _:
                self._files[EVENTS].add(as_json(self._mask(event_fields(record))) + "\n")

    def flush(self) -> dict[str, int]:
        """Write all buffered records to the files, which then survive a crash of this process.

        Return the byte length of each existing record file by name, for a checkpoint and `truncate_records`.
        """
        return {name: file.flush() for name, file in self._files.items()}

    def digests(self) -> dict[str, str]:
        """Return the hexadecimal SHA-256 of each record file's content at the last `flush`, by name."""
        return {name: file.digest() for name, file in self._files.items()}

    def force(self, names: Iterable[str]) -> None:
        """Force the flushed records of these files to the disk; they then survive a power failure.

        Another thread may call `take` and `flush` at the same time.
        """
        for name in names:
            self._files[name].force()

    def drop_histograms(self) -> bool:
        """Empty histograms.jsonl, by far the largest file, and write it no more; return whether there was one."""
        if (file := self._files.pop(HISTOGRAMS, None)) is None:
            return False
        file.empty()
        return True

    def close(self) -> None:
        """Flush all records, force them to the disk and close the files, all of them even if one fails."""
        with contextlib.ExitStack() as stack:  # closes all files even if one fails
            for file in self._files.values():
                stack.callback(file.close)

    def _take_epoch(self, record: EpochRecord) -> None:
        values = asdict(record)
        metrics = {VAL_PREFIX + name: value for name, value in values.pop("val").items()}
        if not self._columns:
            self._columns = (*EPOCHS_BEFORE, *metrics, *EPOCHS_AFTER)
            self._files[EPOCHS].add(_csv_line(self._columns))
        if unknown := set(metrics) - set(self._columns):
            if self._continues:
                raise _damaged_header(self._paths[EPOCHS], f"it has no column {sorted(unknown)}")
            raise ValueError(f"epochs.csv has no column {sorted(unknown)}; the first epoch fixed {self._columns}")
        row = {**values, **metrics}
        self._files[EPOCHS].add(_csv_line([row.get(column, "") for column in self._columns]))


def event_fields(record: OverflowRecord | ScaleRecord | EvalRecord | EventRecord) -> dict[str, Any]:
    """Return the fields of a record's line in ``events.jsonl``; the first one, ``event``, names the kind.

    Raise ValueError if the fields of an event contain ``event``, ``step`` or ``nonfinite``.
    """
    match record:
        case OverflowRecord():
            return {"event": "overflow", **asdict(record)}
        case ScaleRecord():
            return {"event": "scale", **asdict(record)}
        case EvalRecord():
            fields = asdict(record)
            return {
                "event": "evaluation",
                **{name: value for name, value in fields.items() if name not in ("intervals", "data") or value},
            }
        case EventRecord():
            if hidden := {"event", "step", "nonfinite"} & set(record.fields):
                raise ValueError(f"fields of event {record.kind!r} must not be called {sorted(hidden)}")
            return {"event": record.kind, "step": record.step, **record.fields}


def truncate_records(
    paths: RunPaths, lengths: Mapping[str, int], digests: Mapping[str, str] | None = None
) -> list[str]:
    """Truncate the record files of a run to their lengths at a checkpoint, before the run resumes from it.

    All files are checked first. A run can resume without its histograms: if their file is missing or does not match the
    checkpoint, it is emptied. Return losses and damage, one sentence each.

    Args:
        paths: The run directory.
        lengths: Byte length by file name, as `RecordWriter.flush` returned. A file without a length becomes empty; a
            missing file of length 0 stays missing.
        digests: SHA-256 of those bytes by file name, if known. Changed bytes are reported and left alone, because no
            computation depends on them.

    Raises:
        StorageError: A file is a symbolic link or has hard links, so that writing could change files outside the run;
            or a file cannot be read or truncated; or a file other than histograms.jsonl is damaged: it is shorter than
            its length, or has no line end there.
    """
    files = paths.records()
    if unknown := set(lengths) - set(files):
        raise StorageError(f"{paths.root} has no record file {sorted(unknown)}", "use the mptrain that wrote it")
    kept, notes = {name: lengths.get(name, 0) for name in files}, []
    for name, path in files.items():
        if path.is_symlink():  # the folder may be untrusted
            raise StorageError(f"{path} is a symbolic link", "replace the link with its target")
        with storage_errors(path):
            if path.exists():
                os.close(open_in_place(path, os.O_WRONLY))
        fault = _fault(path, kept[name])
        if fault and name != HISTOGRAMS:
            raise StorageError(fault, "the file is damaged: restore it from a copy, or start the run again")
        if fault:
            notes.append(f"{fault}: the histograms of all steps so far are lost")
            kept[name] = 0
        elif (digest := (digests or {}).get(name)) and digest_of(path, kept[name]).hexdigest() != digest:
            notes.append(f"{path} is damaged: its first {kept[name]} bytes have changed since they were written")
    for name, path in files.items():
        with storage_errors(path, "truncate"):
            if path.exists():
                descriptor = open_in_place(path, os.O_WRONLY)
                try:
                    os.ftruncate(descriptor, kept[name])
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
    return notes


class _AppendFile:
    """Append-only file with a write buffer that keeps its content if a write fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = bytearray()
        self._closed = False
        self._digest = digest_of(path)
        with storage_errors(path):
            self._descriptor = open_in_place(path, os.O_WRONLY | os.O_APPEND)

    def add(self, line: str) -> None:
        self._pending += line.encode()
        if len(self._pending) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> int:
        with storage_errors(self._path, needed=len(self._pending)):
            if self._pending:
                whole = bytes(self._pending)
                try:
                    write_all(self._descriptor, self._pending)
                finally:  # counts the bytes that were written, also if the rest failed
                    self._digest.update(whole[: len(whole) - len(self._pending)])
            status = os.fstat(self._descriptor)
        if not status.st_nlink:  # the file was deleted: writes still succeed, but the data is lost
            raise StorageError(
                f"{self._path} was removed while the run was writing it",
                "start the run again and do not change its folder while it is running",
            )
        return status.st_size

    def empty(self) -> None:
        """Remove the content, buffered or written, and close the file."""
        self._closed = True
        self._pending.clear()
        with contextlib.suppress(OSError):  # of a disk that fails there is nothing more to say
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def digest(self) -> str:
        return self._digest.hexdigest()

    def force(self) -> None:
        with storage_errors(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            self.force()
        finally:
            os.close(self._descriptor)


def _fault(path: Path, length: int) -> str:
    """Return the reason why a file cannot be truncated to a length in bytes; empty if it can."""
    with storage_errors(path, "read"):
        size = path.stat().st_size if path.exists() else 0
        if size < length:
            return f"{path} has {size} bytes; the checkpoint expects {length}"
        if length:
            with open_to_read(path) as file:
                file.seek(length - 1)
                if file.read(1) != b"\n":
                    return f"{path} has no line end at byte {length}, where the checkpoint expects one"
    return ""


def _header_of(path: Path) -> tuple[str, ...]:
    try:
        with storage_errors(path, "read"), io.TextIOWrapper(open_to_read(path), "utf-8", newline="") as file:
            columns = tuple(next(csv.reader(file), ()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise _damaged_header(path, str(error)) from error
    if columns and not is_header(columns):
        raise _damaged_header(path, "its columns are not the columns of an epochs.csv")
    return columns


def is_header(columns: Sequence[str]) -> bool:
    """Return whether columns are `EPOCHS_BEFORE`, any number of ``val_METRIC``, and `EPOCHS_AFTER`, in order."""
    first, last = len(EPOCHS_BEFORE), len(columns) - len(EPOCHS_AFTER)
    metrics = columns[first:last]
    return [*columns] == [*EPOCHS_BEFORE, *metrics, *EPOCHS_AFTER] and all(
        name.startswith(VAL_PREFIX) for name in metrics
    )


def _damaged_header(path: Path, why: str) -> StorageError:
    return StorageError(f"{path}, line 1 is damaged: {why}", "restore the file from a copy, or start the run again")


def _csv_line(values: list[Any] | tuple[Any, ...]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def step_json(record: StepRecord) -> str:
    """Return the line of a step record in ``steps.jsonl``, without values that are None.

    It is that of `as_json`, in a seventh of its time.
    """
    known = tuple(name for name in _OPTIONAL if getattr(record, name) is not None)
    numbers = (*_numbers(record), *(getattr(record, name) for name in known))
    # The sum of finite numbers may overflow; the slow path is then taken unnecessarily.
    if not math.isfinite(sum(numbers)):
        return as_json({name: value for name, value in asdict(record).items() if value is not None})
    return _step_line(*_words(record), known=known) % numbers


_WORDS = tuple(field.name for field in fields(StepRecord) if field.type in {"str", "bool"})
_OPTIONAL = tuple(field.name for field in fields(StepRecord) if field.default is None)  # numbers, after all others
_NUMBERS = tuple(field.name for field in fields(StepRecord) if field.name not in (*_WORDS, *_OPTIONAL))
_words, _numbers = attrgetter(*_WORDS), attrgetter(*_NUMBERS)


@functools.lru_cache
def _step_line(*words: str | bool, known: tuple[str, ...]) -> str:
    """Return the line of a step record with ``%r`` for each of its numbers, of the optional ones those ``known``."""
    values = {name: json.dumps(word).replace("%", "%%") for name, word in zip(_WORDS, words, strict=True)}
    names = [field.name for field in fields(StepRecord) if field.name in known or field.name not in _OPTIONAL]
    return "{" + ", ".join(f'"{name}": {values.get(name, "%r")}' for name in names) + "}"


class Sink(Protocol):
    """Protocol of consumers of a training run's records, such as the writer of its files or a progress display."""

    def take(self, record: Record) -> None:
        """Accept one record, in the order of the events, and ignore it if the sink does not use records of its type."""

    def close(self) -> None:
        """Store or display all pending records and release resources; accept no records afterwards.

        A second call does nothing.
        """


class NoRecords:
    """Sink that discards all records of a run, with the methods of `RecordWriter` that ranks other than 0 call."""

    def take(self, record: Record) -> None:
        """Discard the record."""

    def flush(self) -> dict[str, int]:
        """Return an empty dict, because no file has any records."""
        return {}

    def close(self) -> None:
        """Do nothing: there are no pending records."""


class Fanout:
    """Sink that passes every record of a run to several sinks."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)

    def take(self, record: Record) -> None:
        """Pass the record to every sink, in order."""
        for sink in self.sinks:
            sink.take(record)

    def close(self) -> None:
        """Close every sink, even if one of them fails, and then raise the first failure."""
        failures: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]


#: Bytes of a digest (see `mptrain.workloads.base.dataset`).
SIZE = 8


def read_trained(weights: Path) -> frozenset[bytes]:
    """Read the digests of the samples that weights were trained on; none without a record or without digests.

    ``weights`` is a run directory, a file inside one, or an exported file, which has the record `beside` it.
    """
    weights = weights.absolute()
    run = next((folder for folder in (weights, *weights.parents[:2]) if (folder / RUN_JSON).is_file()), weights)
    path = beside(weights) if beside(weights).is_file() else RunPaths(run).trained_samples
    if not path.is_file():
        return frozenset()
    with storage_errors(path, "read"):
        content = read_bytes(path)
    if len(content) % SIZE:
        raise StorageError(
            f"{path} is damaged: its size is no multiple of {SIZE} bytes", "restore the file from a copy"
        )
    return frozenset(content[start : start + SIZE] for start in range(0, len(content), SIZE))


def beside(weights: Path) -> Path:
    """Return the path of the record of exported weights outside a run directory."""
    return weights.with_name(f"{weights.name}.trained_samples")


def write_trained(path: Path, digests: frozenset[bytes]) -> None:
    """Write the digests of the samples that weights are trained on, replacing the file atomically."""
    write_atomically(path, b"".join(sorted(digests)))
