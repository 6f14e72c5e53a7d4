"""Rows of logs: CSV, JSON lines, and lines of text that a pattern reads, as a metric's steps and values.

A row has one value of the metric. Rows of training and validation, of ranks or of micro-batches under one name are no
curve: the columns that tell them apart are named, and ``where`` chooses one of them.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import reprlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, AnyStr

from mptrain.system.errors import DataError, UsageError, suggest
from mptrain.system.files import open_to_read
from mptrain.system.words import listed

#: Names of the column with the training step, in the order in which they are looked for.
STEPS = (
    *("step", "global_step", "trainer/global_step", "train/global_step", "Step", "iteration", "Iteration", "iter"),
    "_step",
)

#: Columns of long tables that name the metric of a row, whose value is in a column ``value``.
_NAMES = ("metric", "name", "key", "variable", "tag")

#: Columns that tell rows of one name apart, even if no two of them share a step.
_TELLS = re.compile(
    r"split|subset|partition|phase|stage|mode|set|data_?set|kind|type|((local|global|world)_?)?rank|process(_index)?|micro_?(batch|step)(_idx)?"
)

#: Most bytes of a line, and of a JSON file, which is read whole; more is no log.
_LONGEST, _LARGEST = 1 << 20, 1 << 30

CUT = "no line break ends it, so that its last number may be cut off"

Row = tuple[int, Mapping[str, Any]]  # its line in the file, and its fields
Values = tuple[Sequence[int], Sequence[float], bool]  # steps, values, and whether the values are counted


def csv_rows(file: Path, metric: str) -> Iterator[Row]:
    """Yield the rows of a CSV, or of a TSV; a header that a restart has repeated is none."""
    with io.TextIOWrapper(open_to_read(file), encoding="utf-8-sig", errors="replace", newline="") as text:
        rows = csv.reader(lines_of(file, text), delimiter="\t" if file.suffix == ".tsv" else ",")
        try:
            first = next((row for row in rows if "".join(row).strip()), [])
            head = [name.strip() for name in first]
            if any("\0" in name for name in head):
                raise DataError(f"{file} is not UTF-8", "save it as UTF-8")
            if len(head) == 1 and (mark := re.search(r"[;\t]", head[0])):
                marks = {";": "semicolons", "\t": "tabs"}
                raise DataError(f"{file} is separated by {marks[mark[0]]}", "write commas (.csv) or tabs (.tsv)")
            _refuse_charts(file, head, metric)
            if metric not in head and not _name_column(head):
                raise unknown(file, metric, head)
            if head.count(metric) > 1:
                raise DataError(f"{file} has {head.count(metric)} columns {metric!r}", "rename all but one")
            any_row = False
            for cells in rows:
                if not cells or cells == first:
                    continue
                if len(cells) != len(head):
                    raise damaged(file, rows.line_num, f"it has {len(cells)} cells; the header has {len(head)}")
                any_row = True
                yield rows.line_num, dict(zip(head, cells, strict=True))
        except csv.Error as error:
            raise damaged(file, rows.line_num, str(error)) from None
        last = head[-1] if head else ""
        if any_row and last in (metric, "value", step_column(head)) and not _ends_a_line(text.buffer):
            raise damaged(file, rows.line_num, CUT)


def lines_of(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of an open log; raise DataError for one of more than a mebibyte."""
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST + 1), file.read(0)), 1):
        if len(line) > _LONGEST:
            raise damaged(path, number, "it is too long")
        yield line


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


def json_lines(file: Path) -> Iterator[Row]:
    """Yield the rows of JSON lines; a last line that a killed process left unfinished is none."""
    with open_to_read(file) as lines:
        for number, line in enumerate(lines_of(file, lines), 1):
            if not line.strip():
                continue
            try:
                row = _flat(fields_of(file, number, json.loads(line)))
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return  # the process was killed while it wrote
                raise damaged(file, number, "it is not JSON") from None
            yield number, row


