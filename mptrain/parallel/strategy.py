"""Strategies that make the gradients of a step those of all ranks.

Every rank trains on its part of the batch, and its loss counts with its share of the whole batch's loss terms. So the sum over
ranks is the gradient of the whole batch's mean loss, whatever the parts are, and one learning rate, one scale and one
verdict mean what they mean on one rank.

    backward pass → sum over ranks → norms of the sums, agreed on by all → everything else of the step, on each rank

Agreement costs a sum of P + 1 numbers of FP64. It is what makes an overflow behind the reduction (a broken
device, a part of the weights that only one rank has) everybody's overflow.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.parallel.reduce import data_parallel, sum_over_ranks

if TYPE_CHECKING:
    from mptrain.numerics.measures import Measure
    from mptrain.optimizer.weights import AcrossMeasure, AcrossNorms, Weights
    from mptrain.workloads.base.batch import Batch

    #: The loss of a micro-batch, with a model and without.
    LossOfModel = Callable[[nn.Module, Batch], Tensor]
    Loss = Callable[[Batch], Tensor]

    #: A region that leaves the buffers of a model as they were.
    Unchanged = Callable[[], AbstractContextManager[None]]


class ParallelStrategy(Protocol):
    """A way of dividing a run among processes, as a training step uses it.

    Attributes:
        comm: The processes.
    """

    comm: Communicator

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """Return whether an update on this batch has one micro-batch, on every rank."""

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """Yield the micro-batches of this rank's part of a batch, each with its share of the loss terms of the whole batch.

        Args:
            batch: This rank's part.
            wanted: The number of micro-batches; there are as many on every rank where passes wait for each other.
            unchanged: Entered while a dummy is trained on, whose samples are seen elsewhere.
        """

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """Return what computes the loss of a micro-batch, a float32 scalar, and synchronises gradients in its backward pass."""

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """Sum gradients over ranks, where the backward passes have not done so."""

    def reductions(self, loss: Tensor | None) -> tuple[AcrossNorms, AcrossMeasure] | None:
        """Return what makes norms, and a measure, of this rank's gradients those of all ranks; None on one rank.

        A loss, of which ranks have their shares, becomes that of the whole batch in place: the same exchange does for both.
        """

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite lasting buffers by those of rank 0."""


class SingleProcessStrategy:
    """A run on one rank, where nothing is exchanged."""

    comm = SINGLE_PROCESS

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """See `ParallelStrategy`."""
        return wanted == 1 or batch.samples <= 1

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """See `ParallelStrategy`."""
        if wanted == 1:
            return iter([(batch, 1.0)])
        return ((micro, batch.share(micro)) for micro in batch.split(wanted))

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """See `ParallelStrategy`."""
        return functools.partial(loss, model)

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """See `ParallelStrategy`."""

    def reductions(self, loss: Tensor | None) -> None:
        """See `ParallelStrategy`."""

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """See `ParallelStrategy`."""


class _DistributedStrategy(ABC):
    """Base of both ways of dividing a run among several ranks.

    Args:
        comm: The processes.
        wide: Sum half-precision gradients in FP32.
        meeting: Passes of the model wait for those of other ranks, so that all need as many.
    """

    def __init__(self, comm: Communicator, *, wide: bool, meeting: bool) -> None:
        self.comm = comm
        self._wide = wide
        self._meeting = meeting

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """See `ParallelStrategy`."""
        return wanted == 1

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """See `ParallelStrategy`. Where passes wait for nobody, ranks may have different numbers of micro-batches."""
        parts = batch.split(wanted)
        for micro in parts:
            if micro.is_dummy:
                with unchanged():
                    yield micro, 0.0
            else:
                yield micro, batch.share(micro)
        for _ in range(wanted - len(parts) if self._meeting else 0):
            with unchanged():
                yield replace(parts[0], is_dummy=True), 0.0

    def reductions(self, loss: Tensor | None) -> tuple[AcrossNorms, AcrossMeasure]:
        """See `ParallelStrategy`."""
        return functools.partial(self.reduce_norms, loss=loss), self.reduce_measure

    @abstractmethod
    def reduce_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Return norms of the gradients that all ranks agree on: float64 ``[P]``, -1 where there is none."""

    @abstractmethod
    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """Return what a scaler asks to know, as all ranks agree on it; float64 ``[1]``."""

    def _summed(self, squares: Tensor, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Return the roots of sums over ranks; a loss is summed in place."""
        if loss is None:
            sums = self.comm.all_reduce_(squares)
        else:
            both = self.comm.all_reduce_(torch.cat([squares, loss.view(1).double()]))
            sums, total = both[:-1], both[-1]
            loss.copy_(total)
        return torch.where(norms < 0, norms, sums.sqrt())

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """See `ParallelStrategy`."""
        self.comm.broadcast_([buffer.view(torch.uint8) for buffer in buffers])  # of any dtype


