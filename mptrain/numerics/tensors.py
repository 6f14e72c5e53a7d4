"""Exponent histograms of tensors, conversion to narrower dtypes, and shards of tensors.

An exponent histogram counts values by floor(log2 |x|), on the tensor's device, from the bits.

The exponent of an FP32 number is stored in eight bits, so a histogram over all exponents needs no logarithm and has no
out-of-range values. FP16 and bfloat16 values convert to FP32 exactly.

Shards are those of ``torch.distributed.fsdp.fully_shard``: contiguous along the first dimension and of equal length,
except the last ones, which may be shorter or empty. Each rank holds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from mptrain.system.records import ExponentCounts
from mptrain.system.torch_private import local_shard

#: Layout of the result of `count_exponents`: 256 biased exponents, zeros, NaN, bits of the largest finite magnitude.
_BINS = 256
PLACES = _BINS + 3
_ZEROS, _NANS, _LARGEST = _BINS, _BINS + 1, _BINS + 2
_INF_BITS = 0x7F800000
_BIAS = 127
_MANTISSA = 23

#: Elements that are counted together, or a 16th of a larger tensor: temporary copies take eight bytes for each, so less
#: than the tensor itself, or .5 MB. Pieces of 4 MB left holes in the heap of a CPU: 75 MB more for 48 layers of 2 MB.
PIECE = 1 << 16
#: The same on other devices, where a launch costs more than memory.
_DEVICE_PIECE = 1 << 19


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the order of a tensor's dimensions in memory, slowest first: (0, 2, 3, 1) for channels_last.

    None means that the tensor is contiguous, or has gaps in memory so that no order makes it contiguous.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def flat(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return a tensor with its dimensions in a `memory_order` flattened; copied if it has gaps in memory."""
    return (tensor if order is None else tensor.permute(order)).reshape(-1)


def piece_of(tensor: Tensor) -> int:
    """Return the number of elements of a tensor that are best computed together, with temporary copies of them."""
    return PIECE if tensor.is_cpu else _DEVICE_PIECE


