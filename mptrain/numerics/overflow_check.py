"""Overflow check, gradient norms and other measurements of a step, as device tensors without host synchronisation.

Gradient norms are computed in FP64. No FP32 gradient can overflow there, so a non-finite norm means a non-finite
element, and one pass yields the overflow check, the norm for clipping and the offending parameters. An FP32 norm would
report an overflow for [1e30, 1e30] although both elements are finite. A device without FP64 therefore divides by the
largest magnitude first (`float32_norm`). There, every float64 result below is float32.

Measurements stay on the device and never synchronise. Only the step of a scaler that requests one has its operators.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mptrain.numerics.formats import FLOAT32
from mptrain.numerics.tensors import flat, memory_order
from mptrain.system.device import capabilities, in_widest, widest
from mptrain.system.torch_private import foreach_copy_, foreach_norm

#: Elements whose squares `float32_norm` adds in one sum.
_ROW = 4096


class Verdict(NamedTuple):
    """Result of a training step's overflow check, on the training device.

    Attributes:
        overflow: bool, shape (1,): ``grad_norm`` is not finite: a gradient has inf or NaN, or the scale is 0.
        applied: bool, shape (1,): the update is applied.
        skip: float32, shape (1,): 1 if the update is skipped, else 0, exactly, because torch's fused optimizers compare
            with 1.
        grad_norm: float64, shape (1,): L2 norm of the unscaled gradients before clipping; non-finite on overflow.
        norms: float64, shape (P,): L2 norm of each parameter's scaled gradient; inf or NaN on overflow, -1 for a
            parameter without a gradient. All 0 if only offending parameters are requested and there are none.
        measured: float64, shape (1,): the measurement that the scaler requests, or None.
        known_finite: True if the host already knows that nothing overflowed; always False where that requires
            synchronisation.
    """

    overflow: Tensor
    applied: Tensor
    skip: Tensor
    grad_norm: Tensor
    norms: Tensor
    measured: Tensor | None = None
    known_finite: bool = False


#: Elements whose squares `HostJudge` adds in FP32 before it continues in FP64.
_HOST_ROW = 256

#: Norms from which on squares that underflow in FP32 are negligible: 2^30 elements below 2^-63 have a norm of 2^-48.
_SURE = 2.0**-30

#: Elements of a chunk for each thread: 256 KiB as FP64, which stay in the L2 cache between conversion and sum.
_PIECE = 32768


def gradient_norms(grads: list[Tensor]) -> Tensor:
    """Return the L2 norm of each of P gradients on one device, float64 (P,); no finite element overflows there."""
    if not grads:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if not capabilities(grads[0].device).fp64:
        return torch.stack([float32_norm(grad) for grad in grads])
    large = {index: pieces for index, grad in enumerate(grads) if (pieces := _pieces(grad))}
    small = grads if not large else [grad for index, grad in enumerate(grads) if index not in large]
    norms = iter(foreach_norm(small, 2, dtype=torch.float64) if small else ())
    return torch.stack([_norm_of(large[at]) if at in large else next(norms) for at in range(len(grads))])


class HostJudge:
    """Fast overflow check and gradient norm of a step for gradients in CPU memory, which the host reads directly.

    If the call returns None, a gradient is not finite, and `judge` finds the offending parameters. For small networks
    the cost is the number of operators, because the forward and backward passes have filled the caches. For large
    networks it is memory bandwidth: squares are added in FP32 in rows of 256, and the rows in FP64.

    Args:
        weights: P tensors in CPU memory; each gradient has the shape of its weight.
        exact: Add the squares of large tensors in FP64 only, which takes four times as long. Used for clipping, where
            the norm changes the weights. With FP32 rows the relative error is below 2^-16 in any summation order.
    """

    def __init__(self, weights: Sequence[Tensor], *, exact: bool = True) -> None:
        self._exact = exact
        size = _PIECE * torch.get_num_threads()
        self._room = torch.zeros(
            size, dtype=torch.float64, device="cpu"
        )  # shared: an allocation would cost more than the sum
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
        self._overflow = torch.zeros(1, dtype=torch.bool, device="cpu")
        self._applied = torch.ones(1, dtype=torch.bool, device="cpu")
        self._skip = torch.zeros(1, device="cpu")
        self._norms = torch.zeros(len(weights), dtype=torch.float64, device="cpu")

    def __call__(self, grads: Sequence[Tensor], scale: Tensor) -> Verdict | None:
        """Return the verdict on P scaled gradients, in the order of the weights; None on overflow or a scale of 0.

        ``scale`` is the loss scale, float32 of shape (1,). The norms of single gradients in the verdict are 0.
        """
        squares = [group.square(grads) for group in self._groups]
        large = [flat(grads[index], order) for index, order in self._large.items()]
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
        total = torch.full((1,), grad_norm, dtype=torch.float64, device="cpu")
        return Verdict(self._overflow, self._applied, self._skip, total, self._norms, known_finite=True)

    def _squares(self, grads: Sequence[Tensor]) -> list[float]:
        squares = []
        for grad in grads:
            for piece in grad.split(len(self._room)):
                wide = self._room[: len(piece)].copy_(piece)
                squares.append(torch.dot(wide, wide).item())
        return squares


class _Group:
    """Small tensors packed into one FP64 buffer, each in its own memory order and without gaps."""

    def __init__(self, room: Tensor, weights: Sequence[Tensor], members: Sequence[int]) -> None:
        self._members = list(members)
        begins = [0, *itertools.accumulate(weights[index].numel() for index in members)]
        self._room = room[: begins[-1]]
        self._places = [
            room.as_strided(weights[index].shape, torch.empty_like(weights[index], device="meta").stride(), begin)
            for index, begin in zip(members, begins, strict=False)
        ]

    def square(self, grads: Sequence[Tensor]) -> float:
        """Return the sum of the squares of all members; for FP32 numbers it cannot overflow FP64."""
        foreach_copy_(self._places, [grads[index] for index in self._members])
        return torch.dot(self._room, self._room).item()


def _square_by_rows(grad: Tensor) -> float:
    """Return the sum of squares of a one-dimensional FP32 tensor, in FP32 within rows; inf if a square overflows."""
    whole = len(grad) // _HOST_ROW * _HOST_ROW
    norms = torch.linalg.vector_norm(grad[:whole].view(-1, _HOST_ROW), dim=1).double()
    rest = grad[whole:].double()
    return torch.dot(norms, norms).item() + torch.dot(rest, rest).item()


def _pieces(grad: Tensor) -> Sequence[Tensor]:
    """Split a large CPU gradient for speed: torch's own norm, with an FP64 copy of all of it, takes 3 times as long."""
    if not capabilities(grad.device).host or grad.dtype == torch.float64 or grad.numel() <= _PIECE:
        return ()
    pieces: Sequence[Tensor] = flat(grad, memory_order(grad)).split(_PIECE * torch.get_num_threads())
    return pieces


