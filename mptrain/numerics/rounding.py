"""Conversion of tensors to narrower dtypes without overflow of finite values."""

from __future__ import annotations

import torch
from torch import Tensor


def limited(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp finite values to the range of a float dtype, ±65504 for FP16; inf, NaN and the tensor's own dtype stay."""
    largest = torch.finfo(dtype).max
    return torch.where(value.isfinite(), value.clamp(-largest, largest), value)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another float dtype, clamping finite values to its range; inf and NaN stay."""
    narrows = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    return (limited(value, dtype) if narrows else value).to(dtype)
