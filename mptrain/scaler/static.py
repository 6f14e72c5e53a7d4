"""Static loss scaling (Micikevicius et al. 2018, section 3.2), and no loss scaling, which is a static scale of 1.

Overflows are still detected; ``on_overflow`` chooses whether they skip the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.errors import ConfigError
from mptrain.fields import PositiveFloat
from mptrain.numerics.formats import FLOAT32, scale_in_words
from mptrain.scaler.base import OnOverflow, ScalerState

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class StaticScaler:
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

    def initial(self, device: torch.device) -> ScalerState:
        """Return the constant as ``scale``, float32 of shape (1,)."""
        return {"scale": torch.tensor([self.scale], dtype=torch.float32, device=device)}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the present constant, which a saved scale never replaces, and a note for the user if they differ."""
        return _constant(self.initial(device), saved)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return ``state`` itself."""
        return state

    def describe(self) -> str:
        """Return one line that describes the rule with its constant."""
        return f"static {scale_in_words(self.scale)}, on overflow {self.on_overflow}"


@dataclass(frozen=True)
class NoScaler:
    """Loss scaling rule for runs without loss scaling: a constant scale of 1, so that FP32 runs share the code."""

    on_overflow: OnOverflow = "skip"

    @property
    def floor(self) -> float:
        """Lowest loss scale, which is 1."""
        return 1.0

    def initial(self, device: torch.device) -> ScalerState:
        """Return a ``scale`` of 1, float32 of shape (1,)."""
        return {"scale": torch.ones(1, dtype=torch.float32, device=device)}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return a loss scale of 1, whatever was saved, and a note for the user if the saved scale was not 1."""
        return _constant(self.initial(device), saved)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return ``state`` itself."""
        return state

    def describe(self) -> str:
        """Return one line that says that there is no loss scaling."""
        return f"none (scale 1), on overflow {self.on_overflow}"


def _constant(own: ScalerState, saved: ScalerState) -> tuple[ScalerState, list[str]]:
    now, before = float(own["scale"]), float(saved["scale"])
    at, was = scale_in_words(now), scale_in_words(before)
    return own, [] if now == before else [f"the loss scale continues at {at}; it was {was} in the checkpoint"]
