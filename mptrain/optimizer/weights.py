"""The weights that one learner trains: their gradients, the copies that its optimizer moves, and the order of a step's calls.

Where ranks hold parts of the parameters (`mptrain.numerics.shards`), everything here is about this rank's parts; what goes out,
full-precision weights and optimizer state, are parts that know of what. Nothing here waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.device import capabilities, widest
from mptrain.errors import CheckpointError, ConfigError
from mptrain.numerics.formats import FLOAT16, FLOAT32
from mptrain.numerics.shards import as_part_of, is_sharded, part, part_for
from mptrain.numerics.verdict import HostJudge, Verdict, clip_coefficient, gradient_norms, judge, memory_order
from mptrain.optimizer.updater import Updater
from mptrain.torch_private import foreach_add_, foreach_clamp_max_, foreach_clamp_min_, foreach_copy_

if TYPE_CHECKING:
    from mptrain.numerics.measures import Measure
    from mptrain.optimizer.rules import Rule

    #: What becomes of norms, and of a measure of gradients, where there are several ranks.
    AcrossNorms = Callable[[Tensor], Tensor]
    AcrossMeasure = Callable[[Measure, list[Tensor]], Tensor]


#: The largest finite number of FP16.
FLOAT16_MAX = FLOAT16.max


class Weights:
    """Parameters with their gradients, working copies and optimizer state.

    Args:
        named: Name and parameter, as `nn.Module.named_parameters` gives them; frozen ones are left out.
        rule: What moves them.
        master_weights: Keep FP32 copies of half parameters.
        state_in_half: Half parameters are updated in place, with optimizer state of their own dtype.
        clip_norm: Largest global gradient norm, or None.
        initial: FP32 values that the parameters were cast from, by name; the master copies start there, so that
            nothing of the initial draw is lost.

    Attributes:
        names: The names of the P parameters trained, in the order of `Verdict.norms`.
        params: The P parameters, in that order.
        sharded: Whether this rank holds parts of the parameters only.
        rule: What moves them.
        clip_norm: Largest global gradient norm, or None.
        masters: Their working copies.
        updater: The rule with its state.
        gradients: Their gradients.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        rule: Rule,
        *,
        master_weights: bool,
        state_in_half: bool = False,
        clip_norm: float | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not trained:
            raise ConfigError("no parameter of the model is trainable", "unfreeze at least one module")
        self.names, self.params = tuple(trained), list(trained.values())
        self.sharded = is_sharded(self.params[0])  # all are, or none
        self.rule, self.clip_norm = rule, clip_norm
        self.masters = MasterWeights(
            self.names, self.params, keep=master_weights, state_in_half=state_in_half, initial=initial or {}
        )
        work = self.masters.work
        self.updater = Updater(rule, self.names, self.params, self.masters)
        self.gradients = Gradients(self.names, self.params, self.masters, read_half=self.updater.one_pass)
        device = work[0].device
        has = capabilities(device)
        self._host_judge = HostJudge(work, exact=clip_norm is not None) if has.host and has.fp64 else None
        self._one = torch.ones(1, device=device)
        self._no_gradient = torch.full((), -1.0, dtype=widest(device), device=device)

    @property
    def one_pass(self) -> bool:
        """True where norms and update are kernels over all tensors at once."""
        return self.updater.one_pass

    def judge(
        self,
        scale: Tensor,
        *,
        refuses: bool,
        measure: Measure | None = None,
        across: tuple[AcrossNorms, AcrossMeasure] | None = None,
        offenders_only: bool = False,
    ) -> Verdict:
        """Return whether the gradients are finite, their norms, and what a scaler asks to know of them.

        Args:
            scale: float32, shape (1,): the scale they carry.
            refuses: Whether an overflow refuses the update.
            measure: What the scaler asks for.
            across: What makes norms, and a measure, of this rank's gradients those of all ranks; None on one rank.
            offenders_only: Norms of single gradients are needed only where one is not finite. The host reads a CPU's memory
                for nothing, so there it looks at the norm of all of them first.
        """
        grads = self.gradients.tensors()
        present = [grad for grad in grads if grad is not None]
        complete = len(present) == len(grads)
        measured = None if measure is None else self._measured(measure, grads, across)
        host_judge = self._host_judge if offenders_only and complete and across is None else None
        if host_judge and (verdict := host_judge(present, scale)):
            return verdict._replace(measured=measured)
        if self.one_pass and present:
            norms = self.updater.norms(grads)
        else:
            norms = gradient_norms(present)
            if not complete:
                found_norms = iter(norms)
                norms = torch.stack([self._no_gradient if grad is None else next(found_norms) for grad in grads])
        if across is not None:
            norms = across[0](norms)
        return judge(norms, scale, refuses=refuses, complete=complete, measured=measured)

    def _measured(
        self, measure: Measure, grads: Sequence[Tensor | None], across: tuple[AcrossNorms, AcrossMeasure] | None
    ) -> Tensor:
        """Return a measure of the gradients in the dtype of what the rule moves."""
        found = [g.to(work.dtype) for g, work in zip(grads, self.masters.work, strict=True) if g is not None]
        return measure(found) if across is None else across[1](measure, found)

    def update(self, verdict: Verdict, lr: Tensor, scale: Tensor | None) -> None:
        """Unscale, clip, update, and round to half precision, in this order; a refused update changes nothing.

        Args:
            verdict: What `judge` said about these gradients.
            lr: float32, shape (1,).
            scale: float32, shape (1,): the scale that multiplied this step's loss, whatever the next one will be; None
                where losses are never scaled: on a CPU torch's Adam takes half the time without a division.
        """
        if self.clip_norm is not None:
            divisor = (1.0 if scale is None else scale) / clip_coefficient(verdict.grad_norm, self.clip_norm)
            scale = divisor.clamp(max=FLOAT32.max).to(torch.float32)  # dividing by inf would zero every gradient
        elif scale is None and self.one_pass:
            scale = self._one
        self.updater(self.gradients.tensors(), verdict, lr, scale)


