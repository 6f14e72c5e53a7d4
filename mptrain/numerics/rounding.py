"""Conversion of tensors to narrower dtypes without overflow of finite values."""

from __future__ import annotations

import torch
from torch import Tensor


def limited(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp the finite values of a tensor to the range of a floating-point dtype, keeping the tensor's own dtype.

    Infinities and NaN stay.

    Args:
        value: A floating-point tensor of any shape.
        dtype: The dtype to whose range values are clamped, such as float16: ±65504.
    """
    largest = torch.finfo(dtype).max
    return torch.where(value.isfinite(), value.clamp(-largest, largest), value)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another floating-point dtype, clamping finite values to its range: to ±65504 for FP16.

    Infinities and NaN stay.
    """
    narrows = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    return (limited(value, dtype) if narrows else value).to(dtype)
