"""A loss scale that never changes (Micikevicius et al. 2018, section 3.2), and its special case 1.

    scale(t + 1) = scale(t)

Overflows are detected all the same; whether they refuse the update is a declared choice.
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
    from mptrain.numerics.verdict import Verdict


@dataclass(frozen=True)
class StaticScaler:
    """A constant scale.

    Attributes:
        scale: Multiplies the loss and divides the gradients. A power of two changes exponents only, and so loses
            nothing; the paper's networks trained with 8 to 32768.
        on_overflow: ``skip`` refuses an update with non-finite gradients, ``apply`` lets it through.
    """

    scale: PositiveFloat = 1024.0
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        if not FLOAT32.smallest_normal <= self.scale <= FLOAT32.max:
            raise ConfigError(
                f"scaler.scale={self.scale:g} is outside of the normal FP32 numbers, {FLOAT32.smallest_normal:g} to "
                f"{FLOAT32.max:g}",
                "the scale is an FP32 number; the paper's networks trained with 8 to 32768",
            )

    @property
    def floor(self) -> float:
        """The scale itself."""
        return self.scale

    def initial(self, device: torch.device) -> ScalerState:
        """The constant, float32 of shape (1,)."""
        return {"scale": torch.tensor([self.scale], dtype=torch.float32, device=device)}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """The constant: a saved scale is never used in its place."""
        return _constant(self.initial(device), saved)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """The same state."""
        return state

    def describe(self) -> str:
        """The rule in one line."""
        return f"static {scale_in_words(self.scale)}, on overflow {self.on_overflow}"


@dataclass(frozen=True)
class NoScaler:
    """No loss scaling: the scale is 1, and FP32 takes the same path as everything else.

    Attributes:
        on_overflow: ``skip`` refuses an update with non-finite gradients, ``apply`` lets it through.
    """

    on_overflow: OnOverflow = "skip"

    @property
    def floor(self) -> float:
        """1."""
        return 1.0

    def initial(self, device: torch.device) -> ScalerState:
        """Scale 1, float32 of shape (1,)."""
        return {"scale": torch.ones(1, dtype=torch.float32, device=device)}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Scale 1, whatever was saved."""
        return _constant(self.initial(device), saved)

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """The same state."""
        return state

    def describe(self) -> str:
        """The rule in one line."""
        return f"none (scale 1), on overflow {self.on_overflow}"


def _constant(own: ScalerState, saved: ScalerState) -> tuple[ScalerState, list[str]]:
    now, before = float(own["scale"]), float(saved["scale"])
    return own, [] if now == before else [f"the loss scale goes on at {now:g}; it was {before:g} in the checkpoint"]
