"""Curves of a metric over training steps, read from the logs of frameworks and trackers.

Each format is read by its own rules into steps and values; nothing is smoothed, interpolated or left out silently.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_reader import read_run
from mptrain.study.comparison.logs.rows import (
    CUT,
    Row,
    Values,
    compiled,
    csv_rows,
    damaged,
    fields_of,
    json_lines,
    json_list,
    lines_of,
    number_of,
    step_of,
    text_rows,
    unknown,
    values_of,
)
from mptrain.system.errors import EXIT_NUMERICS, DataError, EnvironmentRefused, UsageError
from mptrain.system.files import open_to_read

#: Most rows of a metric in a database, and seconds that its queries may take.
_MOST_ROWS, _QUERY_SECONDS = 10_000_000, 30


@dataclass(frozen=True)
class Curve:
    """Values of a metric in one run.

    Attributes:
        path: The log, as given.
        form: Its format, such as ``CSV``.
        steps: Training steps, int64 of shape (N,), ascending and each once.
        values: Values, float64 of shape (N,); NaN and infinities are kept.
        given_up: Number of values that a resume has made void: those before it at its first step and later.
        counted: The log has no steps: they are the numbers of the values, from 1.
        digest: SHA-256 of the file that was read, hexadecimal.
    """

    path: str
    form: str
    steps: np.ndarray[Any, np.dtype[np.int64]]
    values: np.ndarray[Any, np.dtype[np.float64]]
    given_up: int
    counted: bool
    digest: str


def read_curve(path: Path, metric: str, where: Mapping[str, str] | None = None, pattern: str = "") -> Curve:
    """Read a metric from a log.

    Logs are files in CSV or JSON lines, event files of TensorBoard, ``trainer_state.json`` of transformers, and folders
    of Lightning's CSVLogger, of TensorBoard, of transformers, of offline runs of Weights & Biases, of MLflow's file
    store, and of runs of mptrain. A run in a database of MLflow is named as if that were a folder: ``mlflow.db/RUN``.
    Any other text is read by a ``pattern``, a regular expression with named groups. ``where`` has the values of columns
    in the rows that count.

    Raises:
        DataError: The log is of another kind, is damaged, has no value of the metric, has those of several curves, or
            is a chart's export.
        UsageError: The pattern has no group that is named as the metric.
        EnvironmentRefused: A library that reads the format is not installed.
        StorageError: It cannot be read.
    """
    where = where or {}
    if pattern:
        lines = compiled(pattern, metric)
        form, file, read = "text", path, _from_rows(where, lambda file, _: text_rows(file, lines))
        if not path.is_file():
            raise DataError(f"{path} is no file", "--pattern reads files of text")
    else:
        form, file, read = _format_of(path, where)
    if where and form in ("TensorBoard", "MLflow", "mptrain"):
        raise UsageError(
            f"{path} has no rows with columns", f"leave out --where: logs of {form} have each metric alone"
        )
    with storage_errors(file, "read"):
        steps, values, counted = read(file, metric)
        digest = _digest(file)
    if not values:
        raise DataError(f"{path} has no value of {metric}", "choose another with --metric NAME")
    numbers, metric_values = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    given_up = 0
    if np.any(numbers[1:] <= numbers[:-1]):
        _require_one_writer(path, metric, numbers, metric_values)
        later = np.minimum.accumulate(numbers[::-1])[::-1][1:]  # the lowest step after each value
        kept = np.append(numbers[:-1] < later, True)
        numbers, metric_values, given_up = numbers[kept], metric_values[kept], int(np.sum(~kept))
    if file == path.parent:  # a database of several runs
        digest = hashlib.sha256(f"{digest}/{path.name}".encode()).hexdigest()
    return Curve(str(path), form, numbers, metric_values, given_up, counted, digest)


def _require_one_writer(
    path: Path, metric: str, steps: np.ndarray[Any, np.dtype[np.int64]], values: np.ndarray[Any, np.dtype[np.float64]]
) -> None:
    """Raise DataError for steps that are equal or go back, unless a resume explains them."""
    unequal = ~((values[1:] == values[:-1]) | (np.isnan(values[1:]) & np.isnan(values[:-1])))
    if np.any(again := (steps[1:] == steps[:-1]) & unequal):
        raise DataError(
            f"{path} has several values of {metric} at step {steps[1:][again][0]:,}, and no column tells them apart",
            "log one value a step: the mean over ranks or micro-batches; of a step that a resume repeats, the second",
        )
    if steps[-1] < (highest := steps.max()):
        raise DataError(
            f"{path} ends at step {steps[-1]:,}, after it had reached {highest:,}",
            "sort its rows by step, or delete those that a resumed run has not repeated",
        )
    if np.sum(steps[1:] < steps[:-1]) > len(steps) / 4:
        raise DataError(
            f"steps of {metric} in {path} go back more often than after every fourth value, as of processes that "
            "write at once",
            "give the log of one rank",
        )


def _from_rows(where: Mapping[str, str], rows: Callable[[Path, str], Iterator[Row]]) -> Callable[[Path, str], Values]:
    return lambda file, metric: values_of(file, lambda: rows(file, metric), metric, where)


def _format_of(path: Path, where: Mapping[str, str]) -> tuple[str, Path, Callable[[Path, str], Values]]:
    """Return name, file and reader of a log's format."""
    if path.is_dir():
        return _format_of_folder(path, where)
    if path.parent.suffix == ".db" and path.parent.is_file():
        return "MLflow", path.parent, lambda file, metric: _database(file, metric, path.name)
    if not path.exists():
        raise DataError(f"there is no {path}", "give the path of a log")
    name = path.name
    if ".tfevents." in name:
        return "TensorBoard", path, _tensorboard
    if name.endswith(".wandb"):
        return "Weights & Biases", path, _from_rows(where, _wandb)
    if name.endswith((".csv", ".tsv")):
        return "CSV", path, _from_rows(where, csv_rows)
    if name.endswith((".jsonl", ".ndjson")):
        return "JSONL", path, _from_rows(where, lambda file, _: json_lines(file))
    if name.endswith(".json"):
        return "JSON", path, _from_rows(where, lambda file, _: json_list(file))
    raise DataError(
        f"{path} is no log that can be read",
        "give CSV, JSONL, event files of TensorBoard, a run's folder, or the lines of a text by --pattern",
    )


