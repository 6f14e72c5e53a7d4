"""``summary.json`` of a run directory: the final numbers of a training run; and which way its metrics are better."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from mptrain.runlog.atomic_files import readable_bytes, write_atomically
from mptrain.runlog.strict_json import indented_json, read_object, restore_nonfinite
from mptrain.system.errors import StorageError, UsageError
from mptrain.system.fields import NonNegativeInt
from mptrain.system.validation import build

SCHEMA = 2


class _Learner(TypedDict, total=False):
    updates: NonNegativeInt
    skipped: NonNegativeInt
    skip_rate: float
    overflows: dict[str, NonNegativeInt]
    scale: dict[str, float]


class _Summary(TypedDict, total=False):
    """Types of the fields that reports and comparisons read, where they are present. Other fields are not checked."""

    metric: float | None
    metric_name: str | None
    metric_split: str
    higher_is_better: bool | None
    best_val: float | None
    intervals: dict[str, tuple[float, float] | None] | None
    val_intervals: dict[str, tuple[float, float] | None] | None
    val: dict[str, float | None] | None
    test: dict[str, float | None] | None
    stopped_early: str | None
    steps: NonNegativeInt
    planned_steps: NonNegativeInt | None
    steady_steps: NonNegativeInt | None
    samples: NonNegativeInt | None
    learners: dict[str, _Learner]
    term: str
    terms_per_second: float | None
    steady_terms_per_second: float | None
    train_seconds: float | None
    data_wait: float | None
    energy_joules: float | None
    memory_before: NonNegativeInt | None
    peak_memory: NonNegativeInt | None
    memory_by_use: dict[str, NonNegativeInt] | None
    threads: NonNegativeInt | None
    unusable_samples: dict[str, NonNegativeInt] | None
    converted_files: dict[str, NonNegativeInt] | None
    facts: dict[str, Any] | None


def memory_in_words(by_use: Mapping[str, int]) -> str:
    """Return the counted memory of a training step in words, the sum first; empty if it was not counted."""
    if not by_use:
        return ""
    uses = [f"{readable_bytes(size)} {use.replace('_', ' ')}" for use, size in by_use.items() if size]
    later = "" if "optimizer_state" in by_use else "; without the optimizer's state, which it makes in its first update"
    return f"{readable_bytes(sum(by_use.values()))}: {', '.join(uses)}{later}"


def write_summary(path: Path, numbers: Mapping[str, Any]) -> None:
    """Write the final numbers of a run (metrics, counts of updates, times) atomically, as indented strict JSON.

    Non-finite numbers are read back unchanged. Raise ValueError if ``schema`` or ``nonfinite`` is among the names.
    """
    if reserved := {"schema", "nonfinite"} & set(numbers):
        raise ValueError(f"a summary must not contain {sorted(reserved)}")
    write_atomically(path, indented_json({"schema": SCHEMA, **numbers}))


def read_summary(path: Path) -> dict[str, Any]:
    """Read the final numbers of a run, by name and without the schema number; empty if they are not yet written.

    Fields that reports and comparisons use are checked. Raise OtherVersion if another version wrote the file.
    """
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        return {}
    del fields["schema"]
    try:
        numbers = restore_nonfinite(fields)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged: its list of non-finite numbers is invalid", "restore it from a copy"
        ) from error
    try:
        build(_Summary, numbers, lenient=True)
    except ValueError as error:
        raise StorageError(f"{path} is damaged: {error}", "restore it from a copy") from error
    return numbers


#: Words in names of metrics, by which a direction is known.
_LOWER = re.compile(
    r"loss|losses|nll|ce|entropy|xent|mse|rmse|mae|mape|errors?|err|perplexity|ppl|nats|bits|bp[bcd]|[wct]er|eer|fid"
)
_HIGHER = re.compile(
    r"acc|accuracy|top\d+|f1|precision|recall|auc|auroc|map|ap|m?iou|dice|psnr|ssim|bleu|rouge|chrf|score|reward|return"
)


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, as a word of its name says; raise UsageError if none does."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    lower, higher = any(map(_LOWER.fullmatch, words)), any(map(_HIGHER.fullmatch, words))
    if lower == higher or {"neg", "negative"} & {*words}:  # scikit-learn's neg_mean_squared_error
        raise UsageError(f"is a lower or a higher {metric} better?", "say it: --better lower, or --better higher")
    return lower
