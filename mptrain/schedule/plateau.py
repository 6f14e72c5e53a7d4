"""Reduction of the learning rate when a validation metric no longer improves (``ReduceLROnPlateau`` of torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from mptrain.schedule.rate_table import rate_table
from mptrain.schedule.shapes import warmup_factor
from mptrain.system.errors import CheckpointError
from mptrain.system.fields import BelowOne, Fraction, NonNegativeFloat, NonNegativeInt


def improves(value: float, best: float | None, threshold: float, mode: Literal["rel", "abs"], *, higher: bool) -> bool:
    """Return whether a metric is better than the best one by more than a threshold, as in ``ReduceLROnPlateau``.

    NaN is never better. ``best`` is None before the first finite metric. ``rel`` takes the threshold as a fraction of
    the best metric, ``abs`` in units of the metric.
    """
    sign = 1.0 if higher else -1.0
    best = -sign * math.inf if best is None else best
    limit = best * (1 + sign * threshold) if mode == "rel" else best + sign * threshold
    return value > limit if higher else value < limit


@dataclass(frozen=True)
class PlateauState:
    """State of a plateau schedule between validations.

    ``metric`` is empty before the first validation, ``best`` None before the first finite one. ``bad`` counts
    consecutive validations without improvement, and stays 0 in the next ``cooldown`` ones. ``factor`` is the learning
    rate as a fraction of the base rate, apart from the warm-up.
    """

    metric: str = ""
    best: float | None = None
    bad: int = 0
    cooldown: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Plateau:
    """Schedule that multiplies the learning rate by a factor when a validation metric no longer improves.

    It behaves as ``torch.optim.lr_scheduler.ReduceLROnPlateau`` with ``eps=0``, stepped once after each validation.

    Attributes:
        patience: Number of consecutive validations without improvement that do not reduce the rate.
        threshold: Change of the metric that is not yet an improvement, as a fraction of the best if ``rel``.
        cooldown: Number of validations after a reduction that are not counted.
        min_factor: Smallest learning rate, as a fraction of the base rate.
        metric: Name of the validation metric. None means the metric of the task, or else the validation loss.
        mode: ``max`` if a higher metric is better. None means the direction of the task's metric, and lower for a loss.
        warmup: Number of updates with linear warm-up of the learning rate.
    """

    factor: BelowOne = 0.1
    patience: NonNegativeInt = 10
    threshold: NonNegativeFloat = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: NonNegativeInt = 0
    min_factor: Fraction = 0.0
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    warmup: NonNegativeInt = 0

    def rates(self, lr: float, planned: int, steps_per_epoch: int) -> list[float]:
        """Return the learning rates of a run without reductions: constant after the warm-up."""
        return [lr * warmup_factor(update, self.warmup) for update in range(planned + 1)]

    def after(self, state: PlateauState, value: float, *, higher: bool) -> PlateauState:
        """Return the state after a validation; its ``factor`` is smaller if the rate is reduced."""
        better = improves(value, state.best, self.threshold, self.threshold_mode, higher=higher)
        best, bad = (value, 0) if better else (state.best, state.bad + 1)
        cooldown, bad = (state.cooldown - 1, 0) if state.cooldown else (0, bad)
        if bad <= self.patience:
            return replace(state, best=best, bad=bad, cooldown=cooldown)
        factor = min(state.factor, max(state.factor * self.factor, self.min_factor))
        return replace(state, best=best, bad=0, cooldown=self.cooldown, factor=factor)


class RateReduction:
    """Plateau schedule of one learner, with its state and its learning rates by number of applied updates.

    ``rates`` is float32, shape (planned + 1,). A reduction changes it in place: CUDA graphs read it at its address.
    """

    def __init__(self, rule: Plateau, lr: float, rates: Tensor) -> None:
        self.rule, self.lr = rule, lr
        self.state = PlateauState()
        self._rates = rates

    def after_validation(self, metric: str, value: float, *, higher: bool) -> bool:
        """Update the state, new for another metric, and return whether the learning rates were reduced."""
        before = self.state
        if before.metric != metric:
            before = PlateauState(metric, factor=before.factor)
        self.state = self.rule.after(before, value, higher=higher)
        if self.state.factor == before.factor:
            return False
        self._fill()
        return True

    def _fill(self) -> None:
        """Write the table from the base rate, so that a resumed run has the same bits; past entries are never read."""
        table, lr = self._rates, self.lr * self.state.factor
        table.copy_(rate_table(self.rule, lr, len(table) - 1, table.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values by name, for a checkpoint."""
        return asdict(self.state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore state and rates from an untrusted saved state; an empty one, of another schedule, starts afresh.

        Raises CheckpointError if a value is missing or has another type.
        """
        kinds = {"metric": str, "best": float | None, "bad": int, "cooldown": int, "factor": float}
        fine = all(isinstance(saved.get(name), kind) for name, kind in kinds.items())
        if saved and not (fine and 0 <= saved["factor"] <= 1):
            raise CheckpointError("the checkpoint's state of schedule=plateau is damaged", "restore it from a copy")
        self.state = PlateauState(**{name: saved[name] for name in kinds}) if saved else PlateauState()
        self._fill()
