"""Weights that one learner trains: gradients, overflow check, updates and their running average.

With sharded parameters (`mptrain.numerics.tensors`) everything here works on this rank's shards. Full-precision weights
and optimizer state are returned as sharded tensors. Nothing here synchronises with the host, except
`MasterWeights.require_seen` and some optimizers with torch's interface.

The running average, `WeightAverage`, is an exponential one:

    decay(n) = min(decay, (1 + n) / (10 + n))          n: updates applied so far, this one included
    average <- average + (1 - decay(n)) * (weight - average)

The decay grows, so that the random initial weights leave the average quickly. The rule is that of TensorFlow's
`tf.train.ExponentialMovingAverage` with ``num_updates``. The average is in FP32 and follows the master weights if there
are any. A skipped update does not change the average (except that -0 may become 0). On a CPU the host reads count and
verdict, and one kernel moves the average, with one rounding less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.numerics.formats import FLOAT32
from mptrain.numerics.lost_updates import stuck_at
from mptrain.numerics.overflow_check import OverflowCheck, Verdict, clip_coefficient
from mptrain.numerics.tensors import as_part_of, is_sharded, part, part_for
from mptrain.optimizer.masters import MasterWeights, Rounding
from mptrain.optimizer.parameter_groups import parameter_options
from mptrain.optimizer.rules import ParameterOptions
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.optimizer.updater import RuleUpdater, TorchUpdater, Updater
from mptrain.system.device import in_widest
from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_, foreach_sub

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Measure
    from mptrain.optimizer.rules import Rule

    AcrossNorms = Callable[[Tensor], Tensor]
    AcrossMeasure = Callable[[Measure, list[Tensor]], Tensor]


class Weights:
    """Trained parameters of one learner, with their gradients, FP32 master copies and optimizer.

    Frozen ones among ``named`` are left out; without any other, ConfigError is raised. ``names`` are those of the P
    trained parameters, in the order of ``params``, ``options`` and `Verdict.norms`. If ``sharded``, this rank holds
    only shards of them.

    Half-precision parameters have FP32 copies with ``master_weights``, which start from ``initial``, FP32 values by
    name, so that the initialisation is not rounded. With ``state_in_half`` they are updated in place, with optimizer
    state of their own dtype. ``rounding`` is that of updated parameters without master weights. ``clip_norm`` limits
    the global L2 norm of the unscaled gradients; None disables clipping. ``options`` are learning rate factors and
    weight decays by name; None for those of the rule.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        rule: Rule | TorchRule,
        *,
        master_weights: bool,
        state_in_half: bool = False,
        clip_norm: float | None = None,
        initial: Mapping[str, Tensor] | None = None,
        rounding: Rounding | None = None,
        options: Mapping[str, ParameterOptions] | None = None,
    ) -> None:
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if unreal := [f"{name} is {p.dtype}" for name, p in trained.items() if p.is_complex()]:
            raise ConfigError(
                f"the parameter {unreal[0]}, and weights are real numbers here",
                "keep real and imaginary parts in a last dimension of 2, and compute with "
                "torch.view_as_complex(weight.float())",
            )
        if not trained:
            raise ConfigError("no parameter of the model is trainable", "unfreeze at least one module")
        self.names, self.params = tuple(trained), list(trained.values())
        self.sharded = is_sharded(self.params[0])  # all are, or none
        self.rule, self.clip_norm = rule, clip_norm
        self.masters = MasterWeights(
            self.names,
            self.params,
            keep=master_weights,
            state_in_half=state_in_half,
            initial=initial or {},
            rounding=rounding,
        )
        work = self.masters.work
        own = parameter_options(trained, rule) if options is None else options
        self.options = [own[name] for name in self.names]
        self.updater: Updater
        if isinstance(rule, TorchRule):
            self.updater = TorchUpdater(rule, self.names, self.params, self.masters, self.options)
        else:
            self.updater = RuleUpdater(rule, self.names, self.params, self.masters, self.options)
        self.gradients = Gradients(self.names, self.params, self.masters)
        self._check = OverflowCheck(work, exact=clip_norm is not None)

    def lost_at_start(self) -> dict[str, Any] | None:
        """Return what `stuck_at` does of half-precision parameters without master weights under Adam or AdamW.

        The updates of these are about as large as the rate. None of other optimizers, and if nothing is lost.
        """
        kind = (getattr(self.rule, "name", "") or type(self.rule).__name__).rpartition(".")[2]
        if kind not in ("Adam", "AdamW") or self.masters.keep or self.masters.rounding.kind != "nearest":
            return None
        rates = [self.rule.lr * options.lr_factor for options in self.options]
        pairs = zip(self.masters.parts, rates, strict=True)
        return stuck_at([(own.detach(), rate) for own, rate in pairs if own.dtype.itemsize == 2])

    def judge(
        self,
        scale: Tensor,
        *,
        skip_on_overflow: bool,
        measure: Measure | None = None,
        across: tuple[AcrossNorms, AcrossMeasure] | None = None,
        offenders_only: bool = False,
    ) -> Verdict:
        """Check a step's accumulated gradients for overflow and compute their norms, as device tensors.

        ``scale`` is the loss scale, float32 of shape (1,). ``measure`` is what the loss scaler requests. ``across``
        combines norms and a measure of this rank's gradients across ranks. With ``offenders_only``, norms of single
        gradients are needed only on overflow: on a CPU, where the host reads memory without synchronising, the total
        norm is then computed first.
        """
        grads = self.gradients.tensors()
        measured = None if measure is None else self._measured(measure, grads, across)
        return self._check(
            grads,
            scale,
            skip_on_overflow=skip_on_overflow,
            measured=measured,
            across=across and across[0],
            offenders_only=offenders_only,
        )

    def _measured(
        self, measure: Measure, grads: Sequence[Tensor | None], across: tuple[AcrossNorms, AcrossMeasure] | None
    ) -> Tensor:
        present = [g.to(work.dtype) for g, work in zip(grads, self.masters.work, strict=True) if g is not None]
        return measure(present) if across is None else across[1](measure, present)

    def update(self, verdict: Verdict, lr: Tensor, scale: Tensor | None) -> None:
        """Apply a step's update: unscale and clip the gradients, change the weights, round them to half precision.

        A skipped update changes nothing. Both ``lr`` and ``scale``, the loss scale of this step, not of the next, are
        float32 of shape (1,). ``scale`` is None if losses are never scaled: on a CPU torch's Adam takes half the time
        without a division.
        """
        if self.clip_norm is not None:
            divisor = (1.0 if scale is None else scale) / clip_coefficient(verdict.grad_norm, self.clip_norm)
            scale = divisor.clamp(max=FLOAT32.max).to(torch.float32)  # dividing by inf would zero every gradient
        self.updater(self.gradients.tensors(), verdict, lr, scale)


