"""One training step, what it trains, and what holds for all of them: the only place that knows in which order things happen.

Everything stays on the device. Whether the step overflowed, whether it was refused, the next scale, the next learning
rate and the record are device values; the host issues the same operations whatever they turn out to be.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.parallel.strategy import SingleProcessStrategy
from mptrain.scaler.base import measure_of, reads_norms
from mptrain.scaler.static import NoScaler
from mptrain.torch_private import run_backward

if TYPE_CHECKING:
    from mptrain.engine.guard import BufferGuard
    from mptrain.numerics.verdict import Verdict
    from mptrain.optimizer.average import WeightAverage
    from mptrain.optimizer.weights import Weights
    from mptrain.parallel.strategy import ParallelStrategy
    from mptrain.precision.upcast import Products
    from mptrain.probe.probe import Watch
    from mptrain.scaler.base import Scaler, ScalerState
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Objective


class StepValues(NamedTuple):
    """Device values of one attempted step, for the record; none of these tensors is changed in place afterwards.

    Attributes:
        loss: float32 scalar: the unscaled loss.
        scale: float32, shape (1,): the loss scale in force.
        grad_norm: As the verdict has it, shape (1,): of the unscaled gradients.
        norms: As the verdict has them, shape (P,): of each parameter's gradient (`Verdict.norms`).
        lr: float32, shape (1,): the learning rate.
        next_scale: float32, shape (1,): the scale of the next step.
    """

    loss: Tensor
    scale: Tensor
    grad_norm: Tensor
    norms: Tensor
    lr: Tensor
    next_scale: Tensor


@dataclass(frozen=True)
class Plan:
    """What holds for every step of a run.

    Attributes:
        accumulate: Micro-batches of one update, on each rank.
        products: Which kernels half-precision products run on: gives the context of forward and backward.
        autocast: Context of a forward pass and its loss, to be entered again and again.
        guard: Restores buffers after a refused step.
        asked: ``train.accumulate``: of one update, over all ranks.
    """

    accumulate: int
    products: Products
    autocast: AbstractContextManager[Any]
    guard: BufferGuard
    asked: int = 1


class Learner:
    """An objective with its weights, scaler and schedule.

    Args:
        objective: The loss it minimises.
        weights: What it moves.
        scaler: The loss scaling rule.
        rates: float32, shape (planned + 1,): learning rate by number of applied updates.
        device: Where it trains.
        average: An average that follows the weights, or None.
        others: Parameters that it does not train, and that its loss may flow through.
        strategy: How its gradients come about; None on one rank.

    Attributes:
        objective: The loss it minimises.
        weights: What it moves.
        scaler: The loss scaling rule.
        scale_state: The state of that rule, device tensors of shape (1,).
        rates: float32, shape (planned + 1,): learning rate by number of applied updates.
        updates: int64, shape (1,): updates applied so far.
        average: The average of its weights, or None.
        strategy: How its gradients come about.
        scales: Whether its loss is ever multiplied by something else than 1.
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
    ) -> None:
        self.objective = objective
        self.weights = weights
        self.scaler = scaler
        self.scale_state: ScalerState = scaler.initial(device)
        self.rates = rates
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self.average = average
        self.strategy: ParallelStrategy = strategy or SingleProcessStrategy()
        self._followers = (average,) if average else ()
        self._others = tuple(others)
        self._judge = functools.partial(weights.judge, refuses=scaler.on_overflow == "skip", measure=measure_of(scaler))
        self.scales = type(scaler) is not NoScaler  # a subclass may begin elsewhere
        self._reads_norms = reads_norms(scaler)

    @property
    def name(self) -> str:
        """The learner's name in records."""
        return self.objective.learner

    @property
    def scale(self) -> Tensor:
        """The loss scale in force, float32 of shape (1,)."""
        return self.scale_state["scale"]

    def only_trainable(self) -> AbstractContextManager[None]:
        """A region in which no parameter but its own gets a gradient."""
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
        """The mean loss over a micro-batch's terms, a float32 scalar.

        Raises:
            ConfigError: The task broke that contract. An FP16 loss times a scale of 2^16 is inf.
        """
        loss = self.objective.loss(model, micro)
        if loss.dtype != torch.float32 or loss.ndim:
            raise ConfigError(
                f"the loss of learner {self.name} is {loss.dtype} of shape {tuple(loss.shape)}, not a float32 scalar",
                "reduce it to its mean over the batch and compute it in float32: logits.float() before the loss",
            )
        return loss

    def rate(self) -> Tensor:
        """The learning rate of the next update, float32 of shape (1,): a lookup, no host read."""
        return self.rates.index_select(0, self.updates)

    def judge(self, loss: Tensor | None = None, *, offenders_only: bool = False) -> Verdict:
        """Whether the gathered gradients may move the weights; all ranks ask, and get the same answer.

        Args:
            loss: This rank's share of it, float32 scalar; becomes the whole, in place.
            offenders_only: See `Weights.judge`.
        """
        across, offenders_only = self.strategy.reductions(loss), offenders_only and not self._reads_norms
        return self._judge(self.scale, across=across, offenders_only=offenders_only)

    def advance(self, verdict: Verdict) -> None:
        """Count the update if it was applied, let the average follow, then move the scale; after `Weights.update`."""
        self.updates = self.updates + verdict.applied
        for follower in self._followers:
            follower.follow(self.updates, verdict)
        self.scale_state = self.scaler.after(self.scale_state, verdict)

    def moving(self) -> dict[str, Tensor]:
        """What a step makes anew: ``updates``, and the scaler's state by ``scaler.NAME``."""
        return {"updates": self.updates, **{f"scaler.{name}": value for name, value in self.scale_state.items()}}

    def move_into(self, fixed: Mapping[str, Tensor]) -> None:
        """Copy what `moving` gives into tensors of the same names, and go on with those."""
        for name, value in self.moving().items():
            if fixed[name] is not value:
                fixed[name].copy_(value)
        self.go_on_with(fixed)

    def go_on_with(self, fixed: Mapping[str, Tensor]) -> None:
        """Forget the present values of what `moving` gives for those in the tensors given."""
        self.updates = fixed["updates"]
        self.scale_state = {name: fixed[f"scaler.{name}"] for name in self.scale_state}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights themselves: optimizer and scaler state, number of updates, averaged weights."""
        return {
            "optimizer": self.weights.updater.state_dict(),
            "scaler": dict(self.scale_state),
            "updates": self.updates,
            "average": self.average.values() if self.average else {},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore what `state_dict` gave, but for averages, which are loaded with the weights.

        Returns:
            What could not be restored, as sentences: another optimizer's state, another scaler's, no average.
        """
        notes = self.weights.updater.load_state_dict(saved["optimizer"])
        device = self.updates.device
        self.scale_state, changed = self.scaler.resume(saved["scaler"], device)
        notes += changed
        self.updates = saved["updates"].to(device)
        if self.average is not None and not saved["average"]:
            notes.append("the checkpoint has no average of the weights: it begins with the saved weights")
        return notes