class DDPStrategy(_DistributedStrategy):
    """Every rank has all weights: torch's DistributedDataParallel, and our own sums where an update has several micro-batches.

    Args:
        comm: The processes.
        wide: Sum half-precision gradients in FP32.
        meeting: Passes of the model wait for those of other ranks, as synchronised BatchNorm does.
        find_unused: Look in every step for parameters without a gradient.
    """

    def __init__(self, comm: Communicator, *, wide: bool, meeting: bool, find_unused: bool = False) -> None:
        super().__init__(comm, wide=wide, meeting=meeting)
        self._find_unused = find_unused
        self._complete: dict[
            int, bool
        ] = {}  # by learner: all parameters had a gradient on all ranks in the first batch
        self._wrapped: dict[int, nn.Module] = {}
        self._sums: list[tuple[Tensor, Tensor]] = []

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """See `ParallelStrategy`; called where no parameters but those of ``weights`` ask for gradients.

        The first batch, which is the rehearsal's, is summed at its end, and tells whether a gradient is missing anywhere.
        """
        key = id(weights)
        if not single_microbatch or key not in self._complete:
            return functools.partial(loss, model)
        if key not in self._wrapped:
            find = self._find_unused or not self._complete[key]
            root = LossModule(loss, model)
            self._wrapped[key] = data_parallel(root, self.comm, self._sums, wide=self._wide, find_unused=find)
        self._sums.clear()
        return self._wrapped[key]

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """See `ParallelStrategy`: a gradient that this rank does not have counts as zeros where another has one.

        Raises:
            ConfigError: It has none of a parameter of which all had one in the first batch, and others wait for it.
        """
        missing = dict.fromkeys(weights.gradients.missing())
        key = id(weights)
        if single_microbatch and key in self._wrapped:
            if missing and self._complete[key] and not self._find_unused:
                raise ConfigError(
                    f"{next(iter(missing))} gets no gradient from a batch, though every parameter got one from the first batch",
                    "write distributed.find_unused_parameters=true, behind mptrain resume RUN to go on with this run",
                )
            weights.gradients.take_sums(self._sums)
            self._sums.clear()
            return
        there = self.comm.all_reduce_ints([name not in missing for name in weights.names])
        if single_microbatch:
            self._complete[key] = set(there) == {self.comm.world_size}
        weights.gradients.fill(
            [name for name, comm in zip(weights.names, there, strict=True) if comm and name in missing]
        )
        sum_over_ranks(list(weights.gradients.in_place().values()), self.comm, wide=self._wide)

    def reduce_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """See `ParallelStrategy`: the root mean square over ranks, which are equal but for faults."""
        return self._summed(_squares(norms) / self.comm.world_size, norms, loss)

    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `ParallelStrategy`: that of the first rank; all have the same gradients, or refuse the step."""
        measured = measure(grads)
        if grads:  # else it is nowhere in particular, and the same on all
            self.comm.broadcast_([measured])
        return measured


class FSDP2Strategy(_DistributedStrategy):
    """Every rank has a part of the weights: gradients come out of the backward pass as parts of the sums.

    Args:
        comm: The processes.
        root: The loss of the one learner, whose parameters are sharded; each pass gathers weights.
        wide: Sum half-precision gradients in FP32.
    """

    def __init__(self, comm: Communicator, root: LossModule, *, wide: bool) -> None:
        super().__init__(comm, wide=wide, meeting=True)
        self._root = root

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """See `ParallelStrategy`."""
        self._root.loss = loss
        return self._root

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """See `ParallelStrategy`."""

    def reduce_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """See `ParallelStrategy`: of the parts that the ranks hold."""
        return self._summed(_squares(norms), norms, loss)

    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `ParallelStrategy`."""
        measured = measure(grads)
        device = grads[0].device if grads else measured.device
        elements = torch.full((1,), float(sum(grad.numel() for grad in grads)), dtype=torch.float64, device=device)
        both = self.comm.all_gather(torch.cat([measured.to(device), elements]))
        return measure.of_parts(both[:, 0], both[:, 1])


class LossModule(nn.Module):
    """A module whose forward is a loss, so that the whole of it is one pass.

    Args:
        loss: None where it is named later.
        model: What it is computed with.
    """

    def __init__(self, loss: LossOfModel | None, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, micro: Batch) -> Tensor:
        """The mean loss over a micro-batch's terms, a float32 scalar."""
        assert self.loss is not None
        return self.loss(self.model, micro)


def strategy_of(
    comm: Communicator, root: LossModule | None, *, wide: bool, meeting: bool, find_unused: bool = False
) -> ParallelStrategy:
    """The way in which a run is spread.

    Args:
        comm: Who they are.
        root: What was sharded; None where every rank has all weights.
        wide: Sum half-precision gradients in FP32.
        meeting: Passes of the model wait for those of other ranks.
        find_unused: Look in every step for parameters without a gradient.
    """
    if comm.world_size == 1:
        return SingleProcessStrategy()
    if root is not None:
        return FSDP2Strategy(comm, root, wide=wide)
    return DDPStrategy(comm, wide=wide, meeting=meeting, find_unused=find_unused)


def _squares(norms: Tensor) -> Tensor:
    return norms.clamp(min=0.0).square()  # clamp keeps NaN
