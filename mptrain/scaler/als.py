"""Loss scaling by the share of gradients near the end of FP16's range, as in Graphcore's PopART.

PopART calls it automatic loss scaling (ALS; ``willow/src/popx/op/lossscaleupdatex.cpp`` and
``willow/src/transforms/automaticlossscaling.cpp``). The elements of the scaled gradients are sorted into two bins:

    edge <- bin_edge * 65504
    share <- (elements with |g| > edge) / (all elements)
    at every ``update_period``-th step:
        scale <- scale / 2  if share > threshold,  else scale * 2

The scale falls before an overflow happens: with the defaults, as soon as more than one element in ten million lies in
the upper seven eighths of the range. It never settles, but alternates between two neighbouring scales.

Differences from the source:

- The elements are those of the parameters' gradients. PopART looks at the FP16 tensors inside its graph, which include
  gradients of activations.
- A step that overflows halves the scale, whatever the share and the period. PopART skips no update.
- inf and NaN count as above the edge.
- The scale does not grow beyond the largest FP32 number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.errors import ConfigError
from mptrain.fields import Fraction, PositiveFloat, PositiveInt
from mptrain.numerics.formats import FLOAT16, FLOAT32, scale_in_words
from mptrain.numerics.measures import ShareAbove
from mptrain.scaler.base import OnOverflow, ScalerState
from mptrain.scaler.restart import take_up

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class ALSScaler:
    """Loss scaling rule that halves the scale if too many gradients are large, else doubles it (Graphcore's PopART).

    Without ``min_scale`` the scale may fall to 0, without ``max_scale`` grow to the largest FP32 number.
    """

    init_scale: PositiveFloat = 1.0
    bin_edge: Fraction = 0.125
    threshold: Fraction = 1e-7
    update_period: PositiveInt = 1
    min_scale: PositiveFloat | None = None
    max_scale: PositiveFloat | None = None
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        lowest = FLOAT32.smallest_normal if self.min_scale is None else self.min_scale
        if not FLOAT32.smallest_normal <= lowest <= self.init_scale <= self._highest <= FLOAT32.max:
            raise ConfigError(
                f"scaler.init_scale={self.init_scale:g} is outside scaler.min_scale={lowest:g} to "
                f"scaler.max_scale={self._highest:g}, or one of them is not a normal FP32 number",
                "set scaler.init_scale to a value between scaler.min_scale and scaler.max_scale",
            )

    @property
    def _highest(self) -> float:
        return FLOAT32.max if self.max_scale is None else self.max_scale

    @property
    def floor(self) -> float:
        """Lowest loss scale: ``min_scale``, or 0 without one."""
        return 0.0 if self.min_scale is None else self.min_scale

    @property
    def measure(self) -> ShareAbove:
        """Measure of the share of gradient elements with a magnitude above ``bin_edge`` times FP16's largest number."""
        return ShareAbove(self.bin_edge * FLOAT16.max)

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32) and ``waited`` (int32), the steps since the last change, each of shape (1,)."""
        return {
            "scale": torch.tensor([self.init_scale], dtype=torch.float32, device=device),
            "waited": torch.zeros(1, dtype=torch.int32, device=device),
        }

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the saved state, clamped to this rule's floor, ceiling and period, and notes for the user."""
        limits = {"scale": (self.min_scale, self.max_scale), "waited": (0, self.update_period - 1)}
        return take_up(saved, self.initial(device), limits, device)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the state for the next training step."""
        assert verdict.measured is not None
        scale, waited = state["scale"], state["waited"] + 1
        due = waited == self.update_period
        falls = (verdict.measured > self.threshold).logical_and_(due).logical_or_(verdict.overflow)
        doubled = scale * 2
        higher = torch.where(doubled.isfinite(), doubled, scale).clamp_(max=self._highest)
        lower = (scale / 2).clamp_(min=self.floor)
        return {
            "scale": torch.where(falls, lower, torch.where(due, higher, scale)),
            "waited": torch.where(due, 0, waited),
        }

    def describe(self) -> str:
        """Return one line that describes the rule with its constants."""
        every = "every step" if self.update_period == 1 else f"every {self.update_period} steps"
        low = "" if self.min_scale is None else f", at least {scale_in_words(self.min_scale)}"
        high = "" if self.max_scale is None else f", at most {scale_in_words(self.max_scale)}"
        return (
            f"als from {scale_in_words(self.init_scale)}, {every} x0.5 where more than {self.threshold:g} of the "
            f"gradients are above {self.bin_edge * FLOAT16.max:g}, else x2{low}{high}"
        )
