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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mptrain.numerics.formats import FLOAT16
from mptrain.scaler.base import Limits, RangedScaler, ScalerState
from mptrain.system.device import widest
from mptrain.system.fields import PositiveFloat, PositiveInt
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict


@dataclass(frozen=True)
class SmoothScaler(RangedScaler):
    """Dynamic loss scaling rule that raises the scale by a small factor at every clean step (Chainer).

    Chainer's ``max_scale`` is the largest FP16 number.
    """

    init_scale: PositiveFloat = 1.0
    min_scale: PositiveFloat = 1.0
    max_scale: PositiveFloat = FLOAT16.max
    interval: PositiveInt = 1000

    reads_norms = False

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale`` (float32), ``exact`` (the same in the widest dtype) and ``overflowed``, of shape (1,)."""
        return {
            **super().initial(device),
            "exact": torch.tensor([self.init_scale], dtype=widest(device), device=device),
            "overflowed": torch.zeros(1, dtype=torch.bool, device=device),
        }

    @override
    def limits(self) -> Mapping[str, Limits]:
        return {**super().limits(), "exact": (self.min_scale, self.max_scale)}

    @override
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        overflowed = state["overflowed"] | verdict.overflow
        before = state["exact"]
        grown = torch.where(overflowed, before * 2.0 ** (1 / self.interval), before * 2.0)
        exact = torch.where(verdict.overflow, before * 0.5, grown).clamp_(self.min_scale, self.max_scale)
        return {"scale": exact.to(torch.float32), "exact": exact, "overflowed": overflowed}

    @override
    def describe(self) -> str:
        return (
            f"smooth from {scale_in_words(self.init_scale)}, x2 every step until the first overflow, then x2 within "
            f"{self.interval} clean steps, x0.5 on overflow, {self.range_in_words()}"
        )