def _norm_of(pieces: Sequence[Tensor]) -> Tensor:
    """Return the norm of all chunks as a float64 scalar; the square of an FP32 number cannot overflow FP64."""
    squares = [torch.dot(piece, piece) for piece in map(torch.Tensor.double, pieces)]  # one by one, for cache locality
    return (squares[0] if len(squares) == 1 else torch.stack(squares).sum()).sqrt()


def float32_norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a float tensor in FP32, shape (), for devices without FP64; inf or NaN if any element is.

    Elements are divided by the largest magnitude before squaring: no square overflows, and only elements below 2^-63 of
    the largest underflow. Squares are added in rows, so the relative error is below 2^-11 for up to 2^36 elements in
    any summation order. On a CPU it measured 2^-22 for up to 50 million elements, where a single sum was off by 2^-8. A
    norm of finite elements beyond FP32 becomes the largest FP32 number; one below the normal range may become 0.
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
    skip_on_overflow: bool,
    complete: bool = False,
    measured: Tensor | None = None,
) -> Verdict:
    """Compute the overflow verdict of a step from its gradient norms, without synchronising with the host.

    ``norms`` are the L2 norms of P scaled gradients, float64; -1 for a parameter without a gradient, of which there is
    none if ``complete``. ``scale``, float32, and the measurement that the scaler requests, if any, have shape (1,).
    ``skip_on_overflow`` skips the update on overflow; otherwise it is always applied.
    """
    present = norms if complete else norms.clamp(min=0.0)  # clamp keeps NaN and inf
    grad_norm = (
        torch.linalg.vector_norm(present, keepdim=True) / scale
        if present.dtype == torch.float64
        else _float32_total(present, scale)
    )
    # NaN for inf and NaN, else 0. This also detects a scale of 0, which cannot be divided by.
    rest = grad_norm - grad_norm
    overflow = torch.ne(rest, rest)
    if skip_on_overflow:
        applied, skip = torch.eq(rest, rest), overflow.to(torch.float32)
    else:
        applied, skip = torch.ones_like(overflow), torch.zeros_like(scale)
    if measured is not None:
        measured = measured.to(norms.device)  # on another device only if there was no gradient to measure
    return Verdict(overflow, applied, skip, grad_norm, norms, measured)


