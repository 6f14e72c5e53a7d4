"""Claim that a comparison of logs is asked about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Form = Literal["equivalent", "not inferior", "beats target"]


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
