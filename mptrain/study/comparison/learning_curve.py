"""Learning curves of runs, comparison of arms at equal work, and warnings about runs that have not converged.

A learning curve consists of the run's validations, plus its training loss if there are fewer than two validations. Arms
are compared at equal updates and at equal samples, which differ because a skipped update consumes samples without
changing the weights. Runs that have not converged, or learned nothing, get a warning, because untrained arms agree too.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from mptrain.runlog.run_reader import Run
from mptrain.study.comparison.results import Aligned, Arm, CurvePoint, RunMeasures
from mptrain.study.comparison.statistics import improved, mean_interval

#: Number of windows over which the training loss is averaged, and the fewest steps in one.
_WINDOWS, _FEWEST = 50, 10


def learning_curve(run: Run, steps: int, samples_per_step: float) -> tuple[CurvePoint, ...]:
    """Return the learning curve of a run, in order of steps: its validations, and if they are few its training loss.

    The run's steps are read, as a stream, only if it has fewer than two validations, because interpolation needs two.
    The training loss is then averaged over windows of steps. ``steps`` counts attempted steps, and ``samples_per_step``
    is an average over the run.
    """
    validations = list(_validations(run, samples_per_step))
    losses = list(_losses(run, steps, samples_per_step)) if len(validations) < 2 else []
    return tuple(sorted((*validations, *losses), key=lambda moment: moment.step))


def _validations(run: Run, samples_per_step: float) -> Iterator[CurvePoint]:
    """Yield one point per validation; a validation has one row per learner."""
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for record in run.epochs():
        before, _ = found.get(record.step, (record.updates, {}))
        found[record.step] = (min(before, record.updates), record.val)
    for step, (updates, metrics) in sorted(found.items()):
        if metrics:
            values = {f"val_{name}": value for name, value in metrics.items()}
            yield CurvePoint(step, updates, round(step * samples_per_step), values)


def _losses(run: Run, steps: int, samples_per_step: float) -> Iterator[CurvePoint]:
    """Yield the mean finite loss of the first learner's applied steps, one point per window."""
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


def losses_at_ends(run: Run, course: Sequence[CurvePoint]) -> tuple[float, float]:
    """Return the mean training loss of the first ten steps, and of the last epoch, or else at the end of the course.

    NaN stands for what is not recorded, and for the losses of several learners, which compete.
    """
    rows = list(itertools.islice(run.steps(), _FEWEST))
    first = [row.loss for row in rows if not row.skipped and math.isfinite(row.loss)]
    if len({row.learner for row in rows}) != 1 or not first:
        return math.nan, math.nan
    windows = [moment.values["train_loss"] for moment in course if "train_loss" in moment.values]
    last = windows or [epoch.train_loss for epoch in run.epochs()]
    return sum(first) / len(first), last[-1] if last else math.nan


By = Literal["updates", "samples"]

_BOTH: tuple[By, By] = ("updates", "samples")


def align(pairs: Sequence[tuple[RunMeasures, RunMeasures]], metric: str) -> tuple[Aligned, ...]:
    """Compare the learning curves of an arm and the reference after equal updates, and after equal samples.

    The pairs (run of the arm, run of the reference) are finished runs with the same seed. If a run has no value of the
    validation metric at that point, the training loss is compared. Each result exists only if all runs have a value.
    """
    own, others = [run for run, _ in pairs], [other for _, other in pairs]
    return tuple(found for by in _BOTH if (found := _at_equal(own, others, metric, by)) is not None)


def align_reference(runs: Sequence[RunMeasures], metric: str) -> tuple[Aligned, ...]:
    """Return the values of the reference as `align` does, after the most work that all its runs reached."""
    return tuple(found for by in _BOTH if (found := _at_equal(runs, [], metric, by)) is not None)


def value_at(run: RunMeasures, quantity: str, at: int, by: By) -> float:
    """Return a quantity of a run's learning curve after an amount of work, interpolated linearly between its points.

    The quantity is ``val_NAME`` for a validation metric, or ``train_loss``. ``by`` is the unit of ``at``: applied
    updates, or training samples. The result is NaN outside the recorded range.
    """
    known = [
        (moment.updates if by == "updates" else moment.samples, moment.values[quantity])
        for moment in run.course
        if quantity in moment.values
    ]
    work = [done for done, _ in known]
    above = bisect.bisect(work, at)
    if above and work[above - 1] == at:
        return known[above - 1][1]  # the last of several points with equally many updates
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


#: Smallest relative fall of the training loss that counts as learning.
_LEAST_FALL = 0.05


def convergence_warnings(reference: Arm, metric: str, margin: float) -> list[str]:
    """Return at most one warning, if the finished runs of the reference had not converged, or do not show it.

    Runs have not converged if the metric still changed by more than the margin between the last two validations, on
    average.
    """
    runs = [run for run in reference.runs if run.status == "done" and run.course]
    moves = [abs(values[-1] - values[-2]) for run in runs if len(values := _course(run, f"val_{metric}")) > 1]
    if moves:
        mean = sum(moves) / len(moves)
        return (
            [
                f"{metric} of {reference.name} still changed by {mean:.2g} between the last two validations, more than "
                f"the margin of {margin:g}: the runs had not converged, and verdicts hold for runs of this length"
            ]
            if mean > margin
            else []
        )
    losses = [_course(run, "train_loss") for run in runs]
    if any(len(values) < 2 for values in losses):
        return [f"the records do not show whether {reference.name} learned: it was validated once, after few steps"]
    return []


def _course(run: RunMeasures, name: str) -> list[float]:
    values = (moment.values.get(name, math.nan) for moment in run.course)
    return [value for value in values if math.isfinite(value)]


def neither_learned(
    arm: Sequence[RunMeasures], reference: Sequence[RunMeasures], metric: str, margin: float, *, higher_is_better: bool
) -> str:
    """Return why no finished run of an arm and of the reference has learned; empty if one has, or if it is unknown."""
    arms = [[run for run in some if math.isfinite(run.metrics.get(metric, math.nan))] for some in (arm, reference)]
    runs = [run for some in arms for run in some]
    if runs and higher_is_better and all(run.metrics[metric] == 0 for run in runs):
        return f"{metric} is 0 in every run"
    falls = [1 - run.losses[1] / run.losses[0] if run.losses[0] > 0 else math.nan for run in runs]
    if not falls or not all(fall < _LEAST_FALL for fall in falls):
        return ""
    sign = 1 if higher_is_better else -1
    for some in arms:
        courses = [values for run in some if len(values := _course(run, f"val_{metric}")) > 1]
        gains = [sign * (values[-1] - values[0]) for values in courses]
        if gains and (improved(gains) or max(gains) > margin):
            return ""
    return f"the training loss of no run fell by {100 * _LEAST_FALL:.0f} %, nor is {metric} better than at the start"
