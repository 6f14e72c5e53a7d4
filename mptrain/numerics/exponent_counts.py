"""Exponent histograms of tensors: counts of values by floor(log2 |x|), taken on the tensor's device from the bits.

The exponent of an FP32 number is stored in eight bits, so a histogram over all exponents needs no logarithm and has no
out-of-range values. FP16 and bfloat16 values convert to FP32 exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.numerics.overflow_check import flat, memory_order
from mptrain.system.records import ExponentCounts

#: Layout of the result of `count_exponents`: 256 biased exponents, zeros, NaN, bits of the largest finite magnitude.
_BINS = 256
PLACES = _BINS + 3
_ZEROS, _NANS, _LARGEST = _BINS, _BINS + 1, _BINS + 2
_INF_BITS = 0x7F800000
_BIAS = 127
_MANTISSA = 23

#: Elements that are counted together: their temporary copies take 0.5 GB of a device's memory.
_PIECE = 1 << 24


def count_exponents(tensor: Tensor) -> Tensor:
    """Count the values of a tensor of any float dtype (FP64 is rounded to FP32) by exponent, without synchronising.

    The result is int64 of shape (`PLACES`,) on the tensor's device: the numbers of values with each of the 256 biased
    FP32 exponents, the numbers of zeros and NaN, and the bits of the largest finite magnitude in FP32.
    """
    found = torch.zeros(PLACES, dtype=torch.int64, device=tensor.device)
    values = flat(tensor.detach(), memory_order(tensor))
    for piece in values.split(_PIECE) if len(values) else ():
        found = add_counts(found, _count(piece))
    return found


def _count(values: Tensor) -> Tensor:
    bits = values.float().view(torch.int32).bitwise_and(0x7FFFFFFF)
    found = torch.zeros(PLACES, dtype=torch.int64, device=values.device)
    exponents = bits.bitwise_right_shift(_MANTISSA)
    if values.is_cuda:  # bincount synchronises with the device to read the largest value
        found[:_BINS] = torch.histc(exponents, bins=_BINS, min=0, max=_BINS)
    else:
        found[:_BINS] = torch.bincount(exponents, minlength=_BINS)
    found[_ZEROS] = torch.count_nonzero(bits == 0)
    found[_NANS] = torch.count_nonzero(bits > _INF_BITS)
    found[_LARGEST] = bits.mul(bits < _INF_BITS).max()
    return found


def add_counts(one: Tensor, other: Tensor) -> Tensor:
    """Add up two results of `count_exponents` on the same device; of the two largest magnitudes, the larger stays."""
    return torch.cat([one[:_LARGEST] + other[:_LARGEST], torch.maximum(one[_LARGEST:], other[_LARGEST:])])


def read_counts(places: list[int], dtype: torch.dtype) -> ExponentCounts:
    """Return the exponent histogram of ``count_exponents(tensor).tolist()``; FP32 subnormals count as 2^-127."""
    zeros, nans = places[_ZEROS], places[_NANS]
    bins = places[: _BINS - 1]
    bins[0] -= zeros
    filled = [at for at, count in enumerate(bins) if count]
    first, last = (filled[0], filled[-1]) if filled else (0, -1)
    largest = torch.tensor(places[_LARGEST], dtype=torch.int32, device="cpu").view(torch.float32).item()
    return ExponentCounts(
        dtype=str(dtype).removeprefix("torch."),
        zeros=zeros,
        inf=places[_BINS - 1] - nans,
        nan=nans,
        largest=largest,
        lowest=first - _BIAS if filled else 0,
        counts=tuple(bins[first : last + 1]),
    )
