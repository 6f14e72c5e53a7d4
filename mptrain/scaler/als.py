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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mptrain.numerics.formats import FLOAT16
from mptrain.numerics.overflow_check import ShareAbove
from mptrain.scaler.base import Limits, RangedScaler, ScalerState
from mptrain.system.fields import Fraction, PositiveFloat, PositiveInt
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class ALSScaler(RangedScaler):
    """Loss scaling rule that halves the scale if too many gradients are large, else doubles it (Graphcore's PopART)."""

    init_scale: PositiveFloat = 1.0
    bin_edge: Fraction = 0.125
    threshold: Fraction = 1e-7
    update_period: PositiveInt = 1

    reads_norms = False

    @property
    @override
    def measure(self) -> ShareAbove:
        """Share of gradient elements with a magnitude above ``bin_edge`` times FP16's largest number."""
        return ShareAbove(self.bin_edge * FLOAT16.max)

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32) and ``waited`` (int32), steps of this period, each of shape (1,)."""
        return {
            **super().initial(device),
            "waited": torch.zeros(1, dtype=torch.int32, device=device),
        }

    @override
    def limits(self) -> Mapping[str, Limits]:
        return {**super().limits(), "waited": (0, self.update_period - 1)}

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        assert verdict.measured is not None
        scale, waited = state["scale"], state["waited"] + 1
        due = waited == self.update_period
        falls = (verdict.measured > self.threshold).logical_and_(due).logical_or_(verdict.overflow)
        doubled = scale * 2
        higher = torch.where(doubled.isfinite(), doubled, scale).clamp_(max=self.ceiling)
        lower = (scale / 2).clamp_(min=self.floor)
        return {
            "scale": torch.where(falls, lower, torch.where(due, higher, scale)),
            "waited": torch.where(due, 0, waited),
        }

    @override
    def describe(self) -> str:
        every = "every step" if self.update_period == 1 else f"every {self.update_period} steps"
        return (
            f"als from {scale_in_words(self.init_scale)}, {every} x0.5 where more than {self.threshold:g} of the "
            f"gradients are above {self.bin_edge * FLOAT16.max:g}, else x2, {self.range_in_words()}"
        )