def is_countable(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be counted: dense, and not of a class with operators of its own."""
    own_operators = type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and not own_operators and (tensor.is_floating_point() or tensor.is_complex())


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as its real and imaginary parts, in a last dimension of two; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor of eight bits or less, for which torch has few operators, in FP32; any other as it is."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def count_exponents(tensor: Tensor, total: Tensor | None = None) -> Tensor:
    """Count the values of a tensor of any float dtype (FP64 is rounded to FP32) by exponent, without synchronising.

    The result is int64 of shape (`PLACES`,) on the tensor's device: the numbers of values with each of the 256 biased
    FP32 exponents, the numbers of zeros and NaN, and the bits of the largest finite magnitude in FP32. It is added to
    ``total``, an earlier result or zeros, if given: of the two largest magnitudes, the larger stays.
    """
    if total is None:
        total = torch.zeros(PLACES, dtype=torch.int64, device=tensor.device)
    values = as_real(tensor.detach())
    least, most = piece_of(values), values.numel() >> 4
    for piece in _pieces(values, most if most > least else least) if values.numel() else ():
        counts = _count(piece)
        total[:_LARGEST] += counts[:_LARGEST]
        torch.maximum(total[_LARGEST:], counts[_LARGEST:], out=total[_LARGEST:])
    return total


def _pieces(values: Tensor, most: int) -> Iterable[Tensor]:
    """Yield all values in flat pieces of at most ``most``; one with gaps in memory is not copied as a whole."""
    order = memory_order(values)
    if order is not None or values.is_contiguous() or values.numel() <= most:
        yield from flat(values, order).split(most)
        return
    rows = most // values[0].numel()
    for part in values.split(rows) if rows else values:
        yield from _pieces(part, most)


def _count(values: Tensor) -> Tensor:
    bits = values.float().view(torch.int32).bitwise_and(0x7FFFFFFF)
    counts = torch.zeros(PLACES, dtype=torch.int64, device=values.device)
    exponents = bits.bitwise_right_shift(_MANTISSA)
    if values.is_cuda:  # bincount synchronises with the device to read the largest value
        counts[:_BINS] = torch.histc(exponents, bins=_BINS, min=0, max=_BINS)
    else:
        counts[:_BINS] = torch.bincount(exponents, minlength=_BINS)
    del exponents
    counts[_ZEROS] = torch.count_nonzero(bits == 0)
    counts[_NANS] = torch.count_nonzero(bits > _INF_BITS)
    counts[_LARGEST] = bits.mul_(bits < _INF_BITS).max()
    return counts


def scaled_counts(counts: list[int], some: int, of: int) -> list[int]:
    """Return counts of ``some`` elements as those of all ``of``, of which they are a sample."""
    return [round(count * of / some) for count in counts[:_LARGEST]] + counts[_LARGEST:]


def read_counts(counts: list[int], dtype: torch.dtype) -> ExponentCounts:
    """Return the exponent histogram of ``count_exponents(tensor).tolist()``; FP32 subnormals count as 2^-127."""
    zeros, nans = counts[_ZEROS], counts[_NANS]
    bins = counts[: _BINS - 1]
    bins[0] -= zeros
    filled = [at for at, count in enumerate(bins) if count]
    first, last = (filled[0], filled[-1]) if filled else (0, -1)
    largest = torch.tensor(counts[_LARGEST], dtype=torch.int32, device="cpu").view(torch.float32).item()
    return ExponentCounts(
        dtype=str(dtype).removeprefix("torch."),
        zeros=zeros,
        inf=counts[_BINS - 1] - nans,
        nan=nans,
        largest=largest,
        lowest=first - _BIAS if filled else 0,
        counts=tuple(bins[first : last + 1]),
    )


def limited(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp finite values to the range of a float dtype, ±65504 for FP16; inf, NaN and the tensor's own dtype stay."""
    largest = torch.finfo(dtype).max
    return torch.where(value.isfinite(), value.clamp(-largest, largest), value)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another float dtype, clamping finite values to its range; inf and NaN stay."""
    narrows = torch.finfo(dtype).max < torch.finfo(value.dtype).max
    return (limited(value, dtype) if narrows else value).to(dtype)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded (a DTensor), so that this rank holds only a part of it."""
    return hasattr(tensor, "placements")


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether no rank before this one holds the same shard of a sharded tensor, as replicas do (HSDP)."""
    mesh, placements = cast("Any", tensor).device_mesh, cast("Any", tensor).placements
    return {mesh.get_local_rank(dim) for dim, placement in enumerate(placements) if placement.is_replicate()} <= {0}


def part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, in the same memory and without autograd graph; a plain tensor is returned unchanged."""
    return local_shard(tensor) if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole, by a collective that every rank must call; a plain tensor stays unchanged."""
    return cast("Any", tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def as_part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's plain shard in a DTensor like ``like``; return it unchanged if sharded or ``like`` is plain."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    kind = cast("Any", like)
    return DTensor.from_local(
        tensor, kind.device_mesh, kind.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_for(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor, equal on all ranks, that this rank holds of a sharded one of its shape.

    A sharded tensor gives its own shard. If ``like`` is plain, the tensor is returned whole.
    """
    if is_sharded(tensor) or not is_sharded(like):
        return part(tensor)
    mesh = cast("Any", like).device_mesh
    length = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * length  # at or past the end for ranks with an empty shard
    return tensor[first : first + length]


def first_element(tensor: Tensor) -> int:
    """Return the number of the first element of this rank's shard in the whole, in row-major order; 0 if not sharded.

    Raises ValueError for a tensor that is sharded along another dimension than the first, or along several of a mesh.
    """
    if not is_sharded(tensor):
        return 0
    mesh, placements = cast("Any", tensor).device_mesh, cast("Any", tensor).placements
    sharded = [(dim, placement) for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not sharded:
        return 0
    dim, placement = sharded[0]
    if len(sharded) > 1 or not placement.is_shard(0):
        raise ValueError(f"a tensor with placements {placements}, and only shards along the first dimension are known")
    first: int = min(-(-len(tensor) // mesh.size(dim)) * mesh.get_local_rank(dim), len(tensor))
    return first * math.prod(tensor.shape[1:])
