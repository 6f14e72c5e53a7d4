"""Dynamic loss scaling in which every change takes effect one step late, as in MXNet's AMP.

MXNet (``python/mxnet/amp/loss_scaler.py``, `LossScaler.has_overflow`) first applies the change that the previous step
decided, and then decides the next one. The next loss is multiplied by ``scale``:

    scale <- decided
    decided <- the dynamic rule's next scale after ``decided``

After an overflow, one more step therefore runs at the scale that overflowed; k overflows in a row still halve the scale
k times. See `mptrain.scaler.dynamic` for the dynamic rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mptrain.fields import AboveOne, BelowOne, PositiveFloat, PositiveInt
from mptrain.scaler.base import OnOverflow, ScalerState
from mptrain.scaler.dynamic import DynamicScaler
from mptrain.scaler.restart import take_up

if TYPE_CHECKING:
    import torch

    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class DelayedScaler:
    """Dynamic loss scaling rule in which every change of the scale takes effect one step late (MXNet's AMP).

    A clean step is one without an overflow, that is, without inf or NaN in the gradients.

    Attributes:
        init_scale: Loss scale of the first two steps.
        growth_factor: Factor of the scale after ``growth_interval`` clean steps in a row.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of clean steps in a row before the scale grows.
        min_scale: Lowest loss scale; with None it may fall to 0.
        max_scale: Highest loss scale; with None it is the largest FP32 number.
        on_overflow: ``skip`` skips an update with non-finite gradients, ``apply`` applies it.
    """

    init_scale: PositiveFloat = 65536.0
    growth_factor: AboveOne = 2.0
    backoff_factor: BelowOne = 0.5
    growth_interval: PositiveInt = 2000
    min_scale: PositiveFloat | None = None
    max_scale: PositiveFloat | None = 2.0**24
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        _ = self._rule  # building it checks the constants

    @cached_property
    def _rule(self) -> DynamicScaler:
        return DynamicScaler(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )

    @property
    def floor(self) -> float:
        """Lowest loss scale: ``min_scale``, or 0 without one."""
        return self._rule.floor

    def initial(self, device: torch.device) -> ScalerState:
        """Return the scaler's state before the first training step, on a device.

        Returns:
            The state of `DynamicScaler.initial`, whose ``scale`` multiplies the next loss, and ``decided``, float32 of
            shape (1,), the scale of the step after that. Both are ``init_scale``.
        """
        first = self._rule.initial(device)
        return {**first, "decided": first["scale"].clone()}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the state in a checkpoint, clamped to this rule's floor, ceiling and growth interval.

        See `Scaler.resume`.
        """
        scales = (self.min_scale, self.max_scale)
        limits = {
            "scale": scales,
            "decided": scales,
            "growth_tracker": (0, self.growth_interval - 1),
            "hysteresis_tracker": (0, 1),
        }
        return take_up(saved, self.initial(device), limits, device)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the scaler's state for the next training step, by the rule in the module docstring.

        See `Scaler.after`.
        """
        after = self._rule.after({**state, "scale": state["decided"]}, verdict)
        return {**after, "scale": state["decided"], "decided": after["scale"]}

    def describe(self) -> str:
        """Return one line that describes the loss scaling rule with its constants, for display."""
        return f"{self._rule.describe()}, each change one step late"
