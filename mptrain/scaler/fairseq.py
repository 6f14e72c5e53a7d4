"""Dynamic loss scaling that tolerates a share of overflows, as in fairseq.

fairseq (``fairseq/optim/dynamic_loss_scaler.py``, `DynamicLossScaler`):

    attempts <- attempts + 1
    on overflow:  growth_tracker <- 0;  overflows <- overflows + 1
                  if overflows / attempts >= tolerance:
                      overflows <- 0;  attempts <- 0
                      if scale / growth_factor > min_loss_scale:  scale <- scale / growth_factor
    else:         growth_tracker <- growth_tracker + 1
                  if growth_tracker = growth_interval:
                      growth_tracker <- 0;  attempts <- 0;  scale <- scale * growth_factor

``attempts`` counts the steps since the scale last changed. ``overflows`` counts the overflows since it last fell;
growth does not reset them. With tolerance 0 every overflow halves the scale. The scale does not fall to
``min_loss_scale`` or below: fairseq ends the run there, here the scale stays. It does not grow beyond the largest FP32
number. fairseq's optional ``--threshold-loss-scale`` is not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mptrain.numerics.formats import FLOAT32
from mptrain.scaler.base import Limits, OnOverflow, Scaler, ScalerState
from mptrain.system.device import in_widest
from mptrain.system.errors import ConfigError
from mptrain.system.fields import AboveOne, Fraction, PositiveFloat, PositiveInt
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class FairseqScaler(Scaler):
    """Dynamic loss scaling rule that backs off only if a share ``tolerance`` of the steps overflows (fairseq)."""

    init_scale: PositiveFloat = 128.0
    growth_factor: AboveOne = 2.0
    growth_interval: PositiveInt = 2**14
    tolerance: Fraction = 0.0
    min_loss_scale: PositiveFloat = 1e-4
    on_overflow: OnOverflow = "skip"

    reads_norms = False

    def __post_init__(self) -> None:
        if self.init_scale <= self.min_loss_scale or not FLOAT32.smallest_normal <= self.init_scale <= FLOAT32.max:
            raise ConfigError(
                f"scaler.init_scale={self.init_scale:g} is not above scaler.min_loss_scale={self.min_loss_scale:g}, "
                "or not a normal FP32 number",
                "set scaler.init_scale above scaler.min_loss_scale, for example to 128",
            )

    @property
    @override
    def floor(self) -> float:
        """Loss scale at or below which the rule backs off no further: ``min_loss_scale * growth_factor``."""
        return self.min_loss_scale * self.growth_factor

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32) and the three counts of the rule (int32), each of shape (1,)."""
        return {
            "scale": torch.tensor([self.init_scale], dtype=torch.float32, device=device),
            "growth_tracker": torch.zeros(1, dtype=torch.int32, device=device),
            "attempts": torch.zeros(1, dtype=torch.int32, device=device),
            "overflows": torch.zeros(1, dtype=torch.int32, device=device),
        }

    @override
    def limits(self) -> Mapping[str, Limits]:
        return {"growth_tracker": (0, self.growth_interval - 1)}

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        scale, overflow = state["scale"], verdict.overflow
        attempts, overflows = state["attempts"] + 1, state["overflows"] + overflow.int()
        growth_tracker = state["growth_tracker"] + 1
        grows = (growth_tracker == self.growth_interval).logical_and_(~overflow)
        backs_off = (in_widest(overflows) / attempts >= self.tolerance).logical_and_(overflow)
        lower, higher = in_widest(scale) / self.growth_factor, (in_widest(scale) * self.growth_factor).to(scale.dtype)
        falls, rises = backs_off & (lower > self.min_loss_scale), grows & higher.isfinite()
        return {
            "scale": torch.where(falls, lower.to(scale.dtype), torch.where(rises, higher, scale)),
            "growth_tracker": torch.where(overflow | grows, 0, growth_tracker),
            "attempts": torch.where(backs_off | grows, 0, attempts),
            "overflows": torch.where(backs_off, 0, overflows),
        }

    @override
    def describe(self) -> str:
        when = f"where {self.tolerance:.3g} of the steps overflow" if self.tolerance else "on overflow"
        return (
            f"dynamic from {scale_in_words(self.init_scale)}, x{self.growth_factor:g} every {self.growth_interval} "
            f"clean steps, /{self.growth_factor:g} {when}, above {scale_in_words(self.min_loss_scale)}"
        )
