"""Whether a step's gradients are finite, and how large they are, as device values that the host never waits for.

The norm of each gradient is taken in FP64. No FP32 gradient can overflow there, so a non-finite norm means a
non-finite element, and one pass serves the verdict, the clipping norm and the names of the offenders. An FP32 norm
would call [1e30, 1e30] an overflow although both elements are finite. So a device without FP64 divides by the largest magnitude
first (`float32_norm`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mptrain.device import capabilities
from mptrain.numerics.formats import FLOAT32
from mptrain.torch_private import foreach_copy_, foreach_norm

#: Elements whose squares `float32_norm` adds in one sum.
_ROW = 4096


class Verdict(NamedTuple):
    """Judgement of one step's gradients. All tensors live on the training device; float64 is float32 where it has no FP64.

    Attributes:
        overflow: bool, shape (1,): some gradient holds inf or NaN, or the scale is 0; exactly where ``grad_norm`` is
            not finite.
        applied: bool, shape (1,): whether the update happens.
        skip: float32, shape (1,): 1 where the update is refused, else 0. Exactly 0 or 1, because torch's fused
            optimizers compare with 1.
        grad_norm: float64, shape (1,): L2 norm of the unscaled gradients before clipping; non-finite on overflow.
        norms: float64, shape (P,): L2 norm of each parameter's gradient, still scaled; inf or NaN names an offender,
            -1 a parameter without a gradient. All 0 where only offenders were asked for and there is none.
        measured: float64, shape (1,): what the scaler asked to know of the gradients (`mptrain.numerics.measures`);
            None where it asks for nothing.
        known_finite: The host knows already that nothing overflowed; never so on a device that it would have to wait for.
    """

    overflow: Tensor
    applied: Tensor
    skip: Tensor
    grad_norm: Tensor
    norms: Tensor
    measured: Tensor | None = None
    known_finite: bool = False


#: Elements whose squares `HostJudge` adds in FP32 before it goes on in FP64.
_HOST_ROW = 256

#: Norms from which on squares that vanish in FP32 do not count: 2^30 elements below 2^-63 have a norm of 2^-48.
_SURE = 2.0**-30

#: Elements of a piece for each thread: 256 KiB as FP64, which stay in a core's second cache between their conversion and their sum.
_PIECE = 32768


def gradient_norms(grads: list[Tensor]) -> Tensor:
    """The L2 norm of each gradient in FP64.

    Args:
        grads: P tensors of any float dtype and shape on one device.

    Returns:
        float64, shape (P,); float32 on a device without FP64.
    """
    if not grads:
        return torch.zeros(0, dtype=torch.float64)
    if not capabilities(grads[0].device).fp64:
        return torch.stack([float32_norm(grad) for grad in grads])
    large = {index: pieces for index, grad in enumerate(grads) if (pieces := _pieces(grad))}
    small = grads if not large else [grad for index, grad in enumerate(grads) if index not in large]
    norms = iter(foreach_norm(small, 2, dtype=torch.float64) if small else ())
    return torch.stack([_norm_of(large[at]) if at in large else next(norms) for at in range(len(grads))])


class HostJudge:
    """Judge of gradients in a CPU's memory, where the host reads for nothing: finite ones take a handful of operators.

    In a step of a small network the caches have been used up by the passes, so that what counts is how many operators there are.
    In one of a large network it is the way through memory: there squares are added in FP32 in rows of 256, and in FP64 from there.

    Args:
        weights: P tensors in a CPU's memory; the gradient of each has its shape.
        exact: Add the squares of large tensors in FP64 alone, which takes four times as long. It is for clipping, where
            the norm changes weights; with FP32 rows it is off by less than 2^-16, in whatever order a row is added.
    """

    def __init__(self, weights: Sequence[Tensor], *, exact: bool = True) -> None:
        self._exact = exact
        size = _PIECE * torch.get_num_threads()
        self._room = torch.zeros(size, dtype=torch.float64)  # for all: new memory would cost more than the sum
        self._large = {index: memory_order(w) for index, w in enumerate(weights) if w.numel() > size}
        self._groups: list[_Group] = []
        members: list[int] = []
        for index, weight in enumerate(weights):
            if weight.numel() <= size:
                if sum(weights[member].numel() for member in members) + weight.numel() > size:
                    self._groups.append(_Group(self._room, weights, members))
                    members = []
                members.append(index)
        if members:
            self._groups.append(_Group(self._room, weights, members))
        self._overflow = torch.zeros(1, dtype=torch.bool)
        self._applied = torch.ones(1, dtype=torch.bool)
        self._skip = torch.zeros(1)
        self._norms = torch.zeros(len(weights), dtype=torch.float64)

    def __call__(self, grads: Sequence[Tensor], scale: Tensor) -> Verdict | None:
        """Return the verdict on P gradients that are finite, without their norms; None where one is not, or the scale is 0."""
        squares = [group.square(grads) for group in self._groups]
        large = [_flat(grads[index], order) for index, order in self._large.items()]
        if self._exact or any(grad.dtype != torch.float32 for grad in large):
            squares += self._squares(large)
        else:
            rows = [_square_by_rows(grad) for grad in large]
            sure = _SURE**2 <= math.fsum([*squares, *rows]) < math.inf
            squares += rows if sure else self._squares(large)
        divisor = scale.item()
        grad_norm = math.sqrt(math.fsum(squares)) / divisor if divisor else math.nan
        if not math.isfinite(grad_norm):
            return None
        total = torch.tensor([grad_norm], dtype=torch.float64)
        return Verdict(self._overflow, self._applied, self._skip, total, self._norms, known_finite=True)

    def _squares(self, grads: Sequence[Tensor]) -> list[float]:
        """Return sums of squares in FP64 that together are those of all elements of one-dimensional tensors."""
        squares = []
        for grad in grads:
            for piece in grad.split(len(self._room)):
                wide = self._room[: len(piece)].copy_(piece)
                squares.append(torch.dot(wide, wide).item())
        return squares


class _Group:
    """Small tensors that have a place beside each other in a room of FP64, each in its own memory order but without its gaps."""

    def __init__(self, room: Tensor, weights: Sequence[Tensor], members: Sequence[int]) -> None:
        self._members = list(members)
        begins = [0, *itertools.accumulate(weights[index].numel() for index in members)]
        self._room = room[: begins[-1]]
        self._places = [
            room.as_strided(weights[index].shape, torch.empty_like(weights[index], device="meta").stride(), begin)
            for index, begin in zip(members, begins, strict=False)
        ]

    def square(self, grads: Sequence[Tensor]) -> float:
        """Return the sum of the squares of all members; of FP32 numbers it fits FP64."""
        foreach_copy_(self._places, [grads[index] for index in self._members])
        return torch.dot(self._room, self._room).item()


def _square_by_rows(grad: Tensor) -> float:
    """Return the sum of the squares of FP32 numbers of one dimension, added in FP32 within a row; inf where one of them is too large."""
    whole = len(grad) // _HOST_ROW * _HOST_ROW
    norms = torch.linalg.vector_norm(grad[:whole].view(-1, _HOST_ROW), dim=1).double()
    rest = grad[whole:].double()
    return torch.dot(norms, norms).item() + torch.dot(rest, rest).item()


def _pieces(grad: Tensor) -> Sequence[Tensor]:
    """A large gradient in a CPU's memory, cut into pieces of one dimension; nothing of any other.

    There torch's own norm makes an FP64 copy of the whole, and takes three times as long.
    """
    if not capabilities(grad.device).host or grad.dtype == torch.float64 or grad.numel() <= _PIECE:
        return ()
    pieces: Sequence[Tensor] = _flat(grad, memory_order(grad)).split(_PIECE * torch.get_num_threads())
    return pieces


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions in the order of memory, as channels_last permutes them; None where they are in it, or there are gaps."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def _flat(grad: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return the elements of a tensor in an order of its dimensions; a copy where memory has another order, or gaps."""
    return (grad if order is None else grad.permute(order)).reshape(-1)