def train_step(learner: Learner, model: nn.Module, batch: Batch, plan: Plan, watch: Watch | None = None) -> StepValues:
    """Attempt one update of one learner; weights, buffers and counts move only if it is not refused.

    Args:
        learner: What to train; its weights, scale and count of updates change in place.
        model: The module the objective calls, in training mode.
        batch: All samples of the update, on the device.
        plan: What holds for every step.
        watch: Looks at it, and changes nothing; None where nobody looks.

    Returns:
        Values for the record, which nobody has waited for.
    """
    weights, strategy, guard = learner.weights, learner.strategy, plan.guard
    weights.gradients.zero_grad()  # first, not last: the gradients of a refused step can still be looked at
    guard.snapshot()
    with watch.passes(model) if watch else contextlib.nullcontext():
        loss = accumulate_gradients(learner, model, batch, plan)

    strategy.broadcast_buffers(guard.lasting)
    verdict = learner.judge(loss, offenders_only=True)
    lr, scale = learner.rate(), learner.scale  # the scale that multiplied this loss unscales these gradients
    if watch:
        watch.judged(weights, verdict, scale)
    weights.update(verdict, lr, scale if learner.scales else None)  # unscale, clip, update, publish
    if watch:
        watch.updated(weights)
    if not verdict.known_finite:
        guard.restore(verdict.skip)
    learner.advance(verdict)
    return StepValues(loss, scale, verdict.grad_norm, verdict.norms, lr, learner.scale)


def backward(loss: Tensor, factor: Tensor) -> None:
    """The gradients of ``loss * factor``, with the bits of ``(loss * factor).backward()`` and without forming the product.

    Args:
        loss: float32 scalar.
        factor: float32 scalar: where the backward pass begins.
    """
    # Not torch.autograd.backward: given a gradient to begin with, it compares shapes by means of torch's compiler, which it imports.
    # What follows is what it does then; `False` twice: no graph is kept, and none is made of the gradients.
    run_backward((loss,), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def accumulate_gradients(learner: Learner, model: nn.Module, batch: Batch, plan: Plan) -> Tensor:
    """Forward and backward passes over the micro-batches of an update.

    Returns:
        The unscaled loss of the batch, a float32 scalar; of several ranks each has its share of it.
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
            learner.weights.gradients.accumulate(single_microbatch=single)
            part = loss.detach() * share if share != 1 else loss.detach()
            total = part if total is None else total + part
        strategy.finish_gradient_sync(learner.weights, single_microbatch=single)
    assert total is not None
    return total
