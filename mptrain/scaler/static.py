"""Static loss scaling (Micikevicius et al. 2018, section 3.2), and no loss scaling, which is a static scale of 1.

Overflows are still detected; ``on_overflow`` chooses whether they skip the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mptrain.numerics.formats import FLOAT32
from mptrain.scaler.base import OnOverflow, Scaler, ScalerState
from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveFloat
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


class _ConstantScaler(Scaler):
    reads_norms = False

    @override
    def initial(self, device: torch.device) -> ScalerState:
        return {"scale": torch.tensor([self.floor], dtype=torch.float32, device=device)}

    @override
    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        own = self.initial(device)
        now, before = float(own["scale"]), float(saved["scale"])
        at, was = scale_in_words(now), scale_in_words(before)
        notes = [] if now == before else [f"the loss scale continues at {at}; it was {was} in the checkpoint"]
        return own, notes

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        return state


@dataclass(frozen=True)
class StaticScaler(_ConstantScaler):
    """Loss scaling rule that multiplies every loss by the same constant.

    A power of two changes only exponents and loses no bits; the paper's networks trained with 8 to 32768.
    """

    scale: PositiveFloat = 1024.0
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        if not FLOAT32.smallest_normal <= self.scale <= FLOAT32.max:
            raise ConfigError(
                f"scaler.scale={self.scale:g} is outside the normal FP32 numbers, {FLOAT32.smallest_normal:g} to "
                f"{FLOAT32.max:g}",
                "set scaler.scale to a normal FP32 number; the paper's networks trained with 8 to 32768",
            )

    @property
    def floor(self) -> float:
        """Lowest loss scale, which is the constant ``scale`` itself."""
        return self.scale

    @override
    def describe(self) -> str:
        return f"static {scale_in_words(self.scale)}, on overflow {self.on_overflow}"


@dataclass(frozen=True)
class NoScaler(_ConstantScaler):
    """Loss scaling rule for runs without loss scaling: a constant scale of 1, so that FP32 runs share the code."""

    is_identity = True
    on_overflow: OnOverflow = "skip"

    @property
    def floor(self) -> float:
        """Lowest loss scale, which is 1."""
        return 1.0

    @override
    def describe(self) -> str:
        return f"none (scale 1), on overflow {self.on_overflow}"
