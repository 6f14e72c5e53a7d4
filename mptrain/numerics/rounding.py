"""Rounding of weights to BF16 and FP16: how far a weight must be moved, what updates lose, and two ways to lose less.

A weight without an FP32 master copy is rounded after every update. Rounded to the nearest number, it stays as it is
unless the update reaches half-way to the next number: 2^-9 to 2^-8 of a BF16 weight.

Stochastic rounding moves it in proportion to the update (Gupta et al. 2015; Zamirai et al. 2020): to the number above
with the probability with which the exact value lies near it, so that nothing is lost on average. Compensated updates
(Kahan 1965; Zamirai et al. 2020) keep what rounding took, and add it to the next update. Zamirai et al. keep it in
BF16, and so lose updates below 2^-17 of a weight. Here it is exact at the same cost: what rounding an FP32 number to
BF16 takes is an integer of 16 bits, in units of its last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mptrain.numerics.tensors import piece_of
from mptrain.system.device import in_widest

#: Bits of an FP32 number that BF16 has not.
_CUT = 16

#: Multipliers of a 32-bit integer hash of low bias (Wellons 2018, hash-prospector), as signed numbers.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)


def reach(weights: Tensor) -> Tensor:
    """Return half the distance of BF16 or FP16 numbers to their nearer neighbour, float32 of the same shape.

    A smaller update changes nothing, whatever its sign. The nearer neighbour is the one towards zero, which is only
    half as far below a power of two. That of a zero is the smallest subnormal number. NaN for what is not finite.
    """
    bits = weights.detach().view(torch.int16) & 0x7FFF
    above = bits.clamp(min=1)
    distance = above.view(weights.dtype).float() - (above - 1).view(weights.dtype).float()
    return torch.where(weights.isfinite(), distance * 0.5, math.nan)


def stuck(weights: Tensor, step: float) -> Tensor:
    """Return the number of BF16 or FP16 weights that no update of magnitude ``step`` changes; int64, shape ()."""
    pieces = weights.detach().reshape(-1).split(piece_of(weights))
    counts = [(reach(piece) > step).count_nonzero() for piece in pieces]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=weights.device)


def update_sums(before: Tensor, update: Tensor, after: Tensor) -> Tensor:
    """Return what became of updates that were rounded: float64 (or the widest dtype of the device), shape (5,).

    The number of updates that are not zero, and of those that changed nothing; the sums of the magnitudes of both; and
    by how much the weights have moved in the direction of their updates, what rounding moved too far included.

    Args:
        before: Weights as stored, in their format or widened to float32.
        update: Exact change that each was to make, float32.
        after: Weights as stored after it.
    """
    start, end = before.float(), after.float()
    size, stays = update.abs(), start == end
    moved = (end - start) * update.sign()
    lost = size * stays
    sums = [in_widest(each).sum() for each in (size, lost, moved)]
    counts = [in_widest(each.count_nonzero()) for each in (size, lost)]
    return torch.stack([*counts, *sums])


def exact_update(
    kind: str, group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor, gradient: Tensor | None
) -> Tensor | None:
    """Return the update that an optimizer has made before it was rounded, float32; None if its rule is not known.

    It follows from the state as the update has left it. Elements that only weight decay moves have 0.

    Args:
        kind: Class of the optimizer: ``AdamW``, ``Adam`` or ``SGD`` of torch.optim.
        group: Its constants: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``momentum`` and others by torch's names.
        state: Its state of this weight by torch's names, ``step`` among it.
        weight: The weight before the update.
        gradient: The gradient as the optimizer was given it; only SGD needs it.
    """
    rate, decay = group["lr"], group.get("weight_decay", 0.0)  # numbers or tensors, which nothing here reads
    decoupled = kind == "AdamW" or group.get("decoupled_weight_decay")
    change: Tensor
    if kind in ("Adam", "AdamW") and {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
        first, second = (1 - torch.as_tensor(beta, dtype=torch.float32) ** state["step"] for beta in group["betas"])
        square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"].float()
        change = -rate * (state["exp_avg"].float() / first) / ((square / second).sqrt() + group["eps"])
        return torch.where(change == 0, change, change - rate * decay * weight.float()) if decoupled else change
    if kind != "SGD" or gradient is None:
        return None
    given, momentum = gradient.float(), group.get("momentum", 0.0)
    given = (-given if group.get("maximize") else given) + decay * weight.float()
    if not momentum or state.get("momentum_buffer") is None:
        change = -rate * given * (gradient != 0)
        return change
    buffer = state["momentum_buffer"].float()
    change = -rate * (given + momentum * buffer if group.get("nesterov") else buffer)
    return change


def decay_is_lost(dtype: torch.dtype, keep: float) -> bool:
    """Return whether a moment or an average of this dtype cannot fall, because ``keep`` times any value rounds to it.

    True for BF16 from .9981 on: the second moment of Adam with its usual .999 only grows, and an average of weights
    with .9999 never moves.
    """
    # All significands of one binade; those of the others are the same, but for subnormal numbers.
    values = 1 + torch.arange(1 << 10, device="cpu", dtype=torch.float32) / (1 << 10)
    held = values.to(dtype)
    return bool(((held.float() * keep).to(dtype) == held).all())


def round_stochastically(wide: Tensor, into: Tensor, key: Tensor, first: int = 0) -> None:
    """Write FP32 values into a BF16 tensor of the same shape, each rounded up or down at random, without bias.

    The random bits of an element are a function of ``key`` and of its number, which counts from ``first`` in row-major
    order: a shard gets the bits of its elements of the whole. A BF16 number stays what it is.

    Args:
        wide: The values.
        into: The tensor that receives them.
        key: 32 random bits of this update of this parameter (`rounding_key`), int32 of shape (1,).
        first: Number of the first element.
    """
    for piece, out in _in_pieces(wide.detach(), into.detach()):
        count = piece.numel()
        numbers = torch.arange(count, device=piece.device, dtype=torch.int32).add_(_signed(first))
        bits = _mixed(numbers.bitwise_xor_(key)).bitwise_and_((1 << _CUT) - 1).view(piece.shape)
        bits += piece.contiguous().view(torch.int32)
        rounded = bits.bitwise_and_(-1 << _CUT).view(torch.float32)
        out.copy_(torch.where(piece.isfinite(), rounded, piece))
        first += count


def rounding_key(seed: int, step: Tensor, parameter: int) -> Tensor:
    """Return 32 random bits for the update number ``step`` (float32, shape (1,)) of a parameter; int32, shape (1,)."""
    key = torch.full_like(step, _signed(seed), dtype=torch.int32)
    for number in (_signed(seed >> 32), step.to(torch.int32), parameter):
        key = _mixed(key).add_(number)
    return _mixed(key)


def digest_of_bits(tensor: Tensor) -> Tensor:
    """Return a 64-bit sum of hashes of the elements of an FP16 or BF16 tensor and their places; int64, shape ()."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 0
    for (piece,) in _in_pieces(tensor.detach()):
        places = torch.arange(piece.numel(), device=piece.device, dtype=torch.int32).add_(_signed(first))
        bits = piece.reshape(-1).view(torch.int16).to(torch.int32)
        total += _mixed(_mixed(places).add_(bits)).sum(dtype=torch.int64)
        first += piece.numel()
    return total


