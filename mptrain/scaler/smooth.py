"""A loss scale that grows a little with every clean step, as in Chainer.

Chainer (``chainer/optimizer.py``, `GradientMethod.update`, `Optimizer.loss_scaling`, `.update_loss_scale`):

    at first:     factor <- 2
    on overflow:  scale <- scale / 2;  factor <- 2^(1 / interval)
    else:         scale <- scale * factor
    then:         scale is brought within min_scale to max_scale

So it doubles with every step until the first overflow, and from then on within ``interval`` clean steps. The product is
kept in FP64, as Chainer keeps it in a Python number; the loss is multiplied by its value in FP32, which is no power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.device import widest
from mptrain.errors import ConfigError
from mptrain.fields import PositiveFloat, PositiveInt
from mptrain.numerics.formats import FLOAT16, FLOAT32, scale_in_words
from mptrain.scaler.base import OnOverflow, ScalerState
from mptrain.scaler.restart import take_up

if TYPE_CHECKING:
    from mptrain.numerics.verdict import Verdict


@dataclass(frozen=True)
class SmoothScaler:
    """Dynamic loss scaling without steps upwards.

    Attributes:
        init_scale: The scale of the first step.
        interval: Clean steps within which the scale doubles, once there was an overflow.
        min_scale: The scale never falls below.
        max_scale: The scale never rises above; Chainer's is the largest FP16 number.
        on_overflow: ``skip`` refuses an update with non-finite gradients, ``apply`` lets it through.
    """

    init_scale: PositiveFloat = 1.0
    interval: PositiveInt = 1000
    min_scale: PositiveFloat = 1.0
    max_scale: PositiveFloat = FLOAT16.max
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        if not FLOAT32.smallest_normal <= self.min_scale <= self.init_scale <= self.max_scale <= FLOAT32.max:
            raise ConfigError(
                f"scaler.init_scale={self.init_scale:g} is outside scaler.min_scale={self.min_scale:g} to "
                f"scaler.max_scale={self.max_scale:g}, or one of them is no normal FP32 number",
                "move the start between the floor and the ceiling",
            )

    @property
    def floor(self) -> float:
        """``min_scale``."""
        return self.min_scale

    def initial(self, device: torch.device) -> ScalerState:
        """``scale`` float32, ``exact`` float64 (float32 on a device without it) and ``overflowed`` bool (whether any step has), each of shape (1,)."""
        return {
            "scale": torch.tensor([self.init_scale], dtype=torch.float32, device=device),
            "exact": torch.tensor([self.init_scale], dtype=widest(device), device=device),
            "overflowed": torch.zeros(1, dtype=torch.bool, device=device),
        }

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """The saved state, brought within this rule's floor and ceiling."""
        limits = (self.min_scale, self.max_scale)
        return take_up(saved, self.initial(device), {"scale": limits, "exact": limits}, device)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """The next state by the rule in this module's docstring."""
        overflowed = state["overflowed"] | verdict.overflow
        before = state["exact"]
        grown = torch.where(overflowed, before * 2.0 ** (1 / self.interval), before * 2.0)
        exact = torch.where(verdict.overflow, before * 0.5, grown).clamp_(self.min_scale, self.max_scale)
        return {"scale": exact.to(torch.float32), "exact": exact, "overflowed": overflowed}

    def describe(self) -> str:
        """The rule in one line."""
        return (
            f"smooth from {scale_in_words(self.init_scale)}, x2 every step until the first overflow, then x2 within "
            f"{self.interval} clean steps, x0.5 on overflow, within {scale_in_words(self.min_scale)} to "
            f"{scale_in_words(self.max_scale)}"
        )
