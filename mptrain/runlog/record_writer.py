"""Writes the record files of a run: steps.jsonl, events.jsonl, epochs.csv and, where there are any, histograms.jsonl.

Lines are collected in memory and written in large pieces, so a record costs no system call. All files grow
at the end only, in binary: their byte lengths, stored with a checkpoint, are enough to take back what came
after it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mptrain.errors import StorageError
from mptrain.files import open_in_place, open_to_read
from mptrain.masking import masker
from mptrain.records import (
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
    step_json,
)
from mptrain.runlog.atomic_files import digest_of, storage_errors, sync_folder, write_all
from mptrain.runlog.run_paths import EPOCHS, EVENTS, HISTOGRAMS, STEPS, RunPaths

BUFFER_BYTES: Final = 1 << 16
EPOCHS_BEFORE: Final = ("learner", "epoch", "step", "updates", "skipped", "train_loss", "loss_scale", "lr")
EPOCHS_AFTER: Final = ("seconds", "terms_per_second")
VAL_PREFIX: Final = "val_"


class RecordWriter:
    """A sink that keeps every record in its file.

    The files are made at once, so that a disk that refuses is noticed before training; that of histograms with the
    first of them. A record given to
    `take` is in the file after `flush`, and on the disk after `force`.

    Args:
        paths: The run directory. Existing files are continued; on a resume call `truncate_records` before.

    Raises:
        StorageError: A file cannot be made, here, or written, in every method.
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
        """Keep one record; progress is not kept, it depends on the clock.

        Raises:
            ValueError: An epoch has a metric that the first epoch had not, or an event's fields hide its own.
            StorageError: The header of ``epochs.csv`` that was found is not that of this run.
        """
        match record:
            case StepRecord():
                self._files[STEPS].add(step_json(record) + "\n")
            case EpochRecord():
                self._take_epoch(record)
            case HistogramRecord():
                if HISTOGRAMS not in self._files:
                    self._files[HISTOGRAMS] = _AppendFile(self._paths[HISTOGRAMS])
                self._files[HISTOGRAMS].add(as_json(asdict(record)) + "\n")
            case ProgressRecord():
                pass
            case _:
                self._files[EVENTS].add(as_json(self._mask(event_fields(record))) + "\n")

    def flush(self) -> dict[str, int]:
        """Hand everything taken so far to the operating system: it survives the death of this process.

        Returns:
            The byte length of each record file that there is by name, for a checkpoint and `truncate_records`.
        """
        return {name: file.flush() for name, file in self._files.items()}

    def digests(self) -> dict[str, str]:
        """SHA-256 of what is in each file after `flush`, by name: it tells later whether those bytes are still the same."""
        return {name: file.digest() for name, file in self._files.items()}

    def force(self, names: Iterable[str]) -> None:
        """Force what was flushed to these files to the disk: it survives a power failure.

        Another thread may take and flush meanwhile.
        """
        for name in names:
            self._files[name].force()

    def close(self) -> None:
        """Flush, force and close the files."""
        with contextlib.ExitStack() as stack:  # all of them, even if one fails
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
    """The fields of a line of ``events.jsonl``; ``event`` comes first and says which kind it is.

    Raises:
        ValueError: The fields of an event contain ``event``, ``step`` or ``nonfinite``.
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
    """Cut every record file back to a length that `RecordWriter.flush` returned, after checking all of them.

    Histograms are no part of what a run goes on with: where their file is gone, or is no longer the one that the checkpoint knew,
    they begin anew.

    Args:
        paths: The run directory.
        lengths: Byte length by file name. A file without a length becomes empty; a missing file of length 0
            stays missing.
        digests: SHA-256 of those bytes by file name, where known. What has changed in them is told, and stays as it is:
            nothing that is computed depends on it.

    Returns:
        What was lost or damaged, one sentence each.

    Raises:
        StorageError: A file is a link that may lead out of the run, or shares its content with a file elsewhere; another than the histograms is shorter than its length or has no line end there (the record is damaged), or
            it cannot be read or cut.
    """
    files = paths.records()
    if unknown := set(lengths) - set(files):
        raise StorageError(f"{paths.root} has no record file {sorted(unknown)}", "use the mptrain that wrote it")
    kept, notes = {name: lengths.get(name, 0) for name in files}, []
    for name, path in files.items():
        if path.is_symlink():  # of a folder that somebody else made
            raise StorageError(f"{path} is a symbolic link", "put the file that it leads to in its place")
        with storage_errors(path):
            if path.exists():
                os.close(open_in_place(path, os.O_WRONLY))
        fault = _fault(path, kept[name])
        if fault and name != HISTOGRAMS:
            raise StorageError(fault, "the record is damaged: restore it from a copy, or start the run again")
        if fault:
            notes.append(f"{fault}: histograms of the steps so far are lost")
            kept[name] = 0
        elif (digest := (digests or {}).get(name)) and digest_of(path, kept[name]).hexdigest() != digest:
            notes.append(
                f"{path} is damaged: its first {kept[name]} bytes are not those that were written; they stay as they are"
            )
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
    """A file that grows at its end, with a buffer of its own whose fill survives a failed write."""

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
                finally:  # what was accepted, where the disk refused the rest
                    self._digest.update(whole[: len(whole) - len(self._pending)])
            found = os.fstat(self._descriptor)
        if not found.st_nlink:  # a file without a name takes everything, and nobody will ever read it
            raise StorageError(
                f"{self._path} was removed while the run was writing it",
                "start the run again, and leave its folder alone",
            )
        return found.st_size

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
    """Return why a file cannot be cut to a length in bytes; empty where it can."""
    with storage_errors(path, "read"):
        size = path.stat().st_size if path.exists() else 0
        if size < length:
            return f"{path} has {size} bytes, the checkpoint knew {length}"
        if length:
            with open_to_read(path) as file:
                file.seek(length - 1)
                if file.read(1) != b"\n":
                    return f"{path} has no line end at byte {length}, where the checkpoint knew one"
    return ""


def _header_of(path: Path) -> tuple[str, ...]:
    try:
        with storage_errors(path, "read"), io.TextIOWrapper(open_to_read(path), "utf-8", newline="") as file:
            columns = tuple(next(csv.reader(file), ()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise _damaged_header(path, str(error)) from error
    if columns and not is_header(columns):
        raise _damaged_header(path, "its columns are not those of epochs")
    return columns


def is_header(columns: Sequence[str]) -> bool:
    """Return whether columns are those of ``epochs.csv``, in their order."""
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