class GradientState(NamedTuple):
    """Places of the gradients of a step.

    Attributes:
        grads: The P gradients of the parameters themselves, or None.
        sums: FP32 sums that stand in place of half gradients, by the index of their parameter.
    """

    grads: list[Tensor | None]
    sums: dict[int, Tensor]


class Gradients:
    """The gradients of P parameters, and the FP32 sums of those that are half precision.

    Gradients of half parameters are summed up in FP32 over the micro-batches of an update, except where the parameter
    itself is what the rule sees: there they are of its dtype, sum and all.

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
        self._sums: dict[int, Tensor] = {}  # those of this step

    def zero_grad(self) -> None:
        """Forget all gradients. Called first in a step, so that those of a refused one can still be looked at."""
        for parameter in self._params:
            parameter.grad = None
        self._sums = {}

    def accumulate(self, *, single_microbatch: bool = False) -> None:
        """Add the half gradients of a micro-batch to their FP32 sums; FP32 gradients have accumulated by themselves.

        Args:
            single_microbatch: The update has no other, so that kernels which read half gradients need no sums.
        """
        if single_microbatch and self.read_half:
            return
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
        """Return the P gradients, or their FP32 sums; scaled, this rank's parts of them, None where there is none."""
        grads = [self._sums.get(index, parameter.grad) for index, parameter in enumerate(self._params)]
        return [None if grad is None else part(grad) for grad in grads] if self._sharded else grads

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
                self._sums[index] = self._buffers[index].zero_()
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
            if index >= 0 and (index in self._sums or parameter.grad is not None):
                self._sums[index] = total
                parameter.grad = None

    def state(self) -> GradientState:
        """Return where the gradients are now, for `restore`."""
        return GradientState([parameter.grad for parameter in self._params], dict(self._sums))

    def restore(self, state: GradientState) -> None:
        """Take the tensors for the gradients that held them when `state` was called."""
        for parameter, grad in zip(self._params, state.grads, strict=True):
            parameter.grad = grad
        self._sums = dict(state.sums)

    @functools.cached_property
    def _buffers(self) -> dict[int, Tensor]:
        """Memory for the FP32 sums of half gradients, made when the first is needed."""
        return {index: torch.empty_like(self._work[index]) for index in self._summed}