def _in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape in pieces, in row-major order; those with gaps or another order row by row."""
    most = piece_of(tensors[0])
    if tensors[0].numel() <= most:
        yield tensors
    elif all(each.is_contiguous() for each in tensors):
        yield from zip(*(each.view(-1).split(most) for each in tensors), strict=True)
    else:
        rows = most // tensors[0][0].numel()
        parts = [each.split(rows) if rows else each.unbind() for each in tensors]
        for several in zip(*parts, strict=True):
            yield from _in_pieces(*several)


def _signed(word: int) -> int:
    """Return the lowest 32 bits of an integer as a signed one."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _mixed(bits: Tensor) -> Tensor:
    """Hash int32 numbers in place; each of all 2^32 is the hash of one."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _SECOND
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def round_compensated(wide: Tensor, into: Tensor, compensation: Tensor) -> None:
    """Write FP32 values into a BF16 tensor, rounded to nearest, and what rounding took into an int16 tensor.

    `with_compensation` returns the values again, but for those half-way between two BF16 numbers, which may become the
    FP32 number below. An update of 0 changes neither tensor.
    """
    for values, out, kept in _in_pieces(wide.detach(), into.detach(), compensation):
        rounded = values.to(into.dtype)
        taken = values.contiguous().view(torch.int32) - (_bits(rounded) << _CUT)
        out.copy_(rounded)
        kept.copy_(torch.where(rounded.isfinite(), taken.clamp_(-(1 << 15), (1 << 15) - 1), 0))


def with_compensation(weights: Tensor, compensation: Tensor) -> Tensor:
    """Return the float32 values of which `round_compensated` has made BF16 weights and their compensation.

    A weight that somebody else has set since, as pruning does, has no compensation if it is not the rounding of that
    value: beside 0, a compensation below 0 would be NaN.
    """
    values = torch.empty_like(weights, dtype=torch.float32, requires_grad=False)
    for own, kept, out in _in_pieces(weights.detach(), compensation, values):
        exact = ((_bits(own) << _CUT) + kept).view(torch.float32)
        out.copy_(torch.where(exact.to(own.dtype) == own, exact, own.float()))
    return values


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16).to(torch.int32)
