"""Arms at the same amount of work: after as many applied updates, and after as many samples.

A skipped update consumes samples without moving the weights, so the two are different questions. Decides nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Literal

from mptrain.comparison.results import Aligned, RunMeasures
from mptrain.comparison.statistics import mean_interval

By = Literal["updates", "samples"]

_BOTH: tuple[By, By] = ("updates", "samples")


def align(pairs: Sequence[tuple[RunMeasures, RunMeasures]], metric: str) -> tuple[Aligned, ...]:
    """An arm and the reference at equal updates and at equal samples.

    Args:
        pairs: Finished runs with the same seed, (of the arm, of the reference).
        metric: Of validation. Where it is not known of all runs at that point, the training loss is taken.

    Returns:
        For updates and for samples, each where there is something to compare.
    """
    own, others = [run for run, _ in pairs], [other for _, other in pairs]
    return tuple(found for by in _BOTH if (found := _at_equal(own, others, metric, by)) is not None)


def align_alone(runs: Sequence[RunMeasures], metric: str) -> tuple[Aligned, ...]:
    """Finished runs of the reference, at the most that all of them reached."""
    return tuple(found for by in _BOTH if (found := _at_equal(runs, [], metric, by)) is not None)


def value_at(run: RunMeasures, quantity: str, at: int, by: By) -> float:
    """What a run had after an amount of work, on the line between the moments before and after it; NaN outside of them."""
    known = [
        (moment.updates if by == "updates" else moment.samples, moment.values[quantity])
        for moment in run.course
        if quantity in moment.values
    ]
    work = [done for done, _ in known]
    above = bisect.bisect(work, at)
    if above and work[above - 1] == at:
        return known[above - 1][1]  # of several moments after as many updates, the last
    if not 0 < above < len(work):
        return math.nan
    share = (at - work[above - 1]) / (work[above] - work[above - 1])
    return (1 - share) * known[above - 1][1] + share * known[above][1]


def _at_equal(own: Sequence[RunMeasures], others: Sequence[RunMeasures], metric: str, by: By) -> Aligned | None:
    runs = (*own, *others)
    if not all(run.course for run in runs) or not runs:
        return None
    at = min(run.course[-1].updates if by == "updates" else run.course[-1].samples for run in runs)
    for quantity in (f"val_{metric}", "train_loss"):
        values = [value_at(run, quantity, at, by) for run in own]
        references = [value_at(run, quantity, at, by) for run in others]
        if at > 0 and all(map(math.isfinite, (*values, *references))):
            difference = [value - reference for value, reference in zip(values, references, strict=bool(others))]
            return Aligned(by, at, quantity, mean_interval(values), mean_interval(difference) if difference else None)
    return None
