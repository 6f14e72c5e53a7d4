"""µ-law companding: quantise audio samples to levels that are denser for quiet sounds, and decode them.

The curve is that of ITU-T G.711 with µ one less than the number of levels, rounded to the nearest level, as in van den
Oord et al. (2016, section 2.2). G.711's own code differs: it approximates the curve by straight lines. Computation is
in FP32, on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def encode(samples: Tensor, levels: int) -> Tensor:
    """Quantise samples to levels from 0 to ``levels - 1``, int64; values beyond -1 to 1 are clipped.

    Silence is the upper of the two middle levels.
    """
    mu = levels - 1
    wave = samples.float().clamp(-1.0, 1.0)
    curved = torch.sign(wave) * torch.log1p(mu * wave.abs()) / math.log1p(mu)
    return ((curved + 1.0) / 2.0 * mu + 0.5).floor().long()


def decode(numbers: Tensor, levels: int) -> Tensor:
    """Convert levels, int64, back to samples, float32 from -1 to 1; the inverse of `encode` up to quantisation."""
    mu = levels - 1
    curved = 2.0 * numbers.float() / mu - 1.0
    return torch.sign(curved) * torch.expm1(curved.abs() * math.log1p(mu)) / mu
