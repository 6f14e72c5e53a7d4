"""One training step in mixed precision, its settings, and its learner (a loss with its weights, optimizer and scaler).

This module defines the order of operations in a step; `Weights` has the arithmetic of verdict and update. Everything
stays on the device. The overflow flag, the skip decision, the next scale, the next learning rate and the record are
device values, and the host issues the same operations whatever they are. Only in a CPU's own memory the host knows the
verdict, and leaves out what it makes needless.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.ring import StepValues
from mptrain.parallel.strategy import SingleProcessStrategy
from mptrain.scaler.base import with_scale
from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import run_backward

if TYPE_CHECKING:
    from mptrain.engine.buffer_guard import BufferGuard
    from mptrain.engine.histograms import StepWatch
    from mptrain.numerics.overflow_check import Verdict
    from mptrain.optimizer.weights import WeightAverage, Weights
    from mptrain.parallel.strategy import ParallelStrategy
    from mptrain.precision.upcast import Products
    from mptrain.scaler.base import Scaler, ScalerState
    from mptrain.schedule.plateau import RateReduction
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Objective


@dataclass(frozen=True)
class Plan:
    """Settings that hold for every training step of a run.

    Attributes:
        accumulate: Number of micro-batches per update on each rank.
        accumulate_in_all: Number over all ranks, as configured.
        products: Choice of kernels for half-precision products; provides the context of forward and backward.
        autocast: Context of a forward pass and its loss, which can be entered repeatedly.
        guard: Guard that restores module buffers after a skipped step.
    """

    accumulate: int
    products: Products
    autocast: AbstractContextManager[Any]
    guard: BufferGuard
    accumulate_in_all: int = 1


class Learner:
    """Part of a run that trains for one loss: the loss with its weights, optimizer, loss scaler and learning rates.

    Most runs have one learner; a GAN has two. ``others`` are parameters that the learner does not train but its loss
    may depend on. A ``strategy`` of None is that of one rank. ``reduction`` changes ``rates`` in place.

    Attributes:
        rates: Learning rate by number of applied updates, float32, shape (planned + 1,).
        scale_state: State of the scaler, device tensors of shape (1,) by name, one of them ``scale``.
        updates: Number of applied updates, int64, shape (1,).
    """

    def __init__(
        self,
        objective: Objective,
        weights: Weights,
        scaler: Scaler,
        rates: Tensor,
        device: torch.device,
        *,
        average: WeightAverage | None = None,
        others: Sequence[nn.Parameter] = (),
        strategy: ParallelStrategy | None = None,
        reduction: RateReduction | None = None,
    ) -> None:
        self.objective = objective
        self.weights = weights
        self.scaler = scaler
        self.scale_state: ScalerState = with_scale(scaler.initial(device))
        self.rates = rates
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self.average = average
        self.strategy: ParallelStrategy = strategy or SingleProcessStrategy()
        self.reduction = reduction
        self._others = tuple(others)
        self._judge = functools.partial(
            weights.judge, skip_on_overflow=scaler.on_overflow == "skip", measure=scaler.measure
        )

    @property
    def name(self) -> str:
        """Name of the learner in records; ``main`` if there is only one."""
        return self.objective.learner

    @property
    def scale(self) -> Tensor:
        """Current loss scale, float32 of shape (1,), on the device."""
        return self.scale_state["scale"]

    def only_trainable(self) -> AbstractContextManager[None]:
        """Return a context manager in which only the learner's own parameters require gradients."""
        return self._without_others() if self._others else contextlib.nullcontext()

    @contextlib.contextmanager
    def _without_others(self) -> Iterator[None]:
        for parameter in self._others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self._others:
                parameter.requires_grad_(True)

    def loss(self, model: nn.Module, micro: Batch) -> Tensor:
        """Return the unscaled loss of a micro-batch on the device: the mean over its terms, a float32 scalar.

        Raises ConfigError if the task returned something else. An FP16 loss times a scale of 2^16, for example, is inf.
        """
        loss = self.objective.loss(model, micro)
        if loss.dtype != torch.float32 or loss.ndim:
            wide = [name for name, tensor in micro.tensors().items() if tensor.dtype == torch.float64 == loss.dtype]
            raise ConfigError(
                f"the loss of learner {self.name} is {loss.dtype} of shape {tuple(loss.shape)}, not a float32 scalar"
                + (f": the batch's {' and '.join(wide)} {'are' if wide[1:] else 'is'} float64" if wide else ""),
                f"convert in the data set: {wide[0]}.float()"
                if wide
                else "compute the loss in float32 (logits.float()) and reduce it to its mean over the batch",
            )
        return loss

    def rate(self) -> Tensor:
        """Return the learning rate of the next update, float32 of shape (1,), without synchronising with the host."""
        return self.rates.index_select(0, self.updates)

    def judge(self, loss: Tensor | None = None, *, offenders_only: bool = False) -> Verdict:
        """Check the accumulated gradients of a step for overflow. All ranks must call this, and get the same verdict.

        ``loss`` is this rank's share of the loss, a float32 scalar; it becomes the total in place. With
        ``offenders_only``, norms of single gradients are needed only on overflow.
        """
        across, offenders_only = self.strategy.reductions(loss), offenders_only and not self.scaler.reads_norms
        return self._judge(self.scale, across=across, offenders_only=offenders_only)

    def advance(self, verdict: Verdict) -> None:
        """Count the update of a step if applied, move the average and set the next scale, after `Weights.update`."""
        self.updates = self.updates + verdict.applied
        if self.average is not None:
            self.average.follow(self.updates, verdict)
        self.scale_state = self.scaler.after(self.scale_state, verdict)

    def moving(self) -> dict[str, Tensor]:
        """Return the tensors that each step replaces by new ones: ``updates`` and the scaler's as ``scaler.NAME``."""
        return {"updates": self.updates, **{f"scaler.{name}": value for name, value in self.scale_state.items()}}

    def move_into(self, fixed: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `moving` into fixed ones, at the addresses that a CUDA graph needs, and use those."""
        for name, value in self.moving().items():
            if fixed[name] is not value:
                fixed[name].copy_(value)
        self.use_moving(fixed)

    def use_moving(self, fixed: Mapping[str, Tensor]) -> None:
        """Use the tensors of `moving`, with their values, as update count and scaler state from now on."""
        self.updates = fixed["updates"]
        self.scale_state = {name: fixed[f"scaler.{name}"] for name in self.scale_state}

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's state for a checkpoint, without the weights themselves.

        ``scaler`` has device tensors by name, ``updates`` is int64 of shape (1,), ``average`` has averaged weights by
        name and ``reduction`` plain values by name; the last two are empty without one. ``order`` is that of gradients.
        """
        return {
            "optimizer": self.weights.updater.state_dict(),
            "scaler": dict(self.scale_state),
            "updates": self.updates,
            "average": self.average.values() if self.average else {},
            "reduction": self.reduction.state_dict() if self.reduction else {},
            "order": self.weights.gradients.order,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore all but weights and average from a checkpoint; return a sentence on each item that does not fit."""
        notes = self.weights.updater.load_state_dict(saved["optimizer"])
        device = self.updates.device
        self.scale_state, changed = self.scaler.resume(saved["scaler"], device)
        notes += changed
        self.updates = saved["updates"].to(device)
        order = saved.get("order")  # None of an older mptrain
        self.weights.gradients.order = order if order is None else [*order]
        if self.reduction is not None:
            self.reduction.load_state_dict(saved.get("reduction", {}))
        if self.average is not None and not saved["average"]:
            notes.append("the checkpoint has no average of the weights: the average starts from the saved weights")
        return notes


def train_step(
    learner: Learner, model: nn.Module, batch: Batch, plan: Plan, watch: StepWatch | None = None
) -> StepValues:
    """Attempt one update of one learner: forward, backward, overflow check, update and next loss scale.

    Weights, buffers and the update count change only if the step is not skipped. The batch has all samples of the
    update on this rank, on the device; the model is in training mode. The result is not synchronised with the host.
    """
    weights, strategy, guard = learner.weights, learner.strategy, plan.guard
    weights.gradients.zero_grad()  # here, not after the step, so that gradients of a skipped step can be inspected
    guard.snapshot()
    with watch.passes(model) if watch else contextlib.nullcontext():
        loss = accumulate_gradients(learner, model, batch, plan)

    guard.settle()
    # Each rank's statistics, such as BatchNorm's, are of its own samples: those of rank 0 become everyone's.
    strategy.broadcast_buffers(guard.lasting)
    verdict = learner.judge(loss, offenders_only=True)
    lr, scale = learner.rate(), learner.scale  # unscale with the scale that multiplied this loss
    if watch:
        watch.judged(weights, verdict, scale)
    # Before the update, which rounds the masters over what passes have changed in half-precision parameters.
    guard.write_through(verdict.applied)
    weights.update(verdict, lr, None if learner.scaler.is_identity else scale)  # unscale, clip, update, round
    if watch:
        watch.updated(weights)
    if not verdict.known_finite:
        guard.restore(verdict.skip)
    learner.advance(verdict)
    return StepValues(
        loss=loss,
        loss_scale=scale,
        lr=lr,
        next_scale=learner.scale,
        grad_norm=verdict.grad_norm,
        skip=verdict.skip,
        applied_norm=verdict.grad_norm,
        norms=verdict.norms,
    )


def backward(loss: Tensor, factor: Tensor) -> None:
    """Compute the gradients of ``loss * factor``, bitwise equal to ``(loss * factor).backward()``, without the product.

    Both are float32 scalars; the factor is the loss scale times the weight of the micro-batch.
    """
    # Not torch.autograd.backward: given an initial gradient, it imports torch's compiler to compare shapes. This is the
    # call that it makes afterwards, with retain_graph=False and create_graph=False.
    run_backward((loss,), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def accumulate_gradients(learner: Learner, model: nn.Module, batch: Batch, plan: Plan) -> Tensor:
    """Run forward and backward passes over the micro-batches of an update, so that scaled gradients accumulate.

    The batch has all samples of the update on this rank, on the device. Returns its unscaled loss, a float32 scalar;
    with several ranks, this rank's share of it.
    """
    total: Tensor | None = None
    scale, strategy = learner.scale.squeeze(0), learner.strategy
    single = strategy.single_microbatch(batch, plan.accumulate)
    with plan.products.context, learner.only_trainable():
        loss_of = strategy.loss_of(learner.loss, model, learner.weights, single_microbatch=single)
        for micro, share in strategy.micro_batches(batch, plan.accumulate, plan.guard.unchanged):
            with plan.autocast:
                loss = loss_of(micro)
            backward(loss, scale * share if share != 1 else scale)  # outside autocast, inside the choice of kernels
            learner.weights.gradients.accumulate()
            part = loss.detach() * share if share != 1 else loss.detach()
            total = part if total is None else total + part
        strategy.finish_gradient_sync(learner.weights, single_microbatch=single)
    assert total is not None
    return total