def _norm_of(pieces: Sequence[Tensor]) -> Tensor:
    """The norm of what was cut into pieces, a float64 scalar; a square of an FP32 number fits FP64."""
    squares = [torch.dot(piece, piece) for piece in map(torch.Tensor.double, pieces)]  # one by one, for the cache
    return (squares[0] if len(squares) == 1 else torch.stack(squares).sum()).sqrt()


def float32_norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a tensor in FP32, for devices without FP64; non-finite exactly where an element is.

    Elements are divided by the largest magnitude before they are squared: none overflows, and those that vanish are below 2^-63 of
    the largest. Squares are added in rows: in whatever order a row is added, the norm is off by less than 2^-11 of itself for
    up to 2^36 elements; 2^-22 was measured for up to 50 million on a CPU, where one sum over all of them was off by 2^-8. A
    norm beyond FP32 is the largest number of FP32; one below its normal numbers may be 0.
    """
    flat = tensor.detach().float().flatten()
    if not flat.numel():
        return flat.new_zeros(())
    largest = torch.linalg.vector_norm(flat, math.inf)
    part = flat / torch.where(largest > 0, largest, 1.0)
    while part.numel() > _ROW:
        whole = part.numel() // _ROW * _ROW
        rows, rest = part[:whole].view(-1, _ROW), part[whole:]
        part = torch.cat([torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(rest).view(1)])
    norm = largest * torch.linalg.vector_norm(part)
    return torch.where(largest.isfinite(), norm.clamp(max=FLOAT32.max), largest)


def judge(
    norms: Tensor,
    scale: Tensor,
    *,
    refuses: bool,
    complete: bool = False,
    measured: Tensor | None = None,
) -> Verdict:
    """Turn per-parameter norms into a verdict.

    Args:
        norms: float64, shape (P,): norms of the scaled gradients; -1 where a parameter had none.
        scale: float32, shape (1,): the loss scale these gradients carry.
        refuses: Whether an overflow refuses the update; else it is applied all the same.
        complete: Every parameter had a gradient.
        measured: What the scaler asked to know.
    """
    present = norms if complete else norms.clamp(min=0.0)  # clamp keeps NaN and inf
    grad_norm = (
        torch.linalg.vector_norm(present, keepdim=True) / scale
        if present.dtype == torch.float64
        else _float32_total(present, scale)
    )
    # NaN for inf and NaN, else 0. A scale that has fallen to 0 is found as well: nothing can be unscaled by it.
    rest = grad_norm - grad_norm
    overflow = torch.ne(rest, rest)
    if refuses:
        applied, skip = torch.eq(rest, rest), overflow.to(torch.float32)
    else:
        applied, skip = torch.ones_like(overflow), torch.zeros_like(scale)
    if measured is not None:
        measured = measured.to(norms.device)  # it is elsewhere only where there was no gradient to measure
    return Verdict(overflow, applied, skip, grad_norm, norms, measured)


def _float32_total(norms: Tensor, scale: Tensor) -> Tensor:
    """Return the norm of FP32 norms over a scale as FP32 of shape (1,); beyond FP32 it is the largest number, as in `float32_norm`."""
    largest = norms.amax().view(1)
    total = largest / scale * float32_norm(norms / torch.where(largest > 0, largest, 1.0))
    return torch.where(largest.isfinite() & (scale > 0), total.clamp(max=FLOAT32.max), largest / scale)


def clip_coefficient(grad_norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings a gradient norm down to ``max_norm``, at most 1 (as `torch.nn.utils.clip_grad_norm_`).

    A non-finite norm gives 1: clipping by it would zero the finite gradients and go on as if nothing had happened.

    Args:
        grad_norm: float64, shape (1,): unscaled norm.
        max_norm: The largest norm to let through.

    Returns:
        float64, shape (1,).
    """
    coefficient = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return torch.where(grad_norm.isfinite(), coefficient, 1.0)