def json_list(file: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list, or the ``log_history`` of transformers."""
    with open_to_read(file) as content:
        if os.fstat(content.fileno()).st_size > _LARGEST:
            raise DataError(f"{file} has more than {_LARGEST:,} bytes", "give JSON lines, in a file named .jsonl")
        text = content.read()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{file} is not JSON", "JSON lines are read from a file named .jsonl") from None
    rows = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise DataError(f"{file} has no list of rows", "give a list of objects, or transformers' trainer_state.json")
    for number, fields in enumerate(rows, 1):
        try:
            row = _flat(fields_of(file, number, fields))
        except RecursionError:
            raise damaged(file, number, "it is nested too deeply") from None
        yield number, row


def fields_of(file: Path, number: int, fields: Any, what: str = "it is") -> Mapping[str, Any]:
    """Return the fields of an entry of a log; raise DataError if it has none."""
    if not isinstance(fields, dict):
        raise damaged(file, number, f"{what} no object with names and values")
    return fields


def _flat(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of objects inside an object by their path: ``train/loss``."""
    if not any(type(value) is dict for value in fields.values()):
        return fields
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        inside = _flat(value) if isinstance(value, dict) and value else None
        flat |= {name: value} if inside is None else {f"{name}/{key}": deeper for key, deeper in inside.items()}
    return flat


def compiled(pattern: str, metric: str) -> re.Pattern[str]:
    """Return a pattern of lines; raise UsageError if it is none, or has no group that is named as the metric."""
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(
            f"--pattern {pattern}: {error}", "write a regular expression, as Python's re takes it"
        ) from None
    if metric not in expression.groupindex:
        hint = f"name the numbers: --pattern 'iter (?P<step>\\d+): loss (?P<{metric}>\\S+)'"
        raise UsageError(f"--pattern {pattern}: no group is named {metric}", hint)
    return expression


def text_rows(file: Path, pattern: re.Pattern[str]) -> Iterator[Row]:
    """Yield the named groups of a pattern in each line of a text in which it is found."""
    first, any_row = "", False
    with open_to_read(file) as lines:
        for number, line in enumerate(lines_of(file, lines), 1):
            text = line.decode("utf-8", "replace")
            first = first or text.strip()[:100]
            if match := pattern.search(text):
                if not line.endswith((b"\n", b"\r")):
                    raise damaged(file, number, CUT)
                any_row = True
                yield number, {name: value for name, value in match.groupdict().items() if value is not None}
    if not any_row:
        raise DataError(f"the pattern is in no line of {file}", f"its first line is: {first}")


def step_column(names: Iterable[str]) -> str:
    """Return the column of the training step; empty if there is none."""
    return next((name for name in STEPS if name in names), "")


def _name_column(names: Iterable[str]) -> str:
    """Return the column of a long table that names the metric of a row; empty if it is no such table."""
    return next((name for name in _NAMES if name in names), "") if "value" in names else ""


def values_of(
    file: Path, rows: Callable[[], Iterable[Row]], metric: str, where: Mapping[str, str] | None = None
) -> Values:
    """Return the values of a metric in rows that may lack it, and in which columns have the values of ``where``.

    ``rows`` begins anew at each call. Raise DataError if the rows that are left are those of several curves.
    """
    steps, values, names, column = array("q"), array("d"), dict[str, None](), None
    tells: dict[str, dict[str, None]] = {}
    for number, fields in _chosen(file, rows(), metric, where or {}, names):
        value = fields[metric]
        if column is None:
            column = step_column(fields)
            tells = {name: {} for name in fields if _TELLS.fullmatch(name.lower())}
        for name, seen in tells.items():
            seen[str(fields.get(name))] = None
        values.append(number_of(file, number, metric, value))
        steps.append(step_of(file, number, column, fields) if column else len(values))
    if not values and names:
        raise unknown(file, metric, [*names])
    apart = {name: [*seen] for name, seen in tells.items() if len(seen) > 1}
    if not apart and any(step <= before for before, step in itertools.pairwise(steps)):
        kept = (fields for _, fields in _chosen(file, rows(), metric, where or {}, {}))
        apart = _telling_apart(steps, kept, {metric, column or "", "value"})
    if apart:
        name, choices = next(iter(apart.items()))
        chosen = next((choice for choice in choices if "val" in choice.lower()), choices[0])
        what = f"rows of {metric} are told apart by {listed([*apart], 3)} ({listed(choices, 4)})"
        raise DataError(f"{file}: {what}, and no one curve", f"choose one, such as --where {name}={chosen}")
    return steps, values, column == ""


def _chosen(
    file: Path, rows: Iterable[Row], metric: str, where: Mapping[str, str], names: dict[str, None]
) -> Iterator[Row]:
    """Yield the rows with a value of the metric that ``where`` chooses; ``names`` gets the metrics of the others."""
    seen: dict[str, dict[str, None]] = {name: {} for name in where}
    any_chosen = not where
    for number, row in rows:
        fields = row
        if metric not in fields and (name := _name_column(fields)):
            fields = {key: value for key, value in fields.items() if key != name} | {str(row[name]): row["value"]}
        if metric not in fields:
            names.update(dict.fromkeys(fields))
            continue
        if fields[metric] is None or fields[metric] == "":
            continue
        if all(_equals(fields.get(name), wanted) for name, wanted in where.items()):
            any_chosen = True
            yield number, fields
        for name in where:
            seen[name][str(fields.get(name))] = None
    if not any_chosen and any(seen.values()):
        has = "; ".join(f"{name} is {listed([*some], 5)}" for name, some in seen.items())
        asked = ", ".join(f"{name}={wanted}" for name, wanted in where.items())
        raise DataError(f"no row of {file} with {metric} has {asked}", f"there, {has}")


def _equals(value: Any, wanted: str) -> bool:
    if str(value).strip() == wanted or (isinstance(value, bool) and str(value).lower() == wanted):
        return True
    try:
        return float(value) == float(wanted)
    except (TypeError, ValueError):
        return False


def _telling_apart(steps: Sequence[int], rows: Iterable[Mapping[str, Any]], own: set[str]) -> dict[str, list[str]]:
    """Return the columns, with their values, that differ in all rows of a step, and are the same few at each step.

    Only text and whole numbers tell rows apart: a time or a loss differs too after a resume, but not in this way.
    """
    columns: dict[str, list[str]] = {}
    for at, fields in enumerate(rows):
        for name, value in fields.items():
            if name not in own and not isinstance(value, float) and len(columns.get(name, ())) == at:
                columns.setdefault(name, []).append(str(value))
    by_step: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        by_step.setdefault(step, []).append(at)
    shared = [some for some in by_step.values() if len(some) > 1]
    most = max(map(len, shared), default=0)

    def tells(values: Sequence[str]) -> bool:
        groups = [{values[at] for at in some} for some in shared]
        few = 2 * len({*values}) <= len(values) and len(set().union(*groups)) == most
        return few and all(len(group) == len(some) for group, some in zip(groups, shared, strict=True))

    return {name: [*dict.fromkeys(some)] for name, some in columns.items() if len(some) == len(steps) and tells(some)}


def number_of(file: Path, number: int, name: str, value: Any) -> float:
    """Return a number of a row; raise DataError if it is none."""
    try:
        if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # Python's spelling of large numbers
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise damaged(file, number, f"{name} is {reprlib.repr(value)}, not a number") from None


def step_of(file: Path, number: int, column: str, fields: Mapping[str, Any]) -> int:
    """Return the training step of a row; raise DataError if it is no whole number."""
    value = fields.get(column)
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:  # as nearly all are
        return int(value)
    step = math.nan if value in (None, "") else number_of(file, number, column, value)
    if not (math.isfinite(step) and step == int(step) and abs(step) < 2**62):
        raise damaged(file, number, f"{column} is {reprlib.repr(value)}, not a whole number")
    return int(step)


def unknown(file: Path, metric: str, names: Sequence[str]) -> DataError:
    """Return the error of a log without a metric, with the names of those that it has."""
    known = [name for name in dict.fromkeys(names) if name not in STEPS]
    return DataError(
        f"{file} has no {metric}", suggest(metric, known, f"it has {', '.join(known[:20]) or 'no metric'}")
    )


def damaged(file: Path, number: int, why: str) -> DataError:
    """Return the error of a line, entry or record of a log."""
    unit = {".json": "entry", ".wandb": "record", ".db": "row"}.get(file.suffix, "line")
    unit = "record" if ".tfevents." in file.name else unit
    return DataError(f"{file}, {unit} {number}: {why}", f"correct the {unit}, or export the log again")