def _format_of_folder(path: Path, where: Mapping[str, str]) -> tuple[str, Path, Callable[[Path, str], Values]]:
    if (path / "run.json").exists():
        return "mptrain", RunPaths(path).steps if RunPaths(path).steps.exists() else path / "run.json", _run
    if (path / "metrics.csv").exists():
        return "Lightning CSVLogger", *_format_of(path / "metrics.csv", where)[1:]
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda state: _step_of(state.parent))
    states += [state for state in [path / "trainer_state.json"] if state.exists()]
    if states:
        return "transformers", *_format_of(states[-1], where)[1:]
    if [*path.glob("*.tfevents.*")]:  # several, in order, if the run was resumed
        return "TensorBoard", path, _tensorboard
    if (path / "metrics").is_dir():
        return "MLflow", path / "metrics", _mlflow
    if wandb_files := [*path.glob("*.wandb")]:
        return "Weights & Biases", wandb_files[0], _from_rows(where, _wandb)
    raise DataError(f"{path} has no log that can be read", "give the log itself, or the folder of one run: 'DIR/*'")


def _step_of(checkpoint: Path) -> int:
    step = checkpoint.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def _tensorboard(file: Path, metric: str) -> Values:
    """Return the scalars of event files, as torch and Keras write them."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise EnvironmentRefused(
            f"{file} needs tensorboard, which is not installed", "pip install 'mptrain[tensorboard]'"
        ) from None
    steps, values, names, last = array("q"), array("d"), dict[str, None](), -math.inf
    for part in _files_of(file):
        for number, content in enumerate(_event_records(part), 1):
            try:
                event = Event.FromString(content)
            except DecodeError:
                raise damaged(part, number, "it is no event") from None
            for summary in event.summary.value:
                if summary.WhichOneof("value") not in ("simple_value", "tensor"):
                    continue
                names[summary.tag] = None
                if summary.tag == metric:
                    scalar = summary.simple_value if summary.HasField("simple_value") else _scalar(summary.tensor)
                    values.append(number_of(part, number, metric, scalar))
                    step = step_of(part, number, "step", {"step": event.step})
                    if steps and step <= steps[-1] and event.wall_time < last:
                        raise DataError(
                            f"{file} has events of processes that wrote at once", "give the event file of one rank"
                        )
                    steps.append(step)
                    last = event.wall_time
    if not values:
        raise unknown(file, metric, [*names])
    return steps, values, False


def _scalar(tensor: Any) -> Any:
    """Return the only value of a tensor of TensorBoard; None if it has several or none."""
    from tensorboard.util.tensor_util import make_ndarray

    if any(dim.size != 1 for dim in tensor.tensor_shape.dim):  # before memory for its size is taken
        return None
    try:
        return make_ndarray(tensor).item()
    except (TypeError, ValueError, IndexError):
        return None


def _event_records(file: Path) -> Iterator[bytes]:
    """Yield the records of an event file: a length, its checksum, the content, its checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open_to_read(file) as log:
        size = os.fstat(log.fileno()).st_size
        for number in itertools.count(1):
            head = log.read(12)
            length = int.from_bytes(head[:8], "little")
            if len(head) < 12 or length + 4 > size - log.tell():  # the end, or what a killed process left
                return
            content, checksum = log.read(length), log.read(4)
            computed = masked_crc32c(head[:8]), masked_crc32c(content)
            if computed != (int.from_bytes(head[8:], "little"), int.from_bytes(checksum, "little")):
                raise damaged(file, number, "its checksum is wrong")
            yield content


