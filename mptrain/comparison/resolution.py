"""How finely a metric is resolved: a share of N samples changes in steps of 1 / N.

What follows for intervals is the business of `mptrain.comparison.statistics`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mptrain.comparison.results import RunMeasures

_SHARE = re.compile(r"top\d+|accuracy|exact_match")


def is_share(metric: str) -> bool:
    """Whether a metric of that name counts samples, and more of them are better."""
    return bool(_SHARE.search(metric))


def step_of(metric: str, runs: Iterable[RunMeasures]) -> float:
    """The smallest amount by which a metric can change: one sample of the split that it is of.

    Args:
        metric: Its name.
        runs: That have it; the one with the fewest samples counts.

    Returns:
        0 where the metric is no share of samples (a loss), or how many there are is not on record.
    """
    sizes = [run.samples for run in runs if run.samples and run.term == "samples"]
    return 1 / min(sizes) if sizes and is_share(metric) else 0.0
