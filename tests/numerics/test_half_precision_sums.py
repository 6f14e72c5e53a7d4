"""The numbers of docs/precision.md on sums in FP16 (Micikevicius et al., ICLR 2018, sections 3.1 and 3.3)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F


def added_one_by_one(numbers):
    total = torch.zeros((), dtype=numbers.dtype)
    for number in numbers:
        total = total + number
    return total.item()


def test_an_fp16_sum_of_numbers_below_one_sticks_at_2048():
    numbers = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    assert added_one_by_one(numbers.half()) == 2048
    assert added_one_by_one(numbers.bfloat16()) == 256
    assert (
        added_one_by_one(numbers)
        == pytest.approx(numbers.double().sum().item(), rel=1e-6)
        == pytest.approx(5002.74, abs=0.01)
    )


def test_the_sum_of_8192_losses_leaves_fp16_and_their_mean_in_fp32_is_right():
    generator = torch.Generator().manual_seed(0)
    sums, truth = {dtype: torch.zeros((), dtype=dtype) for dtype in (torch.half, torch.float)}, 0.0
    for _ in range(16):  # in chunks, which take less memory
        logits = (torch.randn(512, 4096, generator=generator) * 0.1).half()
        targets = torch.randint(4096, (512,), generator=generator)
        truth += F.cross_entropy(logits.double(), targets, reduction="sum").item() / 8192
        for dtype, total in sums.items():
            losses = F.nll_loss(F.log_softmax(logits.to(dtype), dim=1), targets, reduction="sum")
            sums[dtype] = total + losses.to(dtype)
    assert sums[torch.half].item() == math.inf
    assert sums[torch.float].item() / 8192 == pytest.approx(truth, abs=1e-5) == pytest.approx(8.3214, abs=1e-4)


def test_a_variance_from_fp16_sums_is_nan_and_torchs_own_is_right():
    channel = (torch.randn(98_304, generator=torch.Generator().manual_seed(0)) + 4).half()
    total, squares = (added_one_by_one(values.view(-1, 256).sum(1)) for values in (channel, channel * channel))
    assert (total, squares) == (math.inf, math.inf)
    assert math.isnan(squares / 98_304 - (total / 98_304) ** 2)
    mean, variance = torch.zeros(1), torch.ones(1)
    F.batch_norm(channel.view(1, 1, -1), mean, variance, training=True, momentum=1.0)
    assert variance.item() == pytest.approx(channel.double().var().item(), rel=1e-4) == pytest.approx(1.00322, abs=1e-5)
