"""Gradients of the parameters that one learner trains, and the FP32 sums of those that are half precision.

Gradients of half parameters are summed up in FP32 over the micro-batches of an update, except where the parameter
itself is what the rule sees: there they are of its dtype, sum and all. Nothing here waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.numerics.shards import is_sharded, part

if TYPE_CHECKING:
    from mptrain.optimizer.master_weights import MasterWeights


class GradientState(NamedTuple):
    """Places of the gradients of a step.

    Attributes:
        grads: The P gradients of the parameters themselves, or None.
        filled: Which of the P have their FP32 sum instead.
    """

    grads: list[Tensor | None]
    filled: list[bool]


class Gradients:
    """The gradients of P parameters.

    Args:
        names: Of the parameters.
        params: The parameters.
        masters: Their working tensors, which the rule moves.
        read_half: The kernels of norms and update read half-precision gradients, so that a single micro-batch needs no sums.

    Attributes:
        read_half: As given.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], masters: MasterWeights, *, read_half: bool
    ) -> None:
        self._names = tuple(names)
        self._params = list(params)
        self._work = masters.work
        self.read_half = read_half
        self._sharded = is_sharded(self._params[0])  # all are, or none
        halves = masters.rounded_into()
        self._summed = [index for index, half in enumerate(halves) if half is not None]
        self._sums: list[Tensor | None] = [None] * len(self._params)  # made when they are needed, if they are
        self._lent = False  # they are somebody else's, who makes new ones for each step
        self._filled = [False] * len(self._params)

    def zero_grad(self) -> None:
        """Forget all gradients. Called first in a step, so that those of a refused one can still be looked at."""
        for parameter in self._params:
            parameter.grad = None
        for index in self._summed:
            self._filled[index] = False
        if self._lent:
            self._sums, self._lent = [None] * len(self._params), False

    def accumulate(self, *, single_microbatch: bool = False) -> None:
        """Add the half gradients of a micro-batch to their FP32 sums; FP32 gradients have accumulated by themselves.

        Args:
            single_microbatch: The update has no other, so that kernels which read half gradients need no sums.
        """
        if single_microbatch and self.read_half:
            return
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index in self._summed:
            grad = self._params[index].grad
            if grad is None:
                continue
            sums, grads = later if self._filled[index] else first
            sums.append(self._sum_of(index))
            grads.append(part(grad))
            self._params[index].grad = None
            self._filled[index] = True
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def tensors(self) -> list[Tensor | None]:
        """Return the P gradients, or their FP32 sums; scaled, this rank's parts of them, None where there is none."""
        grads = [parameter.grad for parameter in self._params]
        if self._sharded:
            grads = [None if grad is None else part(grad) for grad in grads]
        for index in self._summed:
            if self._filled[index]:
                grads[index] = self._sums[index]
        return grads

    def in_place(self) -> dict[str, Tensor]:
        """Return `tensors` by name, for changing them in place; absent ones are left out."""
        return {name: grad for name, grad in zip(self._names, self.tensors(), strict=True) if grad is not None}

    def by_name(self) -> dict[str, Tensor]:
        """Return `tensors` by name, in the dtype of what the rule moves; absent ones are left out."""
        found = zip(self._names, self.tensors(), self._work, strict=True)
        return {name: grad.detach().to(work.dtype) for name, grad, work in found if grad is not None}

    def missing(self) -> list[str]:
        """Return the names of the parameters that have no gradient at present."""
        return [name for name, grad in zip(self._names, self.tensors(), strict=True) if grad is None]

    def fill(self, names: Sequence[str]) -> None:
        """Give parameters that have no gradient one of zeros."""
        for name in names:
            index = self._names.index(name)
            if index in self._summed:
                self._sum_of(index).zero_()
                self._filled[index] = True
            else:
                self._params[index].grad = torch.zeros_like(self._params[index])

    def take_sums(self, sums: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take other FP32 sums of gradients than `accumulate` has found, where there are such sums at all.

        Args:
            sums: Parameters and their sums, float32, which belong to this step from here on; those of parameters that have no
                gradient count nothing.
        """
        places = {id(self._params[index]): index for index in self._summed}
        for parameter, total in sums:
            index = places.get(id(parameter), -1)
            if index >= 0 and (self._filled[index] or parameter.grad is not None):
                self._sums[index], self._lent = total, True
                parameter.grad = None
                self._filled[index] = True

    def state(self) -> GradientState:
        """Return where the gradients are now, for `restore`."""
        return GradientState([parameter.grad for parameter in self._params], list(self._filled))

    def restore(self, state: GradientState) -> None:
        """Take the tensors for the gradients that held them when `state` was called."""
        for parameter, grad in zip(self._params, state.grads, strict=True):
            parameter.grad = grad
        self._filled = list(state.filled)

    def _sum_of(self, index: int) -> Tensor:
        """Return the FP32 sum of one parameter's half gradients, made when it is first asked for."""
        total = self._sums[index]
        if total is None:
            total = self._sums[index] = torch.empty_like(self._work[index])
        return total
