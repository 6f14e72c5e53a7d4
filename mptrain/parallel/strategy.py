"""Strategies of data parallelism, which synchronise the gradients of a training step over ranks or shard the weights.

Every rank trains on its part of the global batch, and its loss is weighted by its share of the batch's loss terms
(samples or tokens, over which the loss is averaged). So the sum over ranks is the gradient of the global batch's mean
loss for any split, and learning rate, loss scale and overflow check work as on one rank.

    backward pass → all_reduce of gradients → norms, all_reduced → rest of the step on each rank

The all_reduce of norms has P + 1 FP64 numbers for P parameters. It makes every rank skip a step that overflows on one
rank only, after the reduction of gradients (a broken device, or a shard of the weights that only one rank has).

With FSDP2 the backward pass yields sharded gradients, summed over ranks, in the dtype of the parameters. torch rounds
FP32 master weights to half precision when it gathers them: weights beyond 65504 become inf, whereas
`mptrain.optimizer.masters.MasterWeights.copy_to_params` saturates them.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.parallel.reduce import data_parallel, sum_over_ranks
from mptrain.system.errors import ConfigError, did_you_mean
from mptrain.system.torch_private import foreach_copy_

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Measure
    from mptrain.optimizer.weights import AcrossMeasure, AcrossNorms, Weights
    from mptrain.workloads.base.batch import Batch

    LossOfModel = Callable[[nn.Module, Batch], Tensor]
    Loss = Callable[[Batch], Tensor]
    Unchanged = Callable[[], AbstractContextManager[None]]


class ParallelStrategy(Protocol):
    """Interface of a parallel strategy: splitting of batches and synchronisation of gradients over the ranks of a run.

    A training step calls `micro_batches`, `loss_of` and a backward pass for each micro-batch, then
    `finish_gradient_sync`, then `reductions`. ``wanted`` is the configured number of micro-batches of an update
    on each rank. Before the first step, a rehearsal calls the first three for each learner, within `rehearsal`.
    """

    comm: Communicator
    #: Names of the modules whose sharded weights passes of this rank have gathered, in order; its reader empties it.
    gathered: list[str]

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """Return whether an update on this part of the batch has a single micro-batch on every rank."""

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """Yield the micro-batches of this rank, each with its share of the global batch's loss terms, in [0, 1].

        Args:
            batch: This rank's part of the global batch.
            wanted: Number of micro-batches; equal on every rank if passes of ranks wait for each other.
            unchanged: Function that returns a context in which a model's buffers do not change, for dummy
                micro-batches. These repeat samples of another micro-batch and have share 0.
        """

    def rehearsal(self, weights: Weights) -> AbstractContextManager[None]:
        """Return a context manager for a learner's passes on the first batch, which no update follows.

        There a strategy learns what later steps need, such as the order in which gradients come.
        """

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """Return a function from a micro-batch to its float32 loss, whose backward pass may synchronise gradients.

        ``loss`` returns the mean loss of a model and a micro-batch, a float32 scalar. ``single_microbatch`` is the
        result of that method for the update.
        """

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """Sum the accumulated gradients over ranks after the backward passes, unless those have done so."""

    def reductions(self, loss: Tensor | None) -> tuple[AcrossNorms, AcrossMeasure] | None:
        """Return functions that combine gradient norms, and a scaler's measurement, across ranks; None on one rank.

        The first takes this rank's gradient norms and returns those of the whole gradients. In the same all_reduce it
        overwrites ``loss``, this rank's share as a float32 scalar or None, with the sum over ranks. The second takes a
        measure and this rank's gradients and returns the measurement of the whole gradients.
        """

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Overwrite a model's persistent buffers, such as BatchNorm's running statistics, with those of rank 0.

        Their order is the same on every rank.
        """


