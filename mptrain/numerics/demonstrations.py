"""Demonstrations of the paper's three techniques on numbers small enough to check by hand.

Each function computes one claim of Micikevicius et al. (*Mixed Precision Training*, ICLR 2018) on the CPU, bit-for-bit
reproducibly; ``truth`` is the result in FP64. Only recipes use these functions, training does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from mptrain.fields import NonNegativeInt

Dtype = Literal["float16", "bfloat16", "float32"]
Count = Annotated[int, Ge(2), Le(10_000_000)]

#: Values of one block; each block is summed before the blocks are added.
_BLOCK = 256


def sequential_sum(dtype: Dtype = "float16", terms: Count = 10_000, seed: NonNegativeInt = 0) -> dict[str, float]:
    """Add random numbers from [0, 1) one by one, rounding the running sum to a dtype after each addition.

    Shows the need for reductions in FP32 (section 3.3). From 2048 on, adjacent FP16 numbers are 2 apart. A number below
    1 is less than half that distance, so an FP16 sum stops growing. ``error`` is (truth - value) / truth.
    """
    kind: torch.dtype = getattr(torch, dtype)
    numbers = torch.rand(terms, generator=torch.Generator().manual_seed(seed)).to(kind)
    total = torch.zeros((), dtype=kind)
    for number in numbers:
        total = total + number
    truth = numbers.double().sum()
    return {"value": total.item(), "truth": truth.item(), "error": ((truth - total.double()) / truth).item()}


def cross_entropy_of_half_logits(
    dtype: Dtype = "float16", samples: Count = 8192, classes: Count = 4096, seed: NonNegativeInt = 0
) -> dict[str, float]:
    """Compute the mean cross-entropy of random FP16 logits, with log-softmax and the sum of the losses in a dtype.

    Shows why the loss is computed in FP32 (section 3.3). An untrained network has a loss of about the logarithm of its
    number of classes, ln 4096 = 8.3. Over 8,192 samples the sum is 68,000, above the largest FP16 number 65,504. The
    mean is representable in FP16, but the sum overflows. Logits are normal numbers times 0.1.
    """
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    total, truth, step = torch.zeros((), dtype=kind), torch.zeros((), dtype=torch.float64), 512
    for start in range(0, samples, step):  # in chunks: all logits in FP64 would take a quarter of a gigabyte
        rows = min(step, samples - start)
        logits = (torch.randn(rows, classes, generator=generator) * 0.1).half()
        targets = torch.randint(classes, (rows,), generator=generator)
        total = total + F.nll_loss(F.log_softmax(logits.to(kind), dim=1), targets, reduction="sum").to(kind)
        truth = truth + F.cross_entropy(logits.double(), targets, reduction="sum")
    return {"sum": total.item(), "mean": (total / samples).item(), "truth": truth.item() / samples}


def batch_norm_emulation(values: Count = 98_304, mean: float = 4.0, seed: NonNegativeInt = 0) -> dict[str, float]:
    """Compute the variance of one channel of FP16 activations, as batch normalisation would with sums in FP16.

    Shows why batch statistics are accumulated in FP32 (section 3.3). No torch kernel accumulates in FP16, so it is
    emulated: the naive method accumulates the sum and the sum of squares in FP16, in blocks of 256, and subtracts. Both
    sums exceed 65,504 and become inf, and their difference is NaN. torch's batch normalisation accumulates in FP32 and
    stays finite. The activations have a standard deviation of 1; 98,304 of them are a channel of 24 images of 64x64.
    """
    generator = torch.Generator().manual_seed(seed)
    channel = (torch.randn(values, generator=generator) + mean).half()
    total, squares = _half_sum(channel), _half_sum(channel * channel)
    average = total / values
    naive = squares / values - average * average
    running_mean, running_variance = torch.zeros(1), torch.ones(1)
    F.batch_norm(channel.view(1, 1, -1), running_mean, running_variance, training=True, momentum=1.0)
    return {
        "naive_sum": total.item(),
        "naive_sum_of_squares": squares.item(),
        "naive_variance": naive.item(),
        "naive_is_finite": float(naive.isfinite().item()),
        "torch_variance": running_variance.item(),
        "truth": channel.double().var().item(),
    }


def update_lost(weight: float = 1.0, exponent: Annotated[int, Ge(-24), Le(0)] = -11) -> dict[str, float]:
    """Add a small update, 2^exponent, to a weight, in FP16 (``half``) and in FP32 (``single``).

    Shows the need for FP32 master weights (section 3.1). The FP16 neighbours of 1 are 2^-10 above and 2^-11 below. An
    update of 2^-11 is half-way to the next number, and rounding to even drops it. The smallest FP16 number is 2^-24,
    and half of it rounds to zero: a smaller update is lost before it is added to the weight.
    """
    update = 2.0**exponent
    half = torch.tensor(weight, dtype=torch.float16) + torch.tensor(update, dtype=torch.float16)
    single = torch.tensor(weight) + torch.tensor(update)
    return {
        "half": half.item(),
        "single": single.item(),
        "smallest": torch.tensor(2.0**-24, dtype=torch.float16).item(),
        "half_of_smallest": torch.tensor(2.0**-25, dtype=torch.float16).item(),
    }


def _half_sum(values: Tensor) -> Tensor:
    """Return a sum accumulated in FP16: first within blocks in parallel, as on a GPU, then over the blocks."""
    blocks = F.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    partial = torch.zeros(len(blocks), dtype=torch.float16)
    for column in blocks.unbind(1):
        partial = partial + column
    total = torch.zeros((), dtype=torch.float16)
    for block in partial.unbind():
        total = total + block
    return total
