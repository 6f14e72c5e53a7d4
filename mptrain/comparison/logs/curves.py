"""Curves of a metric over training steps, read from the logs of frameworks and trackers.

Each format is read by its own rules into steps and values; nothing is smoothed, interpolated or left out silently.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import re
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import DataError, EnvironmentRefused, suggest
from mptrain.system.files import open_to_read, read_bytes

#: Names of the column with the training step, in the order in which they are looked for.
STEPS = ("step", "global_step", "trainer/global_step", "Step", "iteration", "Iteration", "iter", "_step")

#: Most bytes of a line; more is no log.
_LONGEST = 1 << 20

_CUT = "no line break ends it, so that its last number may be cut off"


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


Row = tuple[int, Mapping[str, Any]]  # its line in the file, and its fields


def read_curve(path: Path, metric: str) -> Curve:
    """Read a metric from a log.

    Logs are files in CSV or JSON lines, event files of TensorBoard, ``trainer_state.json`` of transformers, and folders
    of Lightning's CSVLogger, of TensorBoard, of transformers, of offline runs of Weights & Biases, of MLflow's file
    store, and of runs of mptrain. A run in a database of MLflow is named as if that were a folder: ``mlflow.db/RUN``.

    Raises:
        DataError: The log is of another kind, is damaged, has no value of the metric, or is a chart's export.
        EnvironmentRefused: A library that reads the format is not installed.
        StorageError: It cannot be read.
    """
    form, file, read = _format_of(path)
    with storage_errors(file, "read"):
        digest = _digest(file)  # first, because it opens no pipe or device, for which libraries would wait
        steps, values, counted = read(file, metric)
    if not values:
        raise DataError(f"{path} has no value of {metric}", "choose another with --metric NAME")
    numbers, found = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    given_up = 0
    if np.any(numbers[1:] <= numbers[:-1]):
        if numbers[-1] < (highest := numbers.max()):
            raise DataError(
                f"{path} ends at step {numbers[-1]:,}, after it had reached {highest:,}",
                "sort its rows by step, or delete those that a resumed run has not repeated",
            )
        later = np.minimum.accumulate(numbers[::-1])[::-1][1:]  # the lowest step after each value
        kept = np.append(numbers[:-1] < later, True)
        numbers, found, given_up = numbers[kept], found[kept], int(np.sum(~kept))
    if file == path.parent:  # a database of several runs
        digest = hashlib.sha256(f"{digest}/{path.name}".encode()).hexdigest()
    return Curve(str(path), form, numbers, found, given_up, counted, digest)


_Values = tuple[Sequence[int], Sequence[float], bool]


def _format_of(path: Path) -> tuple[str, Path, Callable[[Path, str], _Values]]:
    """Return name, file and reader of a log's format."""
    if path.is_dir():
        return _format_of_folder(path)
    if path.parent.suffix == ".db" and path.parent.is_file():
        return "MLflow", path.parent, lambda file, metric: _database(file, metric, path.name)
    if not path.exists():
        raise DataError(f"there is no {path}", "give the path of a log")
    name = path.name
    if ".tfevents." in name:
        return "TensorBoard", path, _tensorboard
    if name.endswith(".wandb"):
        return "Weights & Biases", path, _wandb
    if name.endswith((".csv", ".tsv")):
        return "CSV", path, _csv
    if name.endswith((".jsonl", ".ndjson")):
        return "JSONL", path, lambda file, metric: _from_rows(file, _json_lines(file), metric)
    if name.endswith(".json"):
        return "JSON", path, lambda file, metric: _from_rows(file, _json_list(file), metric)
    raise DataError(
        f"{path} is no log that can be read", "give CSV, JSONL, event files of TensorBoard, or a run's folder"
    )


def _format_of_folder(path: Path) -> tuple[str, Path, Callable[[Path, str], _Values]]:
    if (path / "run.json").exists():
        return "mptrain", RunPaths(path).steps if RunPaths(path).steps.exists() else path / "run.json", _run
    if (path / "metrics.csv").exists():
        return "Lightning CSVLogger", *_format_of(path / "metrics.csv")[1:]
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda one: _step_of(one.parent))
    states += [one for one in [path / "trainer_state.json"] if one.exists()]
    if states:
        return "transformers", *_format_of(states[-1])[1:]
    if [*path.glob("*.tfevents.*")]:  # several, in order, if the run was resumed
        return "TensorBoard", path, _tensorboard
    if (path / "metrics").is_dir():
        return "MLflow", path / "metrics", _mlflow
    if found := [*path.glob("*.wandb")]:
        return "Weights & Biases", found[0], _wandb
    raise DataError(f"{path} has no log that can be read", "give the log itself, or the folder of one run: 'DIR/*'")


