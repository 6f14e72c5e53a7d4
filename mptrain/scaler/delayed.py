"""Dynamic loss scaling in which every change takes effect one step late, as in MXNet's AMP.

MXNet (``python/mxnet/amp/loss_scaler.py``, `LossScaler.has_overflow`) first applies the change that the previous step
decided, and then decides the next one. The next loss is multiplied by ``scale``:

    scale <- decided
    decided <- the dynamic rule's next scale after ``decided`` (`mptrain.scaler.dynamic`)

After an overflow, one more step therefore runs at the scale that overflowed; k in a row still halve it k times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from mptrain.scaler.base import Limits, RangedScaler, ScalerState
from mptrain.scaler.dynamic import DynamicScaler
from mptrain.system.fields import AboveOne, BelowOne, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch

    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class DelayedScaler(RangedScaler):
    """Dynamic loss scaling rule in which every change of the scale takes effect one step late (MXNet's AMP).

    ``init_scale`` is the scale of the first two steps.
    """

    max_scale: PositiveFloat | None = 2.0**24
    growth_factor: AboveOne = 2.0
    backoff_factor: BelowOne = 0.5
    growth_interval: PositiveInt = 2000

    reads_norms = False

    @cached_property
    def _rule(self) -> DynamicScaler:
        return DynamicScaler(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            on_overflow=self.on_overflow,
        )

    def initial(self, device: torch.device) -> ScalerState:
        """Return the dynamic rule's state and ``decided``, the scale of the step after next, float32 of shape (1,)."""
        first = self._rule.initial(device)
        return {**first, "decided": first["scale"].clone()}

    @override
    def limits(self) -> Mapping[str, Limits]:
        return {**self._rule.limits(), "decided": (self.min_scale, self.max_scale)}

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        after = self._rule.after({**state, "scale": state["decided"]}, verdict)
        return {**after, "scale": state["decided"], "decided": after["scale"]}

    @override
    def describe(self) -> str:
        return f"{self._rule.describe()}, each change one step late"
