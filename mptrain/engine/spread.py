"""How the gradients of a step come about where a run has several ranks.

Every rank trains on its part of the batch, and its loss counts with its share of the whole batch's loss terms. So the sum over
ranks is the gradient of the whole batch's mean loss, whatever the parts are, and one learning rate, one scale and one
verdict mean what they mean on one rank.

    backward pass → sum over ranks → norms of the sums, agreed on by all → everything else of the step, on each rank

Agreement costs a sum of P + 1 numbers of FP64. It is what makes an overflow behind the reduction (a broken
device, a part of the weights that only one rank has) everybody's overflow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from mptrain.distributed.ranks import ALONE, Ranks
from mptrain.distributed.reduce import data_parallel, sum_over_ranks
from mptrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mptrain.dataset.batch import Batch
    from mptrain.engine.guard import BufferGuard
    from mptrain.engine.learner import Learner
    from mptrain.numerics.measures import Measure
    from mptrain.optimizer.weights import Weights

    Loss = Callable[[Batch], Tensor]


class Spread(Protocol):
    """What a step asks of the way in which its run is spread over ranks.

    Attributes:
        ranks: Who they are.
    """

    ranks: Ranks

    def micro_batches(self, batch: Batch, wanted: int) -> tuple[Batch, ...]:
        """The micro-batches of this rank's part of a batch; as many as on every other where passes wait for each other."""

    def loss(self, learner: Learner, model: nn.Module, *, alone: bool) -> Loss:
        """What computes the loss of a micro-batch; ``alone`` where the update has no other."""

    def settle(self, weights: Weights, *, alone: bool) -> None:
        """Have the sums over ranks, where the backward passes have not formed them."""

    def agreed_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Norms of the gradients that all ranks agree on: float64 ``[P]``, -1 where there is none.

        A loss becomes, in place, that of the whole batch, of the shares that the ranks have: the same exchange does for both.
        """

    def agreed_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """What a scaler asks to know, as all ranks agree on it; float64 ``[1]``."""

    def align(self, guard: BufferGuard) -> None:
        """Have the lasting buffers of the first rank."""


class Alone:
    """A run on one rank, where nothing is to be done."""

    ranks = ALONE

    def micro_batches(self, batch: Batch, wanted: int) -> tuple[Batch, ...]:
        """See `Spread`."""
        return batch.split(wanted)

    def loss(self, learner: Learner, model: nn.Module, *, alone: bool) -> Loss:
        """See `Spread`."""
        return lambda micro: learner.loss(model, micro)

    def settle(self, weights: Weights, *, alone: bool) -> None:
        """See `Spread`."""

    def agreed_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """See `Spread`."""
        return norms

    def agreed_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `Spread`."""
        return measure(grads)

    def align(self, guard: BufferGuard) -> None:
        """See `Spread`."""


class _Several:
    """What both ways of spreading a run have in common.

    Args:
        ranks: Who they are.
        wide: Sum half-precision gradients in FP32.
    """

    def __init__(self, ranks: Ranks, *, wide: bool) -> None:
        self.ranks = ranks
        self._wide = wide

    def _agreed(self, squares: Tensor, norms: Tensor, loss: Tensor | None) -> Tensor:
        """The roots of sums over ranks, and a loss summed in place."""
        if loss is None:
            sums = self.ranks.sum_(squares)
        else:
            both = self.ranks.sum_(torch.cat([squares, loss.view(1).double()]))
            sums, total = both[:-1], both[-1]
            loss.copy_(total)
        return torch.where(norms < 0, norms, sums.sqrt())

    def align(self, guard: BufferGuard) -> None:
        """See `Spread`."""
        self.ranks.take_from_first([flat.view(torch.uint8) for flat in guard.lasting()])  # of any dtype