def _float32_total(norms: Tensor, scale: Tensor) -> Tensor:
    """Return the norm of FP32 norms divided by a scale, FP32 of shape (1,); clamped to FP32 as in `float32_norm`."""
    largest = norms.amax().view(1)
    total = largest / scale * float32_norm(norms / torch.where(largest > 0, largest, 1.0))
    return torch.where(largest.isfinite() & (scale > 0), total.clamp(max=FLOAT32.max), largest / scale)


class OverflowCheck:
    """Check of a step's gradients for overflow, which also computes their norms.

    Args:
        weights: P tensors on one device; each gradient has the shape of its weight.
        exact: As for `HostJudge`, which is used where the host reads the memory without synchronising.
    """

    def __init__(self, weights: Sequence[Tensor], *, exact: bool = True) -> None:
        device = weights[0].device
        has = capabilities(device)
        self._host_judge = HostJudge(weights, exact=exact) if has.host and has.fp64 else None
        self._no_gradient = torch.full((), -1.0, dtype=widest(device), device=device)

    def __call__(
        self,
        grads: Sequence[Tensor | None],
        scale: Tensor,
        *,
        skip_on_overflow: bool,
        measured: Tensor | None = None,
        across: Callable[[Tensor], Tensor] | None = None,
        offenders_only: bool = False,
    ) -> Verdict:
        """Return the verdict on P scaled gradients, in the order of the weights; None stands for a missing one.

        ``scale`` is the loss scale, float32 of shape (1,), and ``measured`` is what the scaler requests. ``across``
        combines norms across ranks. With ``offenders_only``, norms of single gradients are needed only on overflow.
        """
        present = [grad for grad in grads if grad is not None]
        complete = len(present) == len(grads)
        host_judge = self._host_judge if offenders_only and complete and across is None else None
        if host_judge and (verdict := host_judge(present, scale)):
            return verdict if measured is None else verdict._replace(measured=measured)
        norms = gradient_norms(present)
        if not complete:
            found_norms = iter(norms)
            norms = torch.stack([self._no_gradient if grad is None else next(found_norms) for grad in grads])
        if across is not None:
            norms = across(norms)
        return judge(norms, scale, skip_on_overflow=skip_on_overflow, complete=complete, measured=measured)


def clip_coefficient(grad_norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients to an L2 norm, float64 of shape (1,), as `torch.nn.utils.clip_grad_norm_`.

    A non-finite norm gives 1, because clipping by it would silently zero the finite gradients.
    """
    coefficient = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return torch.where(grad_norm.isfinite(), coefficient, 1.0)


class Measure(Protocol):
    """Interface of a measurement of a process's gradients: one number that a loss-scaling rule adjusts the scale by."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Measure the gradients of a step, without synchronising with the host.

        The gradients are those of the overflow check, of any float dtypes and shapes on one device: summed over the
        micro-batches, scaled and possibly not finite. The result has shape (1,), float64, or float32 on a device
        without FP64; it is 0 without elements, and on the CPU without tensors.
        """

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Combine the shards' measurements and numbers of elements, both float64 [N], into one of shape (1,)."""


@dataclass(frozen=True)
class LargestMagnitude:
    """Measure of the largest |g| over all elements of a step's gradients: 0 without elements, not finite if any is."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Return the largest |g|, shape (1,)."""
        filled = [grad for grad in grads if grad.numel()]  # an empty tensor has no maximum
        if not filled:
            return _nothing(grads)
        return torch.stack(foreach_norm(filled, math.inf, dtype=widest(filled[0].device))).amax().view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Return the largest of the shards' largest magnitudes."""
        return measured.amax().view(1)


@dataclass(frozen=True)
class ShareAbove:
    """Measure of the share of all gradient elements with a scaled magnitude above ``edge``; NaN counts as above."""

    edge: float

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Return the share of elements above the edge, 0 to 1, shape (1,); 0 without elements."""
        elements = functools.reduce(operator.add, (grad.numel() for grad in grads), 0)  # known from shapes
        if not elements:
            return _nothing(grads)
        within = torch.stack([torch.count_nonzero(grad.abs() <= self.edge) for grad in grads]).sum()
        return (in_widest(elements - within) / elements).view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Return the mean of the shards' shares, weighted by their elements."""
        return (measured * elements).sum().view(1) / elements.sum().clamp(min=1.0)


def _nothing(grads: list[Tensor]) -> Tensor:
    device = grads[0].device if grads else torch.device("cpu")
    return torch.zeros(1, dtype=widest(device), device=device)
