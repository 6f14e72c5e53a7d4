"""Divergence of a run: its training loss rises far above the first one and never comes back.

The learning rate is the cause if the loss rises in FP32 as well and does not at a lower rate. To find out, the steps up
to the rise are trained again from the start, in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mptrain.build.parts import build
from mptrain.config.schema import Config
from mptrain.engine.failure_diagnosis import FAR
from mptrain.lab.diagnosis_case import with_overrides
from mptrain.lab.findings import Finding
from mptrain.lab.step_replay import saved_step_at
from mptrain.runlog.diagnosis_file import Remedy

#: Number of steps trained beyond the rise, and the latest step of a rise up to which steps are trained.
BEYOND, LATEST = 10, 100

#: Factors of the learning rate that are tried.
LOWER = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Divergence:
    """Rise of a run's training loss from which it never came back.

    Attributes:
        step: First step whose loss, and that of all later ones, is far above the first loss or not finite.
        cause: Description of the rise, of kind ``updates``.
        remedy: Learning rate at which the loss did not rise; None if the rise came too late to train again.
    """

    step: int
    cause: Finding
    remedy: Remedy | None


def rises_at(losses: Sequence[float]) -> int | None:
    """Return the step, from 1, from which on the loss stays far above the first one; None if there is none."""
    if not losses or not 0 < losses[0] < math.inf:
        return None
    last = max(at for at, loss in enumerate(losses, 1) if loss <= FAR * losses[0])
    return last + 1 if last < len(losses) else None


def explain_divergence(config: Config, losses: Sequence[float]) -> Divergence | None:
    """Return a divergence with a lower learning rate that prevents it; None if the rate is not the cause.

    The run has one learner; ``losses`` begin at step 1.
    """
    step, rate = rises_at(losses), config.optimizer.arguments.get("lr")
    if step is None or rate is None or config.inject.step is not None:
        return None
    what = f"the loss was {losses[0]:.3g} at step 1, {losses[step - 1]:.3g} at step {step:,}, and never came back"
    if step > LATEST:
        return Divergence(step, Finding("updates", (), what), None)

    steps = min(step + BEYOND, len(losses))  # schedules end with the run

    def end(word: str) -> float:
        saved = saved_step_at(*build(with_overrides(config, word)), None, steps + 1)
        return math.nan if saved is None else float(saved.state["accounts"]["main"]["last"]["loss"])

    if end("precision=fp32") <= FAR * losses[0]:
        return None
    for word in (f"optimizer.lr={rate * factor:.6g}" for factor in LOWER):
        if (loss := end(word)) <= FAR * losses[0]:
            outcome = f"after {steps} steps from the start the loss is {loss:.3g}"
            what = f"the run diverged because optimizer.lr={rate:g} is too high, in any precision: {what}"
            remedy = Remedy((word,), "a lower learning rate", True, outcome)
            return Divergence(step, Finding("updates", (), what), remedy)
    return None
