"""Strategies that synchronise the gradients of a step over ranks.

Every rank trains on its part of the global batch, and its loss is weighted by its share of the batch's loss terms. So
the sum over ranks is the gradient of the global batch's mean loss for any split, and learning rate, loss scale and
overflow check work as on one rank.

    backward pass → all_reduce of gradients → norms, all_reduced → rest of the step on each rank

The all_reduce of norms has P + 1 FP64 numbers. It makes every rank skip a step that overflows on one rank only, after
the reduction of gradients (a broken device, or a shard of the weights that only one rank has).
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

    #: Functions that return the loss of a micro-batch, with and without a model argument.
    LossOfModel = Callable[[nn.Module, Batch], Tensor]
    Loss = Callable[[Batch], Tensor]

    #: Context in which a model's buffers do not change.
    Unchanged = Callable[[], AbstractContextManager[None]]


class ParallelStrategy(Protocol):
    """Interface of a parallel strategy, as used by a training step.

    Attributes:
        comm: The communicator.
    """

    comm: Communicator

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """Return whether an update on this batch has a single micro-batch on every rank."""

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """Yield the micro-batches of this rank, each with its share of the global batch's loss terms.

        Args:
            batch: This rank's part of the global batch.
            wanted: Number of micro-batches; equal on every rank if passes of ranks wait for each other.
            unchanged: Context for dummy micro-batches, which repeat samples of another micro-batch.
        """

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """Return a function from a micro-batch to its float32 loss, whose backward pass may synchronise gradients."""

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """Sum gradients over ranks if the backward passes have not done so."""

    def reductions(self, loss: Tensor | None) -> tuple[AcrossNorms, AcrossMeasure] | None:
        """Return functions that combine norms, and a measure, of gradients across ranks; None on one rank.

        The loss shares of the ranks are summed into ``loss`` in place, in the same all_reduce as the norms.
        """

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite persistent buffers with those of rank 0."""


class SingleProcessStrategy:
    """Strategy of a run on one rank, without communication."""

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
    """Base class of the strategies for several ranks.

    Args:
        comm: The communicator.
        wide: Whether to sum half-precision gradients in FP32.
        meeting: Whether passes of the model wait for other ranks, so that all ranks need equally many passes.
    """

    def __init__(self, comm: Communicator, *, wide: bool, meeting: bool) -> None:
        self.comm = comm
        self._wide = wide
        self._meeting = meeting

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """See `ParallelStrategy`."""
        return wanted == 1

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """See `ParallelStrategy`. Without ``meeting``, ranks may have different numbers of micro-batches."""
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
        """Return gradient norms, equal on all ranks: float64 ``[P]``, -1 for a missing gradient."""

    @abstractmethod
    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """Return the measurement that a scaler requests, equal on all ranks; float64 ``[1]``."""

    def _summed(self, squares: Tensor, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Return square roots of sums over ranks; a loss is summed in place."""
        if loss is None:
            sums = self.comm.all_reduce_(squares)
        else:
            both = self.comm.all_reduce_(torch.cat([squares, loss.view(1).double()]))
            sums, total = both[:-1], both[-1]
            loss.copy_(total)
        return torch.where(norms < 0, norms, sums.sqrt())

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """See `ParallelStrategy`."""
        self.comm.broadcast_([buffer.view(torch.uint8) for buffer in buffers])  # as bytes: works for any dtype


class DDPStrategy(_DistributedStrategy):
    """Data parallelism with replicated weights: torch's DDP, or an all_reduce after several micro-batches.

    Args:
        comm: The communicator.
        wide: Whether to sum half-precision gradients in FP32.
        meeting: Whether passes of the model wait for other ranks, as with synchronised BatchNorm.
        find_unused: Whether to look in every step for parameters without a gradient.
    """

    def __init__(self, comm: Communicator, *, wide: bool, meeting: bool, find_unused: bool = False) -> None:
        super().__init__(comm, wide=wide, meeting=meeting)
        self._find_unused = find_unused
        # By learner: whether all parameters had a gradient on all ranks in the first batch.
        self._complete: dict[int, bool] = {}
        self._wrapped: dict[int, nn.Module] = {}
        self._sums: list[tuple[Tensor, Tensor]] = []

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """See `ParallelStrategy`; called when only the parameters of ``weights`` require gradients.

        The first batch, which is that of the rehearsal, does not use DDP; it shows whether any gradient is missing.
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
        """See `ParallelStrategy`: a missing gradient counts as zeros if another rank has one.

        Raises:
            ConfigError: A gradient is missing that all ranks had in the first batch, and other ranks wait for it.
        """
        missing = dict.fromkeys(weights.gradients.missing())
        key = id(weights)
        if single_microbatch and key in self._wrapped:
            if missing and self._complete[key] and not self._find_unused:
                raise ConfigError(
                    f"{next(iter(missing))} has no gradient in this batch,"
                    " but every parameter had one in the first batch",
                    "resume with mptrain resume RUN distributed.find_unused_parameters=true",
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
        """See `ParallelStrategy`: the root mean square over ranks, whose norms are equal unless a device is faulty."""
        return self._summed(_squares(norms) / self.comm.world_size, norms, loss)

    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `ParallelStrategy`: the measurement of rank 0; all ranks have equal gradients, or skip the step."""
        measured = measure(grads)
        if grads:  # without gradients the measurement is on the CPU and equal on all ranks
            self.comm.broadcast_([measured])
        return measured


class FSDP2Strategy(_DistributedStrategy):
    """Data parallelism with sharded weights: the backward pass yields shards of the summed gradients.

    Args:
        comm: The communicator.
        root: Loss module of the only learner, whose parameters are sharded; each pass gathers weights.
        wide: Whether to sum half-precision gradients in FP32.
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
        """See `ParallelStrategy`: norms of whole gradients from the norms of their shards."""
        return self._summed(_squares(norms), norms, loss)

    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """See `ParallelStrategy`."""
        measured = measure(grads)
        device = grads[0].device if grads else measured.device
        elements = torch.full((1,), float(sum(grad.numel() for grad in grads)), dtype=torch.float64, device=device)
        both = self.comm.all_gather(torch.cat([measured.to(device), elements]))
        return measure.of_parts(both[:, 0], both[:, 1])


class LossModule(nn.Module):
    """Module whose forward returns the loss, so that model and loss form one pass.

    Args:
        loss: Loss function, or None to set it later.
        model: The model.
    """

    def __init__(self, loss: LossOfModel | None, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, micro: Batch) -> Tensor:
        """Return the mean loss over the terms of a micro-batch, a float32 scalar."""
        assert self.loss is not None
        return self.loss(self.model, micro)


def strategy_of(
    comm: Communicator, root: LossModule | None, *, wide: bool, meeting: bool, find_unused: bool = False
) -> ParallelStrategy:
    """Return the parallel strategy of a run.

    Args:
        comm: The communicator.
        root: The sharded loss module; None if every rank has all weights.
        wide: Whether to sum half-precision gradients in FP32.
        meeting: Whether passes of the model wait for other ranks.
        find_unused: Whether to look in every step for parameters without a gradient.
    """
    if comm.world_size == 1:
        return SingleProcessStrategy()
    if root is not None:
        return FSDP2Strategy(comm, root, wide=wide)
    return DDPStrategy(comm, wide=wide, meeting=meeting, find_unused=find_unused)


def _squares(norms: Tensor) -> Tensor:
    return norms.clamp(min=0.0).square()  # clamp keeps NaN
