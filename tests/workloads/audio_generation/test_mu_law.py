"""µ-law against the formula of the standard, written down once more, and against what companding is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mptrain.workloads.audio_generation.audio_dataset import decode, encode


def by_the_formula(sample, levels):
    mu = levels - 1
    curved = math.copysign(math.log(1 + mu * abs(sample)) / math.log(1 + mu), sample)
    return math.floor((curved + 1) / 2 * mu + 0.5)


@pytest.mark.parametrize("levels", [2, 16, 256])
def test_levels_are_those_of_the_formula(levels):
    samples = np.linspace(-1, 1, 4001) + 1e-9
    expected = [by_the_formula(min(max(sample, -1), 1), levels) for sample in samples]
    found = encode(torch.from_numpy(samples), levels).numpy()
    assert abs(found - expected).max() <= 1  # where FP32 and FP64 round a sample to either side of an edge
    assert (found != expected).mean() < 0.002


def test_known_points():
    assert encode(torch.tensor([-1.0, 0.0, 1.0, 7.0, -7.0]), 256).tolist() == [0, 128, 255, 255, 0]
    assert decode(torch.tensor([0, 255]), 256).tolist() == pytest.approx([-1.0, 1.0])
    assert abs(decode(torch.tensor([128]), 256).item()) < 1e-4


@pytest.mark.parametrize("levels", [2, 16, 255, 256])
def test_every_level_is_that_of_the_sample_it_stands_for(levels):
    numbers = torch.arange(levels)
    samples = decode(numbers, levels)
    assert torch.equal(encode(samples, levels), numbers)
    assert (samples.diff() > 0).all()
    torch.testing.assert_close(samples, -samples.flip(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_it_is_computed_in_fp32_whatever_it_is_given(dtype):
    samples = torch.tensor([-0.5, -0.001, 0.25, 0.9], dtype=dtype)
    assert torch.equal(encode(samples, 256), encode(samples.float(), 256))
    assert decode(torch.tensor([3]), 256).dtype == torch.float32
    quiet = torch.linspace(0.001, 0.01, 500)
    assert (decode(encode(quiet, 256), 256) - quiet).abs().max() < 0.0004 < 2 / 256 / 2  # half a step of equal ones