def _step_of(checkpoint: Path) -> int:
    step = checkpoint.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def _csv(file: Path, metric: str) -> _Values:
    steps, values = array("q"), array("d")
    with io.TextIOWrapper(open_to_read(file), encoding="utf-8-sig", errors="replace", newline="") as text:
        rows = csv.reader(text, delimiter="\t" if file.suffix == ".tsv" else ",")
        try:
            head = [name.strip() for name in next((row for row in rows if "".join(row).strip()), [])]
            if any("\0" in name for name in head):
                raise DataError(f"{file} is not UTF-8", "save it as UTF-8")
            if len(head) == 1 and (found := re.search(r"[;\t]", head[0])):
                marks = {";": "semicolons", "\t": "tabs"}
                raise DataError(f"{file} is separated by {marks[found[0]]}", "write commas (.csv) or tabs (.tsv)")
            _refuse_charts(file, head, metric)
            if metric not in head:
                raise _unknown(file, metric, head)
            if head.count(metric) > 1:
                raise DataError(f"{file} has {head.count(metric)} columns {metric!r}", "rename all but one")
            column = next((name for name in STEPS if name in head), "")
            at, step_at, width = head.index(metric), head.index(column) if column else -1, len(head)
            for cells in rows:
                if len(cells) != width:
                    if not cells:
                        continue
                    raise _damaged(file, rows.line_num, f"it has {len(cells)} cells; the header has {width}")
                if not cells[at]:
                    continue
                values.append(_number(file, rows.line_num, metric, cells[at]))
                step = cells[step_at] if column else ""
                if step.isdecimal() and len(step) < 19:  # as nearly all are
                    steps.append(int(step))
                else:
                    steps.append(_step(file, rows.line_num, column, {column: step}) if column else len(values))
        except csv.Error as error:
            raise _damaged(file, rows.line_num, str(error)) from None
        if max(at, step_at) == width - 1 and values and not _ends_a_line(text.buffer):
            raise _damaged(file, rows.line_num, _CUT)
    return steps, values, not column


def _ends_a_line(file: IO[bytes]) -> bool:
    file.seek(-1, io.SEEK_END)
    return file.read(1) in b"\r\n"


def _refuse_charts(file: Path, head: Sequence[str], metric: str) -> None:
    """Raise DataError for the CSV of a chart of Weights & Biases, whose values are sampled, averaged or smoothed."""
    if any(name.endswith(("__MIN", "__MAX")) for name in head):
        raise DataError(
            f"{file} is a chart's export: its values of {metric} may be averaged over steps or smoothed",
            "export the run's own history (wandb: run.scan_history())",
        )


