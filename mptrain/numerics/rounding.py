"""Rounding tensors to narrower formats."""

from __future__ import annotations

import torch
from torch import Tensor


def limited(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor whose finite values are clamped to the range of a floating-point dtype; infinities and NaN stay."""
    largest = torch.finfo(dtype).max
    return torch.where(value.isfinite(), value.clamp(-largest, largest), value)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor in another dtype; finite values beyond its range become its largest, 65504 in FP16, instead of inf."""
    narrows = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    return (limited(value, dtype) if narrows else value).to(dtype)
