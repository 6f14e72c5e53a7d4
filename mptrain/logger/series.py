"""Content that every tracker shows: records as named curves, over the attempted step, and tables of the texts that a run exhibits."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mptrain.records import EpochRecord, EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord

#: The learner of a run that has only one; its curves are named without it.
ONLY = "main"


def points(record: Record, every_steps: int = 1) -> dict[str, float]:
    """The values that a record adds to curves at its step, by the name of the curve; empty where it adds none.

    Names are ``train/loss``, ``train/NAME/loss`` with several learners, ``val/top1``, ``epoch/train_loss``,
    ``system/memory_bytes``; ``overflow/PHASE`` is the number of parameters whose gradients were not finite.

    Args:
        record: Any.
        every_steps: Steps whose number is not a multiple add no value, unless they overflowed.
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
    """The leaves of nested mappings under dotted names: numbers, true and false and text as they are, others as JSON."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= {f"{name}.{below}": leaf for below, leaf in flat(value).items()}
        else:
            leaves[str(name)] = value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
    return leaves


def numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the leaves of nested mappings, under dotted names."""
    return {
        name: float(value)
        for name, value in flat(tree).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


_OF_A_STEP = ("loss", "loss_scale", "grad_norm", "lr", "overflow", "skipped")
_OF_AN_EPOCH = ("epoch", "updates", "skipped", "train_loss", "seconds", "terms_per_second")


def _named(section: str, learner: str, values: Mapping[str, float]) -> dict[str, float]:
    prefix = section if learner == ONLY else f"{section}/{learner}"
    return {f"{prefix}/{name}": value for name, value in values.items()}


def read_table(path: Path) -> list[list[str]]:
    """The rows of a TSV file; the first names the columns.

    A run does not end because its tracker cannot be shown a text: of a table without rows, or with a text longer than Python's
    reader of tables takes (131,072 letters), one row says so. Bytes that are no UTF-8 are replaced.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = list(csv.reader(file, dialect="excel-tab"))
    except csv.Error as error:
        return [["table"], [f"{path.name} cannot be shown: {error}"]]
    return rows or [["table"], [f"{path.name} is empty"]]


def markdown_table(path: Path) -> str:
    """A TSV file as a table of Markdown, in which every text stays what it is."""
    columns, *rows = [[_cell(text) for text in row] for row in read_table(path)]
    return "\n".join(_row(cells) for cells in (columns, ["---"] * len(columns), *rows))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    special = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|<>"})
    return " ".join(text.split()).translate(special)
