"""Updates that rounding to half precision loses, in words: what a run has on record of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from mptrain.system.records import LostUpdates
from mptrain.system.words import share

#: Names that a sentence lists; the record has more.
_NAMED = 6


def lost_shares(lost: Iterable[LostUpdates]) -> tuple[float, float]:
    """Return the shares of updates that change nothing, by count and by magnitude; NaN where there is none."""
    updates, same, size, lost_size = (sum(column) for column in [*zip(*lost, strict=True)][:4] or [()] * 4)
    return (same / updates if updates else math.nan), (lost_size / size if size else math.nan)


def _no_master_weights(fields: Mapping[str, Any]) -> str:
    rate = f"the peak rates, up to {fields['lr']:g}," if fields.get("several_rates") else f"peak lr {fields['lr']:g}"
    wrapper, is_bf16 = "", fields["dtype"] == "bfloat16"
    if is_bf16:
        wrapper = ", and so does stochastic rounding (mptrain.optimizer.stochastic)"
    keeps = "FP32 weights keep such updates (dtype=torch.float32 at from_pretrained; +2 bytes a weight, +4 for Adam)"
    keeps += wrapper
    if fields.get("run"):
        keeps = f"FP32 master weights keep such updates (precision={'bf16' if is_bf16 else 'fp16_dynamic'})"
        keeps += ", and so does precision=bf16_stochastic" * is_bf16
    return (
        f"weights {fields['dtype']}, no master copy: at {rate} "
        f"{share(fields['stuck'] / fields['elements'])} of {fields['elements']:,} elements cannot move by an update of "
        f"that size. {keeps}"
    )


def _frozen(fields: Mapping[str, Any]) -> str:
    names = list(map(str, fields["parameters"]))
    more = int(fields["count"]) - len(names[:_NAMED])
    return (
        f"no element changed between two looks, although there were gradients: {', '.join(names[:_NAMED])}"
        f"{f' and {more:,} more' if more > 0 else ''}"
    )


def _state_rounding(fields: Mapping[str, Any]) -> str:
    return (
        f"{fields['state']} in {fields['dtype']} cannot fall: {fields['keeps']:g} times any of its values rounds to "
        "that value. The state of FP32 weights is FP32, and can"
    )


#: Function that puts an event about lost updates into words, by its kind.
IN_WORDS: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "no_master_weights": _no_master_weights,
    "frozen": _frozen,
    "state_rounding": _state_rounding,
}


def in_words(kind: str, fields: Mapping[str, Any]) -> str:
    """Return an event of one of the kinds in `IN_WORDS` as a sentence without a full stop, with its learner."""
    learner = fields.get("learner", "main")
    return f"{'' if learner == 'main' else f'{learner}: '}{IN_WORDS[kind](fields)}"
