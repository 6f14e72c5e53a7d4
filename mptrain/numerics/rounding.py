"""Rounding tensors to narrower formats."""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.numerics.formats import FLOAT16


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor in another dtype; what FP16 cannot hold becomes +-65504 instead of inf."""
    return value.clamp(-FLOAT16.max, FLOAT16.max).to(dtype) if dtype == torch.float16 else value.to(dtype)
