"""Conversion of run records for experiment trackers: points of curves, flat names of nested values, tables of texts."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mptrain.system.files import open_to_read
from mptrain.system.records import EpochRecord, EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord

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


#: Fields of a step record without those that say which step it is.
#: Names, counts, and what runs of mptrain do not have.
_NOT_DRAWN = ("learner", "step", "updates", "epoch", "applied_norm")
_OF_A_STEP = tuple(one.name for one in fields(StepRecord) if one.name not in _NOT_DRAWN)
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
