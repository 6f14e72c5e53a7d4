"""A loss scale that starts high, backs off on overflow and grows after a window of clean steps.

The rule of Micikevicius et al. 2018 (section 3.2) as `torch.amp.GradScaler`, apex and Megatron-LM run it, with
Megatron's hysteresis, a floor and a ceiling:

    on overflow:  clean <- 0;  tolerance <- max(tolerance - 1, 0)
                  if tolerance = 0:  scale <- max(scale * backoff_factor, min_scale)
    else:         clean <- clean + 1
                  if clean = growth_interval:
                      clean <- 0;  tolerance <- hysteresis;  scale <- min(scale * growth_factor, max_scale)

With hysteresis 1 every overflow backs off. Tolerance is refilled by growth alone, so once it is used up every further
overflow backs off until the scale has grown again. A floor above the start or a ceiling below it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.errors import ConfigError, Problem
from mptrain.fields import AboveOne, BelowOne, PositiveFloat, PositiveInt
from mptrain.numerics.formats import FLOAT32, scale_in_words
from mptrain.scaler.base import OnOverflow

if TYPE_CHECKING:
    from mptrain.numerics.verdict import Verdict
    from mptrain.scaler.base import ScalerState


@dataclass(frozen=True)
class DynamicScaler:
    """Dynamic loss scaling.

    Attributes:
        init_scale: The scale of the first step.
        growth_factor: Multiplies the scale after ``growth_interval`` clean steps in a row.
        backoff_factor: Multiplies the scale after an overflow.
        growth_interval: Clean steps in a row before the scale grows.
        hysteresis: Overflows since the last growth before the scale backs off.
        min_scale: The scale never falls below.
        max_scale: The scale never rises above.
        on_overflow: ``skip`` refuses an update with non-finite gradients, ``apply`` lets it through.
    """

    init_scale: PositiveFloat = 65536.0
    growth_factor: AboveOne = 2.0
    backoff_factor: BelowOne = 0.5
    growth_interval: PositiveInt = 2000
    hysteresis: PositiveInt = 1
    min_scale: PositiveFloat = 1.0
    max_scale: PositiveFloat = 2.0**24
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        problems = []
        if not self.min_scale <= self.init_scale <= self.max_scale:
            problems.append(
                Problem(
                    f"scaler.init_scale={self.init_scale:g} is outside scaler.min_scale={self.min_scale:g} to "
                    f"scaler.max_scale={self.max_scale:g}",
                    "move the start between the floor and the ceiling",
                )
            )
        if self.max_scale > FLOAT32.max:
            problems.append(
                Problem(
                    f"scaler.max_scale={self.max_scale:g} is above the largest FP32 number, {FLOAT32.max:g}",
                    "the scale is an FP32 number: set a ceiling that it can hold, such as 2^24",
                )
            )
        if self.min_scale < FLOAT32.smallest_normal:
            problems.append(
                Problem(
                    f"scaler.min_scale={self.min_scale:g} is below the smallest normal FP32 number",
                    "a scale near 0 cannot be undone; 1 is the usual floor",
                )
            )
        if problems:
            raise ConfigError(problems)

    @property
    def floor(self) -> float:
        """``min_scale``."""
        return self.min_scale

    def initial(self, device: torch.device) -> ScalerState:
        """``scale`` float32, ``clean`` and ``tolerance`` int32, each of shape (1,)."""
        return {
            "scale": torch.tensor([self.init_scale], dtype=torch.float32, device=device),
            "clean": torch.zeros(1, dtype=torch.int32, device=device),
            "tolerance": torch.tensor([self.hysteresis], dtype=torch.int32, device=device),
        }

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """The saved state, brought within this rule's floor, ceiling, window and hysteresis."""
        own = self.initial(device)
        if own.keys() != saved.keys():
            return own, [
                f"the checkpoint's scaler was another one: the loss scale starts afresh at {self.init_scale:g}"
            ]
        state = {key: saved[key].to(device, own[key].dtype) for key in own}
        state["clean"] = state["clean"].clamp(max=self.growth_interval - 1)
        state["tolerance"] = state["tolerance"].clamp(max=self.hysteresis)
        state["scale"] = state["scale"].clamp(self.min_scale, self.max_scale)
        notes = [
            f"the scaler's {key} goes on at {float(state[key]):g}; it was {float(saved[key]):g} in the checkpoint"
            for key in state
            if float(state[key]) != float(saved[key])
        ]
        return state, notes

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """The next state by the rule in this module's docstring."""
        scale, overflow = state["scale"], verdict.overflow
        clean = state["clean"] + 1
        grows = (clean == self.growth_interval).logical_and_(~overflow)
        tolerance = (state["tolerance"] - overflow.int()).clamp_(min=0)
        backs_off = (tolerance == 0).logical_and_(overflow)
        exact = scale.double()  # rounds once, as torch's kernel does; an FP32 product would round the factor as well
        lower = (exact * self.backoff_factor).clamp_(min=self.min_scale).to(scale.dtype)
        higher = (exact * self.growth_factor).clamp_(max=self.max_scale).to(scale.dtype)  # before FP32 makes it inf
        return {
            "scale": torch.where(backs_off, lower, torch.where(grows, higher, scale)),
            "clean": torch.where(overflow | grows, 0, clean),
            "tolerance": torch.where(grows, self.hysteresis, tolerance),
        }

    def in_words(self) -> str:
        """The rule in one line."""
        patience = "" if self.hysteresis == 1 else f" after {self.hysteresis} overflows"
        return (
            f"dynamic from {scale_in_words(self.init_scale)}, x{self.growth_factor:g} every {self.growth_interval} clean steps, "
            f"x{self.backoff_factor:g} on overflow{patience}, within {scale_in_words(self.min_scale)} to "
            f"{scale_in_words(self.max_scale)}"
        )
