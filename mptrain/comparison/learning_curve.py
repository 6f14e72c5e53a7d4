"""The course of a run over its steps, arms at the same amount of work, and the question whether runs had settled.

A course is the run's validations, and where they are too few, its training loss. Arms are compared after as many applied
updates, and after as many samples: a skipped update consumes samples without moving the weights, so the two are different
questions. Runs that had not settled, or learned nothing, are to be minded, since arms that stand at the beginning agree as
well. Decides nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from mptrain.comparison.results import Aligned, Arm, CurvePoint, RunMeasures
from mptrain.comparison.statistics import mean_interval
from mptrain.runlog.run_reader import Run

#: Windows over which a training loss is averaged, and the fewest steps of one.
_WINDOWS, _FEWEST = 50, 10


def learning_curve(run: Run, steps: int, samples_per_step: float) -> tuple[CurvePoint, ...]:
    """The moments of a run about which something is known, in order.

    Args:
        run: Open. Its steps are read, as a stream, only if there are fewer than two validations, between which nothing
            could be interpolated.
        steps: How many steps it attempted.
        samples_per_step: Mean over the run.

    Raises:
        StorageError: A record is damaged.
    """
    validations = list(_validations(run, samples_per_step))
    losses = list(_losses(run, steps, samples_per_step)) if len(validations) < 2 else []
    return tuple(sorted((*validations, *losses), key=lambda moment: moment.step))


def _validations(run: Run, samples_per_step: float) -> Iterator[CurvePoint]:
    """One moment for each validation; the learners of one are in rows of their own."""
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for record in run.epochs():
        before, _ = found.get(record.step, (record.updates, {}))
        found[record.step] = (min(before, record.updates), record.val)
    for step, (updates, metrics) in sorted(found.items()):
        if metrics:
            values = {f"val_{name}": value for name, value in metrics.items()}
            yield CurvePoint(step, updates, round(step * samples_per_step), values)


def _losses(run: Run, steps: int, samples_per_step: float) -> Iterator[CurvePoint]:
    """The mean of the finite losses of the first learner's applied steps, window by window."""
    width = max(_FEWEST, steps // _WINDOWS)
    learner, total, count = "", 0.0, 0
    for record in run.steps():
        learner = learner or record.learner
        if record.learner != learner:
            continue
        if not record.skipped and math.isfinite(record.loss):
            total, count = total + record.loss, count + 1
        if record.step % width == 0 or record.step == steps:
            if count:
                samples = round(record.step * samples_per_step)
                yield CurvePoint(record.step, record.updates, samples, {"train_loss": total / count})
            total, count = 0.0, 0


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


def align_reference(runs: Sequence[RunMeasures], metric: str) -> tuple[Aligned, ...]:
    """Finished runs of the reference, at the most that all of them reached."""
    return tuple(found for by in _BOTH if (found := _at_equal(runs, [], metric, by)) is not None)


def value_at(run: RunMeasures, quantity: str, at: int, by: By) -> float:
    """Return what a run had after an amount of work, on the line between the moments before and after it; NaN outside of them."""
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


#: A training loss that fell by less than this share of itself tells of no learning.
_LEAST_FALL = 0.05


def convergence_warnings(reference: Arm, metric: str, margin: float) -> list[str]:
    """Return what to mind of an equivalence between runs that were still on their way, as sentences; none where they were not.

    Args:
        reference: Its finished runs are looked at.
        metric: Name of the metric that is compared.
        margin: The largest difference that counts as none.
    """
    runs = [run for run in reference.runs if run.status == "done" and run.course]
    moves = [abs(values[-1] - values[-2]) for run in runs if len(values := _course(run, f"val_{metric}")) > 1]
    if moves:
        mean = sum(moves) / len(moves)
        return (
            [
                f"{reference.name} still moved by {mean:.2g} of {metric} between its last two validations, more than the margin of "
                f"{margin:g}: this is about runs of that length, which had not settled"
            ]
            if mean > margin
            else []
        )
    losses = [_course(run, "train_loss") for run in runs]
    if any(len(values) < 2 for values in losses):
        return [
            f"nothing on record tells whether {reference.name} learned anything: it was validated once, after few steps"
        ]
    falls = [1 - values[-1] / values[0] for values in losses if values[0] > 0]
    if falls and (fall := sum(falls) / len(falls)) < _LEAST_FALL:
        return [
            f"the training loss of {reference.name} fell by only {max(100 * fall, 0):.2g} %: arms that learn nothing agree in that"
        ]
    return []


def _course(run: RunMeasures, name: str) -> list[float]:
    """The finite values of a quantity, in order."""
    values = (moment.values.get(name, math.nan) for moment in run.course)
    return [value for value in values if math.isfinite(value)]