def _json_lines(file: Path) -> Iterator[Row]:
    with open_to_read(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if not line.endswith(b"\n") and len(line) > _LONGEST:
                raise _damaged(file, number, "it is too long")
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return  # the process was killed while it wrote
                raise _damaged(file, number, "it is not JSON") from None
            yield number, _object(file, number, fields)


def _json_list(file: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list, or the ``log_history`` of transformers."""
    try:
        found = json.loads(read_bytes(file))
    except (ValueError, RecursionError):
        raise DataError(f"{file} is not JSON", "JSON lines are read from a file named .jsonl") from None
    rows = found.get("log_history") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise DataError(f"{file} has no list of rows", "give a list of objects, or transformers' trainer_state.json")
    for number, fields in enumerate(rows, 1):
        yield number, _object(file, number, fields)


def _object(file: Path, number: int, fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, dict):
        raise _damaged(file, number, "it is no object with names and values")
    return fields


def _from_rows(file: Path, rows: Iterable[Row], metric: str) -> _Values:
    """Return the values of a metric in rows that may lack it."""
    steps, values, names, column = array("q"), array("d"), dict[str, None](), None
    for number, fields in rows:
        if metric not in fields:
            names.update(dict.fromkeys(fields))
            continue
        value = fields[metric]
        if value is None or value == "":
            continue
        if column is None:
            column = next((name for name in STEPS if name in fields), "")
        values.append(_number(file, number, metric, value))
        steps.append(_step(file, number, column, fields) if column else len(values))
    if not values and names:
        raise _unknown(file, metric, [*names])
    return steps, values, column == ""


def _number(file: Path, number: int, name: str, value: Any) -> float:
    try:
        if isinstance(value, bool) or "_" in str(value):  # Python's own spelling of large numbers
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _damaged(file, number, f"{name} is {value!r}, not a number") from None


def _step(file: Path, number: int, column: str, fields: Mapping[str, Any]) -> int:
    value = fields.get(column)
    step = math.nan if value in (None, "") else _number(file, number, column, value)
    if not (math.isfinite(step) and step == int(step) and abs(step) < 2**62):
        raise _damaged(file, number, f"{column} is {value!r}, not a whole number")
    return int(step)


def _tensorboard(file: Path, metric: str) -> _Values:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise EnvironmentRefused(
            f"{file} needs tensorboard, which is not installed", "pip install 'mptrain[tensorboard]'"
        ) from None
    found = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
    found.Reload()
    if metric in found.scalars.Keys():
        events = found.Scalars(metric)
        return [one.step for one in events], [one.value for one in events], False
    if metric in found.tensors.Keys():  # as Keras writes scalars
        from tensorboard.util.tensor_util import make_ndarray

        tensors = found.Tensors(metric)
        return [one.step for one in tensors], [float(make_ndarray(one.tensor_proto)) for one in tensors], False
    raise _unknown(file, metric, [*found.scalars.Keys(), *found.tensors.Keys()])


def _wandb(file: Path, metric: str) -> _Values:
    """Return the history of an offline run of Weights & Biases: protocol buffers in the records of a LevelDB log."""
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        why = f"{file} needs wandb, which is not installed"
        raise EnvironmentRefused(why, "pip install 'mptrain[wandb]'") from None

    def rows() -> Iterator[Row]:
        for number, content in enumerate(_leveldb_records(file), 1):
            record = wandb_internal_pb2.Record()
            try:
                record.ParseFromString(content)
                if record.WhichOneof("record_type") != "history":
                    continue
                items = record.history.item
                told = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items}
            except (DecodeError, ValueError):
                raise DataError(f"{file}, record {number} is damaged", "copy the run's folder again") from None
            yield number, {"_step": record.history.step.num, **told}

    return _from_rows(file, rows(), metric)


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


def _database(file: Path, metric: str, run: str) -> _Values:
    """Return the values of a run in a SQLite database of MLflow."""
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro", uri=True)) as database:
        try:
            rows = database.execute(
                "SELECT step, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics WHERE run_uuid = ? AND key = ? "
                "ORDER BY timestamp",
                (run, metric),
            ).fetchall()
            names = [
                name for (name,) in database.execute("SELECT DISTINCT key FROM metrics WHERE run_uuid = ?", (run,))
            ]
        except sqlite3.DatabaseError as error:
            raise DataError(f"{file} is no database of MLflow: {error}", "give the folder of a run") from None
    if not rows:
        raise _unknown(file / run, metric, names)
    return [step for step, _ in rows], [math.nan if value is None else value for _, value in rows], False


def _mlflow(folder: Path, metric: str) -> _Values:
    """Return the values of MLflow's file store: lines of time, value and step in a file for each metric."""
    file = folder / metric
    if not file.is_file() or folder not in file.parents or ".." in file.parts:
        raise _unknown(folder, metric, [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()])
    steps, values = array("q"), array("d")
    for number, line in enumerate(read_bytes(file).decode("utf-8", "replace").splitlines(keepends=True), 1):
        cells = line.split()
        if not line.endswith("\n"):
            raise _damaged(file, number, _CUT)
        if len(cells) != 3:
            raise _damaged(file, number, "it is not time, value and step")
        values.append(_number(file, number, metric, cells[1]))
        steps.append(_step(file, number, "step", {"step": cells[2]}))
    return steps, values, False


def _run(file: Path, metric: str) -> _Values:
    """Return the training loss of a run of mptrain, or a metric of its evaluations, such as ``val_top1``."""
    run = read_run(file.parent)
    if metric == "loss":
        first: str | None = None
        steps, values = array("q"), array("d")
        for record in run.steps():
            first = first or record.learner
            if record.learner == first:
                steps.append(record.step)
                values.append(record.loss)
        return steps, values, False
    told: dict[str, list[tuple[int, float]]] = {}
    for event in run.events():
        if event["event"] == "evaluation":
            for name, value in event["metrics"].items():
                told.setdefault(f"{event['split']}_{name}", []).append((event["step"], float(value)))
    if metric not in told:
        raise _unknown(file.parent, metric, ["loss", *told])
    return [step for step, _ in told[metric]], [value for _, value in told[metric]], False


def _digest(file: Path) -> str:
    found = hashlib.sha256()
    inside = sorted(file.glob("*.tfevents.*")) or sorted(file.rglob("*"))
    for one in [one for one in inside if one.is_file()] if file.is_dir() else [file]:
        with open_to_read(one) as content:
            while piece := content.read(1 << 20):
                found.update(piece)
    return found.hexdigest()


def _unknown(file: Path, metric: str, names: Sequence[str]) -> DataError:
    known = [name for name in dict.fromkeys(names) if name not in STEPS]
    return DataError(
        f"{file} has no {metric}", suggest(metric, known, f"it has {', '.join(known[:20]) or 'no metric'}")
    )


def _damaged(file: Path, number: int, why: str) -> DataError:
    unit = {".json": "entry", ".wandb": "record"}.get(file.suffix, "line")
    return DataError(f"{file}, {unit} {number}: {why}", f"correct the {unit}, or export the log again")