class SingleProcessStrategy:
    """Parallel strategy of a training run on one rank, without communication."""

    comm = SINGLE_PROCESS

    def __init__(self) -> None:
        self.gathered: list[str] = []

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        """Return whether an update has a single micro-batch: one is configured, or the batch has at most one sample."""
        return wanted == 1 or batch.samples <= 1

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
        """Return the micro-batches, each with its share of the loss terms."""
        if wanted == 1:
            return iter([(batch, 1.0)])
        return ((micro, batch.share(micro)) for micro in batch.split(wanted))

    def rehearsal(self, weights: Weights) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """Return the loss as a function of the micro-batch."""
        return functools.partial(loss, model)

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """Do nothing: on one rank the gradients are complete."""

    def reductions(self, loss: Tensor | None) -> None:
        """Return None: on one rank nothing has to be combined."""

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Do nothing: there is only one rank."""


class _DistributedStrategy(ABC):
    """Base class of the parallel strategies for several ranks.

    ``wide`` sums half-precision gradients in FP32. ``meeting`` says that passes of the model wait for other ranks, as
    with synchronised BatchNorm, so that all ranks need equally many passes.
    """

    def __init__(self, comm: Communicator, *, wide: bool, meeting: bool) -> None:
        self.comm = comm
        self._wide = wide
        self._meeting = meeting
        self.gathered: list[str] = []

    def single_microbatch(self, batch: Batch, wanted: int) -> bool:
        return wanted == 1

    def micro_batches(self, batch: Batch, wanted: int, unchanged: Unchanged) -> Iterator[tuple[Batch, float]]:
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

    def rehearsal(self, weights: Weights) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reductions(self, loss: Tensor | None) -> tuple[AcrossNorms, AcrossMeasure]:
        return functools.partial(self.reduce_norms, loss=loss), self.reduce_measure

    @abstractmethod
    def reduce_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Return the L2 norms of whole gradients, equal on all ranks, from the norms that this rank has computed.

        ``norms`` and the result are float64 ``[P]``, one for each parameter's gradient, -1 for a missing gradient.
        ``loss`` is this rank's share of the loss, overwritten with the sum over ranks; None without one.
        """

    @abstractmethod
    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """Return a measurement of whole gradients for a loss scaler, equal on all ranks, as float64 ``[1]``.

        ``grads`` are this rank's gradients, scaled and possibly not finite.
        """

    def _summed(self, squares: Tensor, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Return the square roots of squared norms, float64 ``[P]``, summed over ranks; -1 in ``norms`` is kept."""
        if loss is None:
            sums = self.comm.all_reduce_(squares)
        else:
            # In one all_reduce: the ranks would wait for each other once more for a second one.
            both = self.comm.all_reduce_(torch.cat([squares, loss.view(1).double()]))
            sums, total = both[:-1], both[-1]
            loss.copy_(total)
        return torch.where(norms < 0, norms, sums.sqrt())

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        pieces = [buffer.view(torch.uint8) for buffer in buffers]  # as bytes: works for any dtype
        if pieces:
            whole = torch.cat(pieces)
            self.comm.broadcast_([whole])
            foreach_copy_(pieces, whole.split([len(piece) for piece in pieces]))


class DDPStrategy(_DistributedStrategy):
    """Data parallelism with replicated weights: torch's DDP, or an all_reduce after the backward passes of an update.

    DDP is used for updates of a single micro-batch. The rehearsal does without it; it shows whether any gradient is
    missing, and in which order gradients come. ``find_unused`` looks in every step for parameters without a gradient.
    """

    def __init__(self, comm: Communicator, *, wide: bool, meeting: bool, find_unused: bool = False) -> None:
        super().__init__(comm, wide=wide, meeting=meeting)
        self._find_unused = find_unused
        self._rehearsed: list[str] | None = None  # parameters whose gradients have come; None outside of a rehearsal
        self._wrapped: dict[Weights, nn.Module] = {}
        self._sums: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def rehearsal(self, weights: Weights) -> Iterator[None]:
        """Note, by hooks that are removed again, in which order the gradients of the passes inside come."""
        rehearsed: list[str] = []
        self._rehearsed = rehearsed
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: rehearsed.append(name))
            for name, parameter in zip(weights.names, weights.params, strict=True)
        ]
        try:
            yield
        finally:
            self._rehearsed = None
            for hook in hooks:
                hook.remove()

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """Return the loss as a function of the micro-batch, in DistributedDataParallel if an update has only one.

        Call it while only the parameters of ``weights`` require gradients.
        """
        if self._rehearsed is not None or not single_microbatch:
            return functools.partial(loss, model)
        # Not earlier: DDP's buckets follow the order of the gradients in the rehearsal, or in that of an earlier
        # process, which a checkpoint brings. And DDP takes the parameters that require a gradient now.
        if weights not in self._wrapped:
            self._wrapped[weights] = self._in_ddp(LossModule(loss, model), weights)
        self._sums.clear()
        return self._wrapped[weights]

    def _in_ddp(self, root: LossModule, weights: Weights) -> nn.Module:
        order = None
        if not self._find_unused and self._complete(weights):
            by_name = dict(zip(weights.names, weights.params, strict=True))
            order = [by_name[name] for name in weights.gradients.order or () if name in by_name]
        return data_parallel(root, self.comm, self._sums, wide=self._wide, order=order)

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """Sum gradients over ranks if DistributedDataParallel has not; one that another rank has counts as zeros here.

        Raises ConfigError if a gradient is missing that all ranks had in the first batch, and other ranks wait for it.
        """
        missing = dict.fromkeys(weights.gradients.missing())
        if single_microbatch and self._rehearsed is None:
            if missing and self._complete(weights) and not self._find_unused:
                raise ConfigError(
                    f"{next(iter(missing))} has no gradient in this batch,"
                    " but every parameter had one in the first batch",
                    "resume with mptrain resume RUN distributed.find_unused_parameters=true",
                )
            weights.gradients.take_sums(self._sums)
            self._sums.clear()
            return
        ranks_with = self.comm.all_reduce_ints([name not in missing for name in weights.names])
        if single_microbatch and self._rehearsed is not None:
            order = self.comm.broadcast_object(self._rehearsed)
            if weights.gradients.order is None:  # else the run's first batch was that of an earlier process
                count = dict(zip(weights.names, ranks_with, strict=True))
                weights.gradients.order = [name for name in order if count[name] == self.comm.world_size]
        weights.gradients.fill(
            [name for name, ranks in zip(weights.names, ranks_with, strict=True) if ranks and name in missing]
        )
        sum_over_ranks(list(weights.gradients.in_place().values()), self.comm, wide=self._wide)

    def _complete(self, weights: Weights) -> bool:
        """Return whether all parameters had a gradient on all ranks in the first batch of the run."""
        return set(weights.names) <= set(weights.gradients.order or ())

    def reduce_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        """Return the root mean square of each gradient norm over ranks, which all have the same summed gradients.

        So the norms are this rank's own unless a device is faulty.
        """
        return self._summed(_squares(norms) / self.comm.world_size, norms, loss)

    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """Return rank 0's measurement: the summed gradients are equal on all ranks."""
        measured = measure(grads)
        if grads:  # without gradients the measurement is on the CPU and equal on all ranks
            self.comm.broadcast_([measured])
        return measured


class FSDP2Strategy(_DistributedStrategy):
    """Data parallelism with sharded weights (fully_shard); backward passes yield shards of summed gradients.

    ``root`` is the loss module whose parameters are sharded; each pass gathers weights. The run has no other learner.
    """

    def __init__(self, comm: Communicator, root: LossModule, *, wide: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        super().__init__(comm, wide=wide, meeting=True)
        self._root = root
        parameters = ((module._parameters, *pair) for module in root.modules() for pair in module._parameters.items())
        self._frozen = [(own, name, p) for own, name, p in parameters if p is not None and not p.requires_grad]
        for name, module in root.named_modules():
            sharded = isinstance(module, FSDPModule)  # whose class, to mypy, is no module
            if sharded:
                short = name.removeprefix("model").removeprefix(".")
                module.register_forward_pre_hook(lambda module, given, name=short: self.gathered.append(name))
                module.register_forward_hook(self._keep_thawed, prepend=True)

    def _keep_thawed(self, *_: object) -> None:
        """Let shards require a gradient whose gathered parameters do, and which are freed after the pass."""
        for own, name, shard in self._frozen:
            if (gathered := own[name]) is not None and gathered.requires_grad:
                shard.requires_grad_(True)

    def loss_of(self, loss: LossOfModel, model: nn.Module, weights: Weights, *, single_microbatch: bool) -> Loss:
        """Return the sharded loss module, with the loss function set."""
        self._root.loss = loss
        return self._root

    def finish_gradient_sync(self, weights: Weights, *, single_microbatch: bool) -> None:
        """Do nothing: each backward pass sums the gradients over ranks."""

    @override
    def reduce_norms(self, norms: Tensor, loss: Tensor | None) -> Tensor:
        return self._summed(_squares(norms), norms, loss)

    def reduce_measure(self, measure: Measure, grads: list[Tensor]) -> Tensor:
        """Return the measurement of whole gradients from those of all shards and their sizes."""
        measured = measure(grads)
        device = grads[0].device if grads else measured.device
        elements = torch.full((1,), float(sum(grad.numel() for grad in grads)), dtype=torch.float64, device=device)
        both = self.comm.all_gather(torch.cat([measured.to(device), elements]))
        return measure.of_parts(both[:, 0], both[:, 1])


class LossModule(nn.Module):
    """Module of a model and its loss function, so that `torch.nn.parallel` wrappers treat both as one forward pass.

    ``loss`` returns the mean loss of a model and a micro-batch; None to set it later.
    """

    def __init__(self, loss: LossOfModel | None, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, micro: Batch) -> Tensor:
        """Compute the mean loss over the terms (samples or tokens) of a micro-batch; return it as a float32 scalar."""
        assert self.loss is not None
        return self.loss(self.model, micro)


def strategy_of(
    comm: Communicator, root: LossModule | None, *, wide: bool, meeting: bool, find_unused: bool = False
) -> ParallelStrategy:
    """Return the parallel strategy of a training run: for a single rank, for sharded or for replicated weights.

    ``root`` is the sharded loss module; None if every rank has all weights. ``find_unused`` concerns
    replicated weights only.
    """
    if comm.world_size == 1:
        return SingleProcessStrategy()
    if root is not None:
        return FSDP2Strategy(comm, root, wide=wide)
    return DDPStrategy(comm, wide=wide, meeting=meeting, find_unused=find_unused)


def _squares(norms: Tensor) -> Tensor:
    return norms.clamp(min=0.0).square()  # clamp keeps NaN


def shard(
    root: nn.Module,
    model: nn.Module,
    units: Sequence[str] | None,
    kept: Collection[nn.Module],
    comm: Any,
    *,
    compute: torch.dtype | None,
    wide: bool,
) -> None:
    """Shard every parameter of a model over ranks, in place, with gradients summed over ranks instead of averaged.

    A unit is a module whose parameters are gathered together before it is called.

    Args:
        root: Module whose forward is a whole pass; parameters outside all units are gathered for the whole pass.
        model: Model within ``root``; units are named like its modules.
        units: Qualified names of the modules that form units; None selects `composite_members`.
        kept: Modules with parameters of another dtype, which form units of their own and are not rounded.
        comm: A `mptrain.parallel.communicator.DistributedCommunicator`.
        compute: Dtype to which gathered parameters are rounded; None does not round.
        wide: Whether to sum half-precision gradients in FP32.

    Raises:
        ConfigError: The model has no module of a given name.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    mesh = DeviceMesh.from_group(comm.group, device.type)
    reduce = torch.float32 if wide else None
    rounded = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    as_it_is = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    chosen = composite_members(model) if units is None else [_named(model, name) for name in units]
    apart = {id(module): module for module in kept if any(True for _ in module.parameters())}
    order = {id(module): index for index, module in enumerate(model.modules())}
    gathered = {id(module): module for module in chosen} | apart
    for key in sorted(gathered, key=order.__getitem__, reverse=True):  # inner modules first
        fully_shard(gathered[key], mesh=mesh, mp_policy=as_it_is if key in apart else rounded)
    fully_shard(root, mesh=mesh, mp_policy=rounded)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are shares of the global batch: sum, do not average
            module.set_force_sum_reduction_for_comms(True)


def composite_members(model: nn.Module) -> list[nn.Module]:
    """Return the members of ``nn.Sequential`` and ``nn.ModuleList`` that have submodules: the blocks of most networks.

    Members without parameters are left out, and members that share a parameter with a module outside, because a
    parameter belongs to one unit.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    members = []
    for holder in model.modules():
        if not isinstance(holder, (nn.Sequential, nn.ModuleList)):
            continue
        for member in holder.children():
            inside = {id(module) for module in member.modules()}
            own = list(member.parameters())
            if len(inside) > 1 and own and all(owners[id(parameter)] <= inside for parameter in own):
                members.append(member)
    return members


def _named(model: nn.Module, name: str) -> nn.Module:
    known = dict(model.named_modules())
    if name not in known or not name:
        guess = did_you_mean(name, known)
        raise ConfigError(
            f"distributed.units: the model has no module {name!r}",
            f"did you mean {guess}?" if guess else "use qualified names of the model's modules",
        )
    module: nn.Module = known[name]
    return module