def _wandb(file: Path, _: str) -> Iterator[Row]:
    """Yield the history of an offline run of Weights & Biases: protocol buffers in the records of a LevelDB log."""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        why = f"{file} needs wandb, which is not installed"
        raise EnvironmentRefused(why, "pip install 'mptrain[wandb]'") from None

    for number, content in enumerate(_leveldb_records(file), 1):
        record = wandb_internal_pb2.Record()
        try:
            record.ParseFromString(content)
            if record.WhichOneof("record_type") != "history":
                continue
            items = record.history.item
            fields = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
        except (DecodeError, ValueError, RecursionError):
            raise DataError(f"{file}, record {number} is damaged", "copy the run's folder again") from None
        yield number, {"_step": record.history.step.num, **fields}


def _leveldb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB of records with a CRC, a length and a type."""
    with open_to_read(file) as log:
        if log.read(4) != b":W&B":
            raise DataError(f"{file} is no file of Weights & Biases", "give the folder of an offline run")
        log.seek(7)  # its header, which is part of the first block
        parts = b""
        while True:
            left = 32768 - log.tell() % 32768
            if left < 7:
                log.seek(left, 1)
                continue
            head = log.read(7)
            length, kind = int.from_bytes(head[4:6], "little"), head[6] if len(head) == 7 else 0
            content = log.read(length)
            if kind == 0 or len(content) < length:  # the end, or what a killed process left
                return
            parts = content if kind in (1, 2) else parts + content
            if kind in (1, 4):
                yield parts


def _database(file: Path, metric: str, run: str) -> Values:
    """Return the values of a run in a SQLite database of MLflow.

    Only a table is read, because a view or a virtual table computes its rows, for ever if it wants to.
    """
    path = file.resolve()
    for beside in (Path(f"{path}{ending}") for ending in ("-wal", "-shm", "-journal")):  # SQLite would wait for a pipe
        if beside.exists():
            open_to_read(beside).close()
    steps, values, end = array("q"), array("d"), time.monotonic() + _QUERY_SECONDS
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            database.set_progress_handler(lambda: time.monotonic() > end, 10_000)
            query = "SELECT sql FROM sqlite_master WHERE name = 'metrics' AND type = 'table'"
            made = database.execute(query).fetchone()
            if made is None or str(made[0]).upper().split()[:2] != ["CREATE", "TABLE"]:
                raise DataError(f"{file} has no table of metrics", "give the database of MLflow")
            rows = database.execute(
                "SELECT step, value, is_nan FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY timestamp LIMIT ?",
                (run, metric, _MOST_ROWS + 1),
            )
            for number, (step, value, is_nan) in enumerate(rows, 1):
                values.append(math.nan if is_nan else number_of(file, number, metric, value))
                steps.append(step_of(file, number, "step", {"step": step}))
            query = "SELECT DISTINCT key FROM metrics WHERE run_uuid = ? LIMIT 1000"
            names = [] if values else [str(name) for (name,) in database.execute(query, (run,))]
    except sqlite3.Error as error:
        late = time.monotonic() > end
        what = f"does not answer within {_QUERY_SECONDS} s" if late else f"is no database of MLflow: {error}"
        raise DataError(f"{file} {what}", "give the folder of a run, or export its metrics as CSV") from None
    if len(values) > _MOST_ROWS:
        raise DataError(f"{file / run} has more than {_MOST_ROWS:,} values of {metric}", "export a part of them as CSV")
    if not values:
        raise unknown(file / run, metric, names)
    return steps, values, False


def _mlflow(folder: Path, metric: str) -> Values:
    """Return the values of MLflow's file store: lines of time, value and step in a file for each metric."""
    file = folder / metric
    if not file.is_file() or folder not in file.parents or ".." in file.parts:
        raise unknown(folder, metric, [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()])
    steps, values = array("q"), array("d")
    with open_to_read(file) as lines:
        for number, line in enumerate(lines_of(file, lines), 1):
            cells = line.decode("utf-8", "replace").split()
            if not line.endswith(b"\n"):
                raise damaged(file, number, CUT)
            if len(cells) != 3:
                raise damaged(file, number, "it is not time, value and step")
            values.append(number_of(file, number, metric, cells[1]))
            steps.append(step_of(file, number, "step", {"step": cells[2]}))
    return steps, values, False


