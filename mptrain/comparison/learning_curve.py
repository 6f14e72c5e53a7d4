"""How a run went: its validations, and where they are too few, its training loss.

Read from the records; what is made of it is the business of `mptrain.comparison.alignment`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mptrain.comparison.results import Moment
from mptrain.runlog.reader import Run

#: Windows over which a training loss is averaged, and the fewest steps of one.
_WINDOWS, _FEWEST = 50, 10


def course_of(run: Run, steps: int, samples_per_step: float) -> tuple[Moment, ...]:
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


def _validations(run: Run, samples_per_step: float) -> Iterator[Moment]:
    """One moment for each validation; the learners of one are in rows of their own."""
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for record in run.epochs():
        before, _ = found.get(record.step, (record.updates, {}))
        found[record.step] = (min(before, record.updates), record.val)
    for step, (updates, metrics) in sorted(found.items()):
        if metrics:
            values = {f"val_{name}": value for name, value in metrics.items()}
            yield Moment(step, updates, round(step * samples_per_step), values)


def _losses(run: Run, steps: int, samples_per_step: float) -> Iterator[Moment]:
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
                yield Moment(record.step, record.updates, samples, {"train_loss": total / count})
            total, count = 0.0, 0
