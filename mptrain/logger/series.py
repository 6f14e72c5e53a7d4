"""Records as the named curves that every tracker shows; the x axis of all of them is the attempted step."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
