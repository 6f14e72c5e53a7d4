"""Dynamic loss scaling that grows by a small factor at every clean step, as in Chainer.

Chainer (``chainer/optimizer.py``, `GradientMethod.update`, `Optimizer.loss_scaling`, `.update_loss_scale`):

    at first:     factor <- 2
    on overflow:  scale <- scale / 2;  factor <- 2^(1 / interval)
    else:         scale <- scale * factor
    then:         scale <- min(max(scale, min_scale), max_scale)

The scale doubles at every step until the first overflow, and after that once in ``interval`` clean steps. It is kept in
FP64, as Chainer keeps it in a Python float. The loss is multiplied by its FP32 value, which is not a power of two.
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
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class SmoothScaler:
    """Dynamic loss scaling rule that raises the scale by a small factor at every clean step (Chainer).

    Chainer's ``max_scale`` is the largest FP16 number.
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
                f"scaler.max_scale={self.max_scale:g}, or one of them is not a normal FP32 number",
                "set scaler.init_scale to a value between scaler.min_scale and scaler.max_scale",
            )

    @property
    def floor(self) -> float:
        """Lowest loss scale, ``min_scale``."""
        return self.min_scale

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32), ``exact`` (the same in the widest dtype) and ``overflowed``, of shape (1,)."""
        return {
            "scale": torch.tensor([self.init_scale], dtype=torch.float32, device=device),
            "exact": torch.tensor([self.init_scale], dtype=widest(device), device=device),
            "overflowed": torch.zeros(1, dtype=torch.bool, device=device),
        }

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the saved state, clamped to this rule's floor and ceiling, and notes for the user."""
        limits = (self.min_scale, self.max_scale)
        return take_up(saved, self.initial(device), {"scale": limits, "exact": limits}, device)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the state for the next training step."""
        overflowed = state["overflowed"] | verdict.overflow
        before = state["exact"]
        grown = torch.where(overflowed, before * 2.0 ** (1 / self.interval), before * 2.0)
        exact = torch.where(verdict.overflow, before * 0.5, grown).clamp_(self.min_scale, self.max_scale)
        return {"scale": exact.to(torch.float32), "exact": exact, "overflowed": overflowed}

    def describe(self) -> str:
        """Return one line that describes the rule with its constants."""
        return (
            f"smooth from {scale_in_words(self.init_scale)}, x2 every step until the first overflow, then x2 within "
            f"{self.interval} clean steps, x0.5 on overflow, within {scale_in_words(self.min_scale)} to "
            f"{scale_in_words(self.max_scale)}"
        )
