"""Claim that a comparison of logs is asked about, and the direction of a metric by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from mptrain.system.errors import UsageError

Form = Literal["equivalent", "not inferior", "beats target"]

#: Words in names of metrics, by which a direction is known.
_LOWER = re.compile(
    r"loss|losses|nll|ce|entropy|xent|mse|rmse|mae|mape|errors?|err|perplexity|ppl|nats|bits|bp[bcd]|[wct]er|eer|fid"
)
_HIGHER = re.compile(
    r"acc|accuracy|top\d+|f1|precision|recall|auc|auroc|map|ap|m?iou|dice|psnr|ssim|bleu|rouge|chrf|score|reward|return"
)


@dataclass(frozen=True)
class Question:
    """Claim that a comparison of logs is asked about.

    Attributes:
        metric: Name of the metric in the logs.
        form: ``equivalent`` (to the reference, within the margin), ``not inferior`` (not worse by the margin or more),
            or ``beats target``.
        margin: Equivalence or non-inferiority margin, in the metric's unit, chosen before the runs; 0 for a target.
        target: Number to beat; NaN without.
        at: ``last``, ``step=N``, or ``last=N`` for the mean of the N last values.
        paired: Runs with the same ``{seed}`` in their paths belong together.
        looks: Number of times that the question is asked while runs come in, this one included.
        lower_is_better: Direction of the metric.
        where: Column to value, of the rows of logs that count; empty for all.
        pattern: Regular expression with named groups that reads lines of text; empty for logs of a known format.
    """

    metric: str
    form: Form
    margin: float
    target: float
    at: str
    paired: bool
    looks: int
    lower_is_better: bool
    where: dict[str, str] = field(default_factory=dict)
    pattern: str = ""


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, as a word of its name says; raise UsageError if none does."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    lower, higher = any(map(_LOWER.fullmatch, words)), any(map(_HIGHER.fullmatch, words))
    if lower == higher or {"neg", "negative"} & {*words}:  # scikit-learn's neg_mean_squared_error
        raise UsageError(f"is a lower or a higher {metric} better?", "say it: --better lower, or --better higher")
    return lower
