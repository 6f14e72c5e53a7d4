"""Loss scaling from running statistics of the largest gradient, as in OpenSeq2Seq.

OpenSeq2Seq (``open_seq2seq/optimizers/automatic_loss_scaler.py``, `LogMaxScaler`) models log2 max |g| over the unscaled
gradients of a step as normally distributed, and sets the scale so that the next step overflows FP16 with a probability
of 0.1 % (3.09 standard deviations):

    x <- log2(max |g|)                              on overflow:  x <- overflow_counts_as
    fast   <- beta1 * fast   + (1 - beta1) * x      mean  <- fast / (1 - beta1^n)
    slow   <- beta2 * slow   + (1 - beta2) * x      variance <- square / (1 - beta2^n) - (slow / (1 - beta2^n))^2
    square <- beta2 * square + (1 - beta2) * x^2
    scale  <- 2^(log2_max - mean - deviations * sqrt(variance)), clamped to min_scale and max_scale

for the n-th step, with the three moments at 0 and the scale at 1 before the first. The scale changes at every step and
is not a power of two.

In the source an overflow counts as x = 2^16, although x is a logarithm; 16 was probably meant. With 2^16, one overflow
takes the scale to its floor and keeps it there for thousands of steps. The default follows the source; set
``overflow_counts_as: 16`` for the probable intention.

Differences from the source: moments are FP64, not FP32. A step whose gradients are all zero is ignored and leaves the
state unchanged; the source takes the logarithm of 0 there and never recovers. One constant replaces two of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mptrain.numerics.overflow_check import LargestMagnitude
from mptrain.scaler.base import RangedScaler, ScalerState
from mptrain.system.device import in_widest, widest
from mptrain.system.fields import BelowOneOrZero, NonNegativeFloat, PositiveFloat
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class LogMaxScaler(RangedScaler):
    """Loss scaling rule that predicts the largest gradient from its running mean and deviation (OpenSeq2Seq)."""

    init_scale: PositiveFloat = 1.0
    min_scale: PositiveFloat = 1.0
    max_scale: PositiveFloat = 2.0**14
    beta1: BelowOneOrZero = 0.99
    beta2: BelowOneOrZero = 0.999
    deviations: NonNegativeFloat = 3.09
    log2_max: NonNegativeFloat = 16.0
    overflow_counts_as: NonNegativeFloat = 65536.0

    reads_norms = False

    @property
    @override
    def measure(self) -> LargestMagnitude:
        """Largest magnitude among all elements of a step's gradients."""
        return LargestMagnitude()

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32), ``count`` of steps (int64) and moments (widest float dtype), of shape (1,)."""
        moments = {name: torch.zeros(1, dtype=widest(device), device=device) for name in ("fast", "slow", "square")}
        return {
            **super().initial(device),
            **moments,
            "count": torch.zeros(1, dtype=torch.int64, device=device),
        }

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        assert verdict.measured is not None
        largest = verdict.measured / state["scale"]
        x = torch.where(verdict.overflow, self.overflow_counts_as, largest.log2())
        fast = self.beta1 * state["fast"] + (1 - self.beta1) * x
        slow = self.beta2 * state["slow"] + (1 - self.beta2) * x
        square = self.beta2 * state["square"] + (1 - self.beta2) * x * x
        count = state["count"] + 1
        seen1, seen2 = (1 - torch.pow(beta, in_widest(count)) for beta in (self.beta1, self.beta2))
        variance = (square / seen2 - (slow / seen2).square()).clamp_(min=0)
        proposed = torch.exp2(self.log2_max - fast / seen1 - self.deviations * variance.sqrt())
        scale = proposed.clamp_(self.min_scale, self.max_scale).to(torch.float32)
        following = {"scale": scale, "fast": fast, "slow": slow, "square": square, "count": count}
        counts = x.isfinite()
        return {name: torch.where(counts, value, state[name]) for name, value in following.items()}

    @override
    def describe(self) -> str:
        return (
            f"logmax from {scale_in_words(self.init_scale)}, 2^({self.log2_max:g} - mean - {self.deviations:g} "
            f"deviations of log2 max|g|), betas {self.beta1:g} and {self.beta2:g}, {self.range_in_words()}"
        )
