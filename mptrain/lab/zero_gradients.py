"""Parameters whose gradient is exactly zero: those that never get another one, as both factors of a product are zero.

A gradient of zero may be that of the first step only: of a factor whose partner starts at zero and moves, as in
low-rank adapters (Hu et al. 2021, section 4.1) and residual branches with a zero gain (Bachlechner et al. 2020), or of
a unit that this batch does not turn on. If both factors are zero, neither moves: a saddle that no optimizer leaves.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from mptrain.engine.parts import Parts
from mptrain.lab.doctor_gradients import Gradients, gradients, runs_in_float64
from mptrain.lab.doctor_ranges import NOTHING
from mptrain.workloads.base.batch import Batch

#: Bound of the moves of parameters. Each goes half as far as the one before, so that none is taken back.
MOVE = 2.0**-7


def without_gradient(parts: Parts, batch: Batch, zero: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters whose gradient stays zero, however far those with a gradient move.

    First come those at a saddle, which get a gradient where parameters that are zero are not, then the others. Without
    FP64 no saddle is looked for. The weights of ``parts``, newly built in ``precision=fp32``, are changed. The batch is
    in FP32, and ``zero`` names the parameters whose gradient is zero in FP64.
    """
    if not runs_in_float64(parts, batch):
        return (), tuple(zero)
    batch, values = batch.cast(torch.float64), {name: one.data for name, one in parts.model.named_parameters()}
    left, before, move, generator = list(zero), -1, MOVE, torch.Generator().manual_seed(0)
    while left and len(left) != before:
        before, move = len(left), move / 2
        for name, gradient in gradients(parts, batch, 1.0).items():
            if gradient.any():
                values[name].sub_(gradient.to(values[name].device), alpha=move / float(gradient.abs().max()))
        left = _small(gradients(parts, batch, 1.0), left)
    for value in (values[name] for name in left if not values[name].any()):
        value.copy_(MOVE * torch.randn(value.shape, generator=generator))
    others = _small(gradients(parts, batch, 1.0), left) if left else []
    return tuple(name for name in left if name not in others), tuple(others)


def _small(found: Gradients, names: Collection[str]) -> list[str]:
    sizes = {name: float(one.norm()) / math.sqrt(max(one.numel(), 1)) for name, one in found.items()}
    least = NOTHING * max(sizes.values(), default=0.0)
    return [name for name in names if sizes.get(name, 0.0) <= least]
