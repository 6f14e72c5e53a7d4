"""One training step: the only place that knows in which order things happen.

Everything stays on the device. Whether the step overflowed, whether it was refused, the next scale, the next learning
rate and the record are device values; the host issues the same operations whatever they turn out to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from mptrain.probe.probe import UNWATCHED, Watch

if TYPE_CHECKING:
    from mptrain.engine.learner import Learner, Plan
    from mptrain.engine.ring import Recorder
    from mptrain.workloads.base.batch import Batch


def train_step(
    learner: Learner, model: nn.Module, batch: Batch, plan: Plan, ring: Recorder, watch: Watch = UNWATCHED
) -> None:
    """Attempt one update of one learner; weights, buffers and counts move only if it is not refused.

    Args:
        learner: What to train; its weights, scale and count of updates change in place.
        model: The module the objective calls, in training mode.
        batch: All samples of the update, on the device.
        plan: What holds for every step.
        ring: Takes the record.
        watch: Looks at it, and changes nothing.
    """
    learner.weights.gradients.zero_grad()  # first, not last: the gradients of a refused step can still be looked at
    plan.guard.snapshot()
    with watch.passes(model):
        total = accumulate_gradients(learner, model, batch, plan)

    learner.strategy.broadcast_buffers(plan.guard.lasting())
    verdict = learner.judge(total, offenders_only=True)
    lr, scale = learner.rate(), learner.scale  # the scale that multiplied this loss unscales these gradients
    watch.judged(learner.weights, verdict, scale)
    learner.weights.update(verdict, lr, scale if learner.scales else None)  # unscale, clip, update, publish
    watch.updated(learner.weights)
    if not verdict.known_finite:
        plan.guard.restore(verdict.skip)
    learner.advance(verdict)
    ring.record(total, scale, verdict.grad_norm, verdict.norms, lr, learner.scale)


def backward(loss: Tensor, factor: Tensor) -> None:
    """The gradients of ``loss * factor``, with the bits of ``(loss * factor).backward()`` and without forming the product.

    Args:
        loss: float32 scalar.
        factor: float32 scalar: where the backward pass begins.
    """
    # Not torch.autograd.backward: given a gradient to begin with, it compares shapes by means of torch's compiler, which it imports.
    # What follows is what it does then; `False` twice: no graph is kept, and none is made of the gradients.
    _engine_run_backward((loss,), (factor,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def accumulate_gradients(learner: Learner, model: nn.Module, batch: Batch, plan: Plan) -> Tensor:
    """Forward and backward passes over the micro-batches of an update.

    Returns:
        The unscaled loss of the batch, a float32 scalar; of several ranks each has its share of it.
    """
    total: Tensor | None = None
    scale, strategy = learner.scale.squeeze(0), learner.strategy
    single = strategy.single_microbatch(batch, plan.accumulate)
    with plan.products(), learner.only_trainable():
        loss_of = strategy.loss_of(learner.loss, model, learner.weights, single_microbatch=single)
        for micro, share in strategy.micro_batches(batch, plan.accumulate, plan.guard.unchanged):
            with plan.autocast:
                loss = loss_of(micro)
            part, factor = loss.detach(), scale
            if share != 1:
                part, factor = part * share, scale * share
            backward(loss, factor)  # outside autocast, inside the choice of kernels
            learner.weights.gradients.accumulate(single_microbatch=single)
            total = part if total is None else total + part
        strategy.finish_gradient_sync(learner.weights, single_microbatch=single)
    assert total is not None
    return total