class GradientState(NamedTuple):
    """References to the gradients of P parameters and to FP32 sums by index, for `Gradients.restore`."""

    grads: list[Tensor | None]
    sums: dict[int, Tensor]


class Gradients:
    """Gradients of P parameters in a training step, summed over its micro-batches.

    Gradients of half-precision parameters are summed in FP32. If the rule updates a half-precision parameter in place,
    its gradients are summed in its own dtype.

    Attributes:
        order: Names of the parameters that had a gradient on all ranks in the first batch of the run, in the order in
            which rank 0 had them; part of a checkpoint, so that a resumed run sums gradients in the same places. None
            if it is not known.
    """

    order: list[str] | None = None

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], masters: MasterWeights) -> None:
        self._names = tuple(names)
        self._params = list(params)
        self._work = masters.work
        self._sharded = is_sharded(self._params[0])  # all are, or none
        halves = masters.rounded_into()
        self._summed = [index for index, half in enumerate(halves) if half is not None]
        self._sums: dict[int, Tensor] = {}  # those of this step

    def zero_grad(self) -> None:
        """Clear all gradients, at the start of a training step, so that those of a skipped step can be inspected."""
        for parameter in self._params:
            parameter.grad = None
        self._sums = {}

    def accumulate(self) -> None:
        """Add a micro-batch's half-precision gradients to FP32 sums; autograd accumulates FP32 gradients itself."""
        grads = {
            i: part(grad) if self._sharded else grad for i in self._summed if (grad := self._params[i].grad) is not None
        }
        later = [index for index in grads if index in self._sums]
        first = [index for index in grads if index not in self._sums]
        if later:
            foreach_add_([self._sums[i] for i in later], [grads[i] for i in later])
        if first:
            self._sums.update({index: self._buffers[index] for index in first})
            foreach_copy_([self._sums[i] for i in first], [grads[i] for i in first])
        for index in grads:
            self._params[index].grad = None

    def tensors(self) -> list[Tensor | None]:
        """Return P accumulated scaled gradients or their FP32 sums, as this rank's shards; None for a missing one."""
        grads = [self._sums.get(index, parameter.grad) for index, parameter in enumerate(self._params)]
        return [None if grad is None else part(grad) for grad in grads] if self._sharded else grads

    def in_place(self) -> dict[str, Tensor]:
        """Return the step's scaled gradients by parameter name, for in-place changes, without missing ones."""
        return {name: grad for name, grad in zip(self._names, self.tensors(), strict=True) if grad is not None}

    def by_name(self) -> dict[str, Tensor]:
        """Return the scaled gradients by parameter name, detached and in the dtype that the rule updates."""
        named = zip(self._names, self.tensors(), self._work, strict=True)
        return {name: grad.detach().to(work.dtype) for name, grad, work in named if grad is not None}

    def missing(self) -> list[str]:
        """Return the names of the parameters that have no gradient in this step."""
        return [name for name, grad in zip(self._names, self.tensors(), strict=True) if grad is None]

    def fill(self, names: Sequence[str]) -> None:
        """Set the gradients of parameters, by name, to zeros; for those that have a gradient on other ranks only."""
        for name in names:
            index = self._names.index(name)
            if index in self._summed:
                self._sums[index] = self._buffers[index].zero_()
            else:
                self._params[index].grad = torch.zeros_like(self._params[index])

    def take_sums(self, sums: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Replace half-precision parameters' gradients, if any, by float32 sums from elsewhere, as over all ranks."""
        indices = {id(self._params[index]): index for index in self._summed}
        for parameter, total in sums:
            index = indices.get(id(parameter), -1)
            if index >= 0 and (index in self._sums or parameter.grad is not None):
                self._sums[index] = total
                parameter.grad = None

    def state(self) -> GradientState:
        """Return references to the current gradient tensors, for `restore`."""
        return GradientState([parameter.grad for parameter in self._params], dict(self._sums))

    def restore(self, state: GradientState) -> None:
        """Make the tensors of an earlier `state` current again, such as those into which a CUDA graph writes."""
        for parameter, grad in zip(self._params, state.grads, strict=True):
            parameter.grad = grad
        self._sums = dict(state.sums)

    @functools.cached_property
    def _buffers(self) -> dict[int, Tensor]:
        return {index: torch.empty_like(self._work[index]) for index in self._summed}


class WeightAverage:
    """Exponential moving average of one learner's weights; ``decay`` is the largest share that an update keeps."""

    def __init__(self, weights: Weights, decay: float) -> None:
        self._weights = weights
        self._decay = decay
        self._values = {name: part(value).float().clone() for name, value in weights.masters.full_precision().items()}

    def follow(self, updates: Tensor, verdict: Verdict) -> None:
        """Move the average towards the weights after a step that was not skipped, without synchronising.

        ``updates`` is the number of updates applied so far, this one included: int64, shape (1,).
        """
        own = list(self._values.values())
        full = self._weights.masters.full_precision()
        current = [part(full[name]).float() for name in self._values]
        if verdict.known_finite:  # the host judged, so it may also read the count
            count = updates.item()
            foreach_lerp_(own, current, 1.0 - min((1.0 + count) / (10.0 + count), self._decay))
            return
        counted = in_widest(updates)
        kept = ((1.0 + counted) / (10.0 + counted)).clamp_(max=self._decay)
        weight = ((1.0 - kept) * verdict.applied).float()
        change = foreach_sub(current, own)
        foreach_mul_(change, weight.squeeze(0))
        foreach_add_(own, change)

    def values(self) -> dict[str, Tensor]:
        """Return the averaged weights by parameter name, float32; sharded tensors for sharded parameters."""
        like = self._weights.masters.full_precision()
        return {name: as_part_of(value, like[name]) for name, value in self._values.items()}

    def restart(self) -> None:
        """Set the average to the current weights, so that earlier ones no longer count."""
        for name, value in self._weights.masters.full_precision().items():
            self._values[name].copy_(part(value))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load averaged weights from a checkpoint, by parameter name and with the shape of the whole parameters.

        Call it after loading the weights: parameters without an average, frozen when it was saved, start from them.
        """
        like = self._weights.masters.full_precision()
        for name, value in self._values.items():
            value.copy_(part_for(saved[name], like[name]) if name in saved else part(like[name]))
