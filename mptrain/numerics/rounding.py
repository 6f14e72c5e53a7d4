"""Rounding tensors to narrower formats."""

from __future__ import annotations

import torch
from torch import Tensor


def limited(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor whose finite values are clamped to the range of a floating-point dtype; infinities and NaN stay."""
    largest = torch.finfo(dtype).max
    return torch.where(value.isfinite(), value.clamp(-largest, largest), value)


def count_beyond(value: Tensor, dtype: torch.dtype) -> int:
    """Count the finite values whose magnitude a floating-point dtype cannot hold; waits for the device."""
    return int(((value.abs() > torch.finfo(dtype).max) & value.isfinite()).sum())


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor in another dtype; finite values beyond its range become its largest, 65504 in FP16, instead of inf."""
    narrows = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    return (limited(value, dtype) if narrows else value).to(dtype)


def about_clamped(counts: dict[str, int], dtype: torch.dtype) -> str:
    """One sentence about values that were clamped to the range of a dtype; counts of them by the tensor's name."""
    named = ", ".join(f"{name} ({count:,})" for name, count in list(counts.items())[:3])
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    number, form = sum(counts.values()), str(dtype).removeprefix("torch.")
    return (
        f"{number:,} value{'s' if number != 1 else ''} in weights and buffers {'are' if number != 1 else 'is'} beyond "
        f"{torch.finfo(dtype).max:.6g}, the largest of {form}, and clamped to it: {named}{more}"
    )