def _run(file: Path, metric: str) -> Values:
    """Return the training loss of a run of mptrain, or a metric of its evaluations, such as ``val_top1``."""
    run = read_run(file.parent)
    end = run.state.attempts[-1].to_step if run.state.attempts else None
    if metric == "loss":
        first: str | None = None
        steps, values = array("q"), array("d")
        for record in run.steps():
            first = first or record.learner
            if record.learner == first:
                steps.append(record.step)
                values.append(record.loss)
    else:
        evaluations: dict[str, dict[int, float]] = {}  # a repeated evaluation replaces the one before
        for number, event in enumerate(run.events(), 1):
            if event["event"] == "evaluation":
                metrics = fields_of(run.paths.events, number, event.get("metrics"), "its metrics are")
                step = step_of(run.paths.events, number, "step", event)
                for name, value in metrics.items():
                    curve = evaluations.setdefault(f"{event.get('split')}_{name}", {})
                    curve[step] = number_of(run.paths.events, number, name, value)
        if metric not in evaluations:
            raise unknown(file.parent, metric, ["loss", *evaluations])
        steps, values = array("q", evaluations[metric]), array("d", evaluations[metric].values())
    if run.state.exit_code == EXIT_NUMERICS and steps and math.isfinite(values[-1]):  # it has failed at all later steps
        steps.append(max(steps[-1] + 1, end or 0))
        values.append(math.nan)
    return steps, values, False


def _files_of(path: Path) -> list[Path]:
    """Return a log's files: the event files of a folder, or all below it; the file itself if it is one."""
    inside = sorted(path.glob("*.tfevents.*")) or sorted(path.rglob("*"))
    return [file for file in inside if not file.is_dir()] if path.is_dir() else [path]


def _digest(file: Path) -> str:
    hasher = hashlib.sha256()
    for part in _files_of(file):
        with open_to_read(part) as content:
            while piece := content.read(1 << 20):
                hasher.update(piece)
    return hasher.hexdigest()
