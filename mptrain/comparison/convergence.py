"""Whether runs had learned something, and settled, when they were compared: arms that stand at the beginning agree as well."""

from __future__ import annotations

import math

from mptrain.comparison.results import Arm, RunMeasures

#: A training loss that fell by less than this share of itself tells of no learning.
_LEAST_FALL = 0.05


def unsettled(reference: Arm, metric: str, margin: float) -> list[str]:
    """What to mind of an equivalence between runs that were still on their way, as sentences; none where they were not.

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