class DataParallel(_Several):
    """Every rank has all weights: torch's DistributedDataParallel, and our own sums where an update has several micro-batches.

    Args:
        meeting: Passes of the model wait for those of other ranks, as synchronised BatchNorm does.
        find_unused: Look in every step for parameters without a gradient.
    """

    def __init__(self, ranks: Ranks, *, wide: bool, meeting: bool, find_unused: bool = False) -> None:
        super().__init__(ranks, wide=wide)
        self._meeting = meeting
        self._find_unused = find_unused
        self._complete: dict[
            int, bool
        ] = {}  # by learner: all parameters had a gradient on all ranks in the first batch
        self._wrapped: dict[int, nn.Module] = {}
        self._sums: list[tuple[Tensor, Tensor]] = []

    def loss(self, learner: Learner, model: nn.Module, *, alone: bool) -> Loss:
        """See `Spread`; called where `Learner.alone` holds, which says whose gradients are summed.

        The first batch, which is the rehearsal's, is summed at its end, and tells whether a gradient is missing anywhere.
        """
        key = id(learner.weights)
        if not alone or key not in self._complete:
            return lambda micro: learner.loss(model, micro)
        if key not in self._wrapped:
            find = self._find_unused or not self._complete[key]
            root = LossOf(learner, model)
            self._wrapped[key] = data_parallel(root, self.ranks, self._sums, wide=self._wide, find_unused=find)
        self._sums.clear()
        return self._wrapped[key]

    def micro_batches(self, batch: Batch, wanted: int) -> tuple[Batch, ...]:
        """See `Spread`. Where there are several, only sums are exchanged, behind the last: so the parts may differ in number."""
        return _as_many(batch, wanted) if self._meeting else batch.split(wanted)

    def settle(self, weights: Weights, *, alone: bool) -> None:
        """See `Spread`: a gradient that this rank does not have counts as zeros where another has one.

        Raises:
            ConfigError: It has none of a parameter of which all had one in the first batch, and others wait for it.
        """
        missing = dict.fromkeys(weights.without_gradient())
        key = id(weights)
        if alone and key in self._wrapped:
            if missing and self._complete[key] and not self._find_unused:
                raise ConfigError(
                    f"{next(iter(missing))} gets no gradient from a batch, though every parameter got one from the first batch",
                    "write distributed.find_unused_parameters=true, behind mptrain resume RUN to go on with this run",
                )
            weights.take_sums(self._sums)
            self._sums.clear()
            return
        there = self.ranks.added([name not in missing for name in weights.names])
        if alone:
            self._complete[key] = set(there) == {self.ranks.count}
        weights.fill([name for name, ranks in zip(weights.names, there, strict=True) if ranks and name in missing])
        sum_over_ranks(list(weights.gradients_in_place().values()), self.ranks, wide=self._wide)

    def agreed_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """See `Spread`: the root mean square over ranks, which are equal but for faults."""
        return self._agreed(_squares(norms) / self.ranks.count, norms, loss)

    def agreed_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `Spread`: that of the first rank; all have the same gradients, or refuse the step."""
        measured = measure(grads)
        if grads:  # else it is nowhere in particular, and the same on all
            self.ranks.take_from_first([measured])
        return measured


class Sharded(_Several):
    """Every rank has a part of the weights: gradients come out of the backward pass as parts of the sums.

    Args:
        root: The loss of the one learner, whose parameters are sharded.
    """

    def __init__(self, ranks: Ranks, root: LossOf, *, wide: bool) -> None:
        super().__init__(ranks, wide=wide)
        self._root = root

    def micro_batches(self, batch: Batch, wanted: int) -> tuple[Batch, ...]:
        """See `Spread`: each pass gathers weights."""
        return _as_many(batch, wanted)

    def loss(self, learner: Learner, model: nn.Module, *, alone: bool) -> Loss:
        """See `Spread`."""
        self._root.learner = learner
        return self._root

    def settle(self, weights: Weights, *, alone: bool) -> None:
        """See `Spread`."""

    def agreed_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """See `Spread`: of the parts that the ranks hold."""
        return self._agreed(_squares(norms), norms, loss)

    def agreed_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `Spread`."""
        measured = measure(grads)
        device = grads[0].device if grads else measured.device
        elements = torch.full((1,), float(sum(grad.numel() for grad in grads)), dtype=torch.float64, device=device)
        both = self.ranks.side_by_side(torch.cat([measured.to(device), elements]))
        return measure.of_parts(both[:, 0], both[:, 1])


class LossOf(nn.Module):
    """A module whose forward is the loss of a learner, so that the whole of it is one pass.

    Args:
        learner: None where it is named later.
        model: What it is computed with.
    """

    def __init__(self, learner: Learner | None, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.learner: Any = learner

    def forward(self, micro: Batch) -> Tensor:
        """The mean loss over a micro-batch's terms, a float32 scalar."""
        loss: Tensor = self.learner.loss(self.model, micro)
        return loss


def spread_over(ranks: Ranks, root: LossOf | None, *, wide: bool, meeting: bool, find_unused: bool = False) -> Spread:
    """The way in which a run is spread.

    Args:
        ranks: Who they are.
        root: What was sharded; None where every rank has all weights.
        wide: Sum half-precision gradients in FP32.
        meeting: Passes of the model wait for those of other ranks.
        find_unused: Look in every step for parameters without a gradient.
    """
    if ranks.count == 1:
        return Alone()
    if root is not None:
        return Sharded(ranks, root, wide=wide)
    return DataParallel(ranks, wide=wide, meeting=meeting, find_unused=find_unused)


def _as_many(batch: Batch, wanted: int) -> tuple[Batch, ...]:
    """So many micro-batches on every rank: stand-ins without weight where a part has fewer samples."""
    parts = batch.split(wanted)
    return (*parts, *(replace(parts[0], stand_in=True),) * (wanted - len(parts)))


def _squares(norms: Tensor) -> Tensor:
    return norms.clamp(min=0.0).square()  # clamp keeps NaN