class MasterWeights:
    """The working tensors of P parameters, which the rule moves; where ranks hold parts of them, this rank's parts.

    FP32 parameter                      the parameter itself
    half parameter, master weights      an FP32 copy that lives on (Micikevicius et al. 2018, section 3.1)
    half parameter, no master weights   an FP32 scratch copy, read from the parameter before each update: what the
    rounding to half precision loses, is lost
    parameter with gaps in memory       an FP32 copy without them, copied back after each update
    half parameter, state in half too   the parameter itself

    Args:
        names: Of the parameters.
        params: The parameters.
        keep: The FP32 copies of half parameters live on.
        state_in_half: Half parameters are their own working tensors.
        initial: FP32 values that the parameters were cast from, by name; the copies start there, so that nothing of the
            initial draw is lost.

    Attributes:
        parts: This rank's parts of the parameters: the parameters themselves where they are whole.
        work: The working tensors, some of them ``parts``.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        keep: bool,
        state_in_half: bool,
        initial: Mapping[str, Tensor],
    ) -> None:
        self._names, self._params = tuple(names), list(params)
        self._keep = keep
        self.parts = [part(p) for p in params]
        # What has gaps in memory gets a working copy without them: torch's fused kernels would write past its elements.
        in_place = [
            (own.dtype == torch.float32 or state_in_half) and (own.is_contiguous() or memory_order(own) is not None)
            for own in self.parts
        ]
        self.work = [
            own if same else _wide_copy(own, part_for(initial.get(name, p), p))
            for name, p, own, same in zip(names, params, self.parts, in_place, strict=True)
        ]
        # Fixed for good, since every step needs them: what is rounded to what, and what may not become infinite.
        self._half = [own for own, same in zip(self.parts, in_place, strict=True) if not same]
        self._wide = [work for work, same in zip(self.work, in_place, strict=True) if not same]
        self._fp16 = [own for own in self.parts if own.dtype == torch.float16]  # those updated in place as well

    def rounded_into(self) -> list[Tensor | None]:
        """Return for each working tensor the parameter that gets its rounded value; None where it is the parameter."""
        return [None if work is own else own for work, own in zip(self.work, self.parts, strict=True)]

    def copy_from_params(self) -> None:
        """Read the parameters, where no copies of them live on."""
        if self._half and not self._keep:
            foreach_copy_(self._wide, [parameter.detach() for parameter in self._half])

    @torch.no_grad()
    def copy_to_params(self) -> None:
        """Round the working copies to half precision; FP16 saturates at 65504 instead of becoming inf."""
        if self._half:
            foreach_copy_(self._half, self._wide)
        if self._fp16:
            foreach_clamp_max_(self._fp16, FLOAT16_MAX)
            foreach_clamp_min_(self._fp16, -FLOAT16_MAX)

    def full_precision(self) -> dict[str, Tensor]:
        """Return the best copy of each parameter by name: the master where there is one, else the parameter."""
        best = self.work if self._keep else self.parts
        return {
            name: as_part_of((work if work is own else kept).detach(), p)
            for name, p, own, work, kept in zip(self._names, self._params, self.parts, self.work, best, strict=True)
        }

    def load_full_precision(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and master copies from `full_precision`'s values, whatever their dtype.

        Raises:
            CheckpointError: A parameter is missing or has another shape.
        """
        wrong = [
            f"{name} is {'missing' if name not in values else f'{tuple(values[name].shape)}, not {tuple(p.shape)}'}"
            for name, p in zip(self._names, self._params, strict=True)
            if name not in values or values[name].shape != p.shape
        ]
        if wrong:
            raise CheckpointError(
                f"the saved weights do not fit the model: {'; '.join(wrong[:5])}",
                "resume with the model it was saved from",
            )
        with torch.no_grad():
            for name, p, work in zip(self._names, self._params, self.work, strict=True):
                work.copy_(part_for(values[name], p))
        self.copy_to_params()

    def working(self) -> dict[str, Tensor]:
        """Return what the rule has moved last, by name: after an update the new weights before they were rounded."""
        return {name: work.detach() for name, work in zip(self._names, self.work, strict=True)}

    def in_place_half(self) -> list[str]:
        """Return the names of the half-precision parameters that the rule moves as they are, in their own dtype."""
        return [name for name, work in zip(self._names, self.work, strict=True) if work.dtype != torch.float32]


def _wide_copy(parameter: Tensor, value: Tensor) -> Tensor:
    """Return an FP32 copy of a value in the memory layout of the parameter it belongs to.

    Gradients have the parameter's layout too, and torch's kernels for lists of tensors are fast, or on CUDA willing at
    all, only where corresponding tensors have equal strides.
    """
    return torch.empty_like(parameter, dtype=torch.float32).copy_(value.detach())
