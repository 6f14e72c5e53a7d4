"""µ-law companding: from samples to few levels that lie closer together where a wave is quiet, and back.

ITU-T G.711's curve with a µ of one less than the number of levels, rounded to the nearest level, as in van den Oord et al.
(2016, section 2.2); not G.711's own code, which approximates the curve by straight lines. In FP32, on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def encode(samples: Tensor, levels: int) -> Tensor:
    """The level of each sample.

    Args:
        samples: From -1 to 1; what lies outside is clipped.
        levels: How many there are, at least 2.

    Returns:
        int64 from 0 to ``levels - 1``, of the same shape. Silence is the upper one of the two in the middle.
    """
    mu = levels - 1
    wave = samples.float().clamp(-1.0, 1.0)
    curved = torch.sign(wave) * torch.log1p(mu * wave.abs()) / math.log1p(mu)
    return ((curved + 1.0) / 2.0 * mu + 0.5).floor().long()


def decode(numbers: Tensor, levels: int) -> Tensor:
    """The sample that each level stands for.

    Args:
        numbers: Levels, int64.
        levels: How many there are.

    Returns:
        float32 from -1 to 1, of the same shape.
    """
    mu = levels - 1
    curved = 2.0 * numbers.float() / mu - 1.0
    return torch.sign(curved) * torch.expm1(curved.abs() * math.log1p(mu)) / mu
