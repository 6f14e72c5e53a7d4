"""Dynamic loss scaling: starts high, backs off on overflow and grows after a number of steps without one (clean steps).

The rule of Micikevicius et al. 2018 (section 3.2) with Megatron-LM's hysteresis, a floor and a ceiling:

    at first:     growth_tracker <- -growth_delay;  hysteresis_tracker <- hysteresis
    on overflow:  growth_tracker <- -growth_delay;  hysteresis_tracker <- max(hysteresis_tracker - 1, 0)
                  if hysteresis_tracker = 0:  scale <- max(scale * backoff_factor, min_scale)
    else:         growth_tracker <- growth_tracker + 1
                  if growth_tracker = growth_interval:
                      growth_tracker <- 0;  scale <- min(scale * growth_factor, max_scale)
    then:         if hysteresis_reset requires it:  hysteresis_tracker <- hysteresis

With hysteresis 1 every overflow backs off, and the count stays 1. ``hysteresis_reset`` says when the count is reset:

- "growth": only when the scale grows. Once the count is used up, every further overflow backs off until then.
- "clean": also on every clean step, so that the first overflows in a row are tolerated.
- "backoff": after a back-off as well, so that every ``hysteresis``-th overflow in a row backs off.

Without a floor the scale falls through the subnormal numbers to 0 and stays there. Without a ceiling it grows as long
as FP32 can hold it; a growth step beyond that is omitted, as in `torch.amp.GradScaler`. Products are computed in FP64
and rounded once to FP32, as in its kernel; a factor that is an FP32 number gives the same result as a product in FP32.

`torch.amp.GradScaler`, apex, DeepSpeed, Megatron-LM, ColossalAI, Keras, NNabla, Flax and Paddle use this rule with
different constants: ``configs/scaler/`` has a file for each, with its source.

This one update is computed in three ways, with equal results. `DynamicScaler.after` takes the first that can be used:

1. One addition to ``growth_tracker``: the host knows that the step was clean, as in most steps on a CPU, and the scale
   does not grow. Not with hysteresis or a growth delay.
2. ``_by_kernel``, four operators: the rule is that of `torch.amp.GradScaler`, and the device has its kernel.
3. ``_by_operators``, about two dozen operators: any rule on any device.

The third is the whole rule: the kernel has no hysteresis and no growth delay, and not every device has the kernel. The
other two are there for speed: the number of operators decides the time of a small network's step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.numerics.formats import FLOAT32
from mptrain.scaler.base import Limits, RangedScaler, ScalerState
from mptrain.system.device import capabilities, in_widest
from mptrain.system.fields import AboveOne, BelowOne, NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.system.torch_private import amp_update_scale_
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict

HysteresisReset = Literal["growth", "clean", "backoff"]


@dataclass(frozen=True)
class DynamicScaler(RangedScaler):
    """Dynamic loss scaling rule: the scale falls when gradients overflow and grows after a number of clean steps.

    ``growth_delay`` clean steps, after the start and after an overflow, do not count towards ``growth_interval``.
    """

    min_scale: PositiveFloat | None = 1.0
    max_scale: PositiveFloat | None = 2.0**24
    growth_factor: AboveOne = 2.0
    backoff_factor: BelowOne = 0.5
    growth_interval: PositiveInt = 2000
    hysteresis: PositiveInt = 1
    hysteresis_reset: HysteresisReset = "growth"
    growth_delay: NonNegativeInt = 0

    reads_norms = False

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32), ``growth_tracker`` and ``hysteresis_tracker`` (int32), each of shape (1,)."""
        return {
            **super().initial(device),
            "growth_tracker": torch.tensor([-self.growth_delay], dtype=torch.int32, device=device),
            "hysteresis_tracker": torch.tensor([self.hysteresis], dtype=torch.int32, device=device),
        }

    @override
    def limits(self) -> Mapping[str, Limits]:
        return {
            **super().limits(),
            "growth_tracker": (-self.growth_delay, self.growth_interval - 1),
            "hysteresis_tracker": (1 if self.hysteresis_reset == "backoff" else 0, self.hysteresis),
        }

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        if not self._is_rule_of_kernel:
            return self._by_operators(state, verdict)
        if verdict.known_finite:
            growth_tracker = state["growth_tracker"] + 1
            if not self._grows_at(growth_tracker):
                return {**state, "growth_tracker": growth_tracker}
        has_kernel = capabilities(state["scale"].device).fused
        return self._by_kernel(state, verdict) if has_kernel else self._by_operators(state, verdict)

    def _grows_at(self, growth_tracker: Tensor) -> bool:
        return growth_tracker.item() == self.growth_interval

    @functools.cached_property
    def _is_rule_of_kernel(self) -> bool:
        """True if torch's kernel computes this rule: every overflow backs off, and growth stays within FP32."""
        # The kernel omits a growth step beyond FP32, where a ceiling would be reached.
        overflows = self.max_scale is not None and self.max_scale * self.growth_factor > FLOAT32.max
        return self.hysteresis == 1 and not self.growth_delay and not overflows

    def _by_kernel(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the next state by the kernel of `torch.amp.GradScaler`, which takes and changes its tensors."""
        # Copies: the records of this step still refer to the present scale.
        scale, growth_tracker = state["scale"].clone(), state["growth_tracker"].clone()
        # ``skip`` is the overflow flag as the kernel takes it, but 0 where overflows are applied.
        found_inf = verdict.skip if self.on_overflow == "skip" else verdict.overflow.to(scale.dtype)
        amp_update_scale_(
            scale, growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        scale.clamp_(self.floor, self.ceiling)
        return {**state, "scale": scale, "growth_tracker": growth_tracker}

    def _by_operators(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the next state by operators on tensors, for any rule and device; none is read on the host."""
        scale, overflow, growth_tracker = state["scale"], verdict.overflow, state["growth_tracker"] + 1
        grows = (growth_tracker == self.growth_interval).logical_and_(~overflow)
        hysteresis_tracker = (state["hysteresis_tracker"] - overflow.int()).clamp_(min=0)
        backs_off = (hysteresis_tracker == 0).logical_and_(overflow)
        refills = grows if self.hysteresis_reset == "growth" else ~overflow
        if self.hysteresis_reset == "backoff":
            refills = refills | backs_off
        return {
            "scale": torch.where(backs_off, self._lower(scale), torch.where(grows, self._higher(scale), scale)),
            "growth_tracker": torch.where(overflow, -self.growth_delay, torch.where(grows, 0, growth_tracker)),
            "hysteresis_tracker": torch.where(refills, self.hysteresis, hysteresis_tracker)
            if self.hysteresis > 1
            else state["hysteresis_tracker"],
        }

    def _lower(self, scale: Tensor) -> Tensor:
        exact = in_widest(scale) * self.backoff_factor  # FP64: an FP32 product would round the factor as well
        return exact.clamp(min=self.floor).to(scale.dtype)

    def _higher(self, scale: Tensor) -> Tensor:
        exact = in_widest(scale) * self.growth_factor
        if self.max_scale is not None:
            return exact.clamp_(max=self.max_scale).to(scale.dtype)  # before FP32 makes it inf
        rounded = exact.to(scale.dtype)
        return torch.where(rounded.isfinite(), rounded, scale)

    @override
    def describe(self) -> str:
        late = f" (the first after {self.growth_delay} more)" if self.growth_delay else ""
        every, row = {"growth": ("", ""), "clean": ("", " in a row"), "backoff": ("every ", " in a row")}[
            self.hysteresis_reset
        ]
        patience = "" if self.hysteresis == 1 else f" after {every}{self.hysteresis} overflows{row}"
        return (
            f"dynamic from {scale_in_words(self.init_scale)}, x{self.growth_factor:g} every {self.growth_interval} "
            f"clean steps{late}, x{self.backoff_factor:g} on overflow{patience}, {self.range_in_words()}"
        )
