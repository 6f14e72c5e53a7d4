"""Dynamic loss scaling in which every change takes effect one step late, as in MXNet's AMP.

MXNet (``python/mxnet/amp/loss_scaler.py``, `LossScaler.has_overflow`) first applies the change that the previous step
decided, and then decides the next one. The next loss is multiplied by ``scale``:

    scale <- decided
    decided <- the dynamic rule's next scale after ``decided`` (`mptrain.scaler.dynamic`)

After an overflow, one more step therefore runs at the scale that overflowed; k in a row still halve it k times.
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

    ``init_scale`` is the scale of the first two steps. Without ``min_scale`` the scale may fall to 0, without
    ``max_scale`` it may grow to the largest FP32 number.
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
        """Return the dynamic rule's state and ``decided``, the scale of the step after next, float32 of shape (1,)."""
        first = self._rule.initial(device)
        return {**first, "decided": first["scale"].clone()}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the saved state, clamped to this rule's floor, ceiling and growth interval, and notes for the user."""
        scales = (self.min_scale, self.max_scale)
        limits = {
            "scale": scales,
            "decided": scales,
            "growth_tracker": (0, self.growth_interval - 1),
            "hysteresis_tracker": (0, 1),
        }
        return take_up(saved, self.initial(device), limits, device)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the state for the next training step."""
        after = self._rule.after({**state, "scale": state["decided"]}, verdict)
        return {**after, "scale": state["decided"], "decided": after["scale"]}

    def describe(self) -> str:
        """Return one line that describes the rule with its constants."""
        return f"{self._rule.describe()}, each change one step late"
