"""Merges the records that each rank wrote of its own shards in a watched loop with sharded parameters (FSDP2).

Nothing is communicated while a loop trains, so that no rank waits for another; what the ranks know is put together when
it is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mptrain.numerics.exponents import merged, total
from mptrain.system.records import MAX_TENSORS, HistogramRecord, StepRecord

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
                place = event["event"], event.get("step"), event.get("learner")
                seen[place] += 1  # passes of one step
                overflows.setdefault((*place, seen[place]), []).append(event)
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
                name: merged(counts for one in same if (counts := one.tensors.get(kind, {}).get(name)))
                for name in named
            }
            for kind, named in same[0].tensors.items()
        }
        unchanged = {name: _sum(one.unchanged.get(name, (0, 0)) for one in same) for name in same[0].unchanged}
        names = dict.fromkeys(name for one in same for name in one.sampled)
        sampled = {name: sum(_looked_at(one, name) for one in same) for name in names}
        overflow = any(one.overflow for one in same)
        yield replace(same[0], overflow=overflow, tensors=tensors, unchanged=unchanged, sampled=sampled)


def _looked_at(record: HistogramRecord, name: str) -> int:
    """Return the number of elements of a parameter whose updates were looked at."""
    weight = record.tensors.get("weights", {}).get(name)
    return record.sampled.get(name, total(weight) if weight else 0)


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    moving, lost = zip(*pairs, strict=True)
    return sum(moving), sum(lost)


def _same_steps(ranks: Sequence[Iterable[_Record]]) -> Iterator[list[_Record]]:
    """Yield the records of all ranks for each learner and step, which ranks may have written in different orders."""
    others = [{(one.learner, one.step): one for one in records} for records in ranks[1:]]
    for first in ranks[0]:
        key = first.learner, first.step
        if all(key in one for one in others):
            yield [first, *(one[key] for one in others)]


def _merged_overflow(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the overflow of a step with the parameters of all ranks; the boundary is left empty if they disagree."""
    kinds: dict[str, str] = {}
    for event in same:
        for name, kind in event.get("tensors", ()):
            kinds[name] = "nan" if "nan" in (kind, kinds.get(name)) else kind
    found = [event for event in same if event.get("count")]
    worst = next((event for event in same if event.get("phase") == "unexpected"), same[0])
    boundaries = {tuple(event.get("boundary", ())) for event in found}
    return {
        **{name: value for name, value in worst.items() if name != "rank"},
        "tensors": [[name, kinds[name]] for name in _in_one_order(same)[:MAX_TENSORS]],
        "count": max([len(kinds), *(event["count"] for event in found)]),
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
