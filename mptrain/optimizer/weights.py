"""The weights that one learner trains, the copies that its optimizer moves, and the one place for their order.

Each parameter has a *working* tensor that the update rule sees:

    FP32 parameter                      the parameter itself
    half parameter, master weights      an FP32 copy that lives on (Micikevicius et al. 2018, section 3.1)
    half parameter, no master weights   an FP32 scratch copy, read from the parameter before each update: what the
                                        rounding to half precision loses, is lost
    half parameter, state in half too   the parameter itself

Gradients of half parameters are summed up in FP32 over the micro-batches of an update, except where the parameter
itself is what the rule sees: there they are of its dtype, sum and all. Nothing here waits for the host.

Where ranks hold parts of the parameters (`mptrain.numerics.shards`), everything here is about this rank's parts; what goes out,
full-precision weights and optimizer state, are parts that know of what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import increment_version

from mptrain.device import capabilities, is_capturing, widest
from mptrain.errors import CheckpointError, ConfigError
from mptrain.numerics.formats import FLOAT16, FLOAT32
from mptrain.numerics.shards import as_part_of, is_sharded, part, part_for
from mptrain.numerics.verdict import HostJudge, Verdict, clip_coefficient, gradient_norms, judge, memory_order
from mptrain.optimizer.gradient_table import upload
from mptrain.optimizer.multi_tensor import MultiTensorNorms, MultiTensorUpdate, available, supports
from mptrain.optimizer.rules import Group, Stride

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from mptrain.numerics.measures import Measure
    from mptrain.optimizer.rules import Rule

    #: What becomes of norms, and of a measure of gradients, where there are several ranks.
    AcrossNorms = Callable[[Tensor], Tensor]
    AcrossMeasure = Callable[[Measure, list[Tensor]], Tensor]


class Gathered(NamedTuple):
    """Where the gradients of a step are.

    Attributes:
        grads: The P gradients of the parameters themselves, or None.
        filled: Which of the P have their FP32 sum instead.
    """

    grads: list[Tensor | None]
    filled: list[bool]


class Weights:
    """Parameters with their working copies and optimizer state.

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
        one_pass: Whether norms and update are kernels over all tensors at once (`mptrain.optimizer.multi_tensor`).
        sharded: Whether this rank holds parts of the parameters only.
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
        self.names = tuple(trained)
        self.rule = rule
        self.clip_norm = clip_norm
        self._params = list(trained.values())
        self.sharded = is_sharded(self._params[0])  # all are, or none
        self._parts = [part(p) for p in self._params]  # the parameters themselves where they are whole
        # What has gaps in memory gets a working copy without them: torch's fused kernels would write past its elements.
        self._in_place = [
            (own.dtype == torch.float32 or state_in_half) and (own.is_contiguous() or memory_order(own) is not None)
            for own in self._parts
        ]
        self._keeps_master = master_weights
        self._work = [
            own if in_place else _wide_copy(own, part_for((initial or {}).get(name, p), p))
            for name, p, own, in_place in zip(self.names, self._params, self._parts, self._in_place, strict=True)
        ]
        self._wide_grads: list[Tensor | None] = [None] * len(self._params)  # made when they are needed, if they are
        self._summed = [index for index, in_place in enumerate(self._in_place) if not in_place]
        self._lent = False  # they are somebody else's, who makes new ones for each step
        self._filled = [False] * len(self._params)
        self._state = [rule.state(w) for w in self._work]
        self._step = torch.zeros(1, dtype=torch.float32, device=self._work[0].device)
        self._one = torch.ones_like(self._step)
        device = self._step.device
        has = capabilities(device)
        self._host_judge = HostJudge(self._work, exact=clip_norm is not None) if has.host and has.fp64 else None
        self._no_gradient = torch.full((), -1.0, dtype=widest(self._step.device), device=self._step.device)
        self._groups: dict[tuple[bool, ...], list[_Members]] = {}
        # Fixed for good, since every step needs them: what is rounded to what, and what may not become infinite.
        rounded = [(p, w) for p, w, same in zip(self._parts, self._work, self._in_place, strict=True) if not same]
        self._rounded: tuple[list[Tensor], list[Tensor]] = [p for p, _ in rounded], [w for _, w in rounded]
        self._fp16: list[Tensor] = [
            p for p in self._parts if p.dtype == torch.float16
        ]  # those updated in place as well
        wide = {w.dtype for w in self._work} == {torch.float32}
        self.one_pass = wide and supports(rule) and available(self._step.device, rule)
        self._kernels: dict[tuple[bool, ...], _Kernels] = {}

    def parameters(self) -> list[nn.Parameter]:
        """The P parameters, in the order of `names`."""
        return list(self._params)

    def clear(self) -> None:
        """Forget all gradients. Called first in a step, so that those of a refused one can still be looked at."""
        for parameter in self._params:
            parameter.grad = None
        for index in self._summed:
            self._filled[index] = False
        if self._lent:
            self._wide_grads, self._lent = [None] * len(self._params), False

    def gather(self, *, alone: bool = False) -> None:
        """Add the half gradients of a micro-batch to their FP32 sums; FP32 gradients have accumulated by themselves.

        Args:
            alone: The update has no other micro-batch, so that kernels which read half gradients need no sums.
        """
        if alone and self.one_pass:
            return
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index in self._summed:
            parameter = self._params[index]
            if parameter.grad is None:
                continue
            into, source = later if self._filled[index] else first
            into.append(self._sum_of(index))
            source.append(part(parameter.grad))
            parameter.grad = None
            self._filled[index] = True
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def fill(self, names: Sequence[str]) -> None:
        """Give parameters that have no gradient one of zeros."""
        for name in names:
            index = self.names.index(name)
            if self._in_place[index]:
                self._params[index].grad = torch.zeros_like(self._params[index])
            else:
                self._sum_of(index).zero_()
                self._filled[index] = True

    def take_sums(self, sums: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Go on with other FP32 sums of gradients than `gather` has found, where there are such sums at all.

        Args:
            sums: Parameters and their sums, float32, which belong to this step from here on; those of parameters that have no
                gradient count nothing.
        """
        places = {id(parameter): index for index, parameter in enumerate(self._params)}
        for parameter, total in sums:
            index = places[id(parameter)]
            if not self._in_place[index] and (self._filled[index] or parameter.grad is not None):
                self._wide_grads[index], self._lent = total, True
                parameter.grad = None
                self._filled[index] = True

    def gradients_in_place(self) -> dict[str, Tensor]:
        """The gathered gradients, or their FP32 sums, by name; scaled, of this rank, for changing them in place."""
        return {name: grad for name, grad in zip(self.names, self._grads(), strict=True) if grad is not None}

    def gathered(self) -> Gathered:
        """Where the gradients are now, for `put_back`."""
        return Gathered([parameter.grad for parameter in self._params], list(self._filled))

    def put_back(self, gathered: Gathered) -> None:
        """Take the tensors for the gradients that held them when `gathered` was called."""
        for parameter, grad in zip(self._params, gathered.grads, strict=True):
            parameter.grad = grad
        self._filled = list(gathered.filled)

    def without_gradient(self) -> list[str]:
        """Names of the parameters that have no gradient at present."""
        return [name for name, grad in zip(self.names, self._grads(), strict=True) if grad is None]

    def gradients(self) -> dict[str, Tensor]:
        """The gathered gradients by name, in the dtype of what the rule moves; scaled, before `update`; absent ones are left out."""
        found = zip(self.names, self._grads(), self._work, strict=True)
        return {name: grad.detach().to(work.dtype) for name, grad, work in found if grad is not None}

    def working(self) -> dict[str, Tensor]:
        """What the rule has moved last, by name: after `update` the new weights before they were rounded."""
        return {name: work.detach() for name, work in zip(self.names, self._work, strict=True)}

    def in_place_half(self) -> list[str]:
        """Names of the half-precision parameters that the rule moves as they are, in their own dtype."""
        pairs = zip(self.names, self._work, strict=True)
        return [name for name, work in pairs if work.dtype != torch.float32]

    def judge(
        self,
        scale: Tensor,
        *,
        refuses: bool,
        measure: Measure | None = None,
        across: tuple[AcrossNorms, AcrossMeasure] | None = None,
        offenders_only: bool = False,
    ) -> Verdict:
        """Whether the gathered gradients are finite, their norms, and what a scaler asks to know of them.

        Args:
            scale: float32, shape (1,): the scale they carry.
            refuses: Whether an overflow refuses the update.
            measure: What the scaler asks for.
            across: What makes norms, and a measure, of this rank's gradients those of all ranks; None on one rank.
            offenders_only: Norms of single gradients are needed only where one is not finite. The host reads a CPU's memory
                for nothing, so there it looks at the norm of all of them first.
        """
        grads = self._grads()
        present = [grad for grad in grads if grad is not None]
        complete = len(present) == len(grads)
        measured = None
        if measure is not None:
            found_grads = [g.to(work.dtype) for g, work in zip(grads, self._work, strict=True) if g is not None]
            measured = measure(found_grads) if across is None else across[1](measure, found_grads)
        if offenders_only and complete and across is None and self._host_judge is not None:
            verdict = self._host_judge(present, scale)
            if verdict is not None:
                return verdict._replace(measured=measured)
        if self.one_pass and present:
            norms = self._kernels_for(grads).norms(present, len(grads))
        else:
            norms = gradient_norms(present)
            if not complete:
                found = iter(norms)
                norms = torch.stack([self._no_gradient if grad is None else next(found) for grad in grads])
        if across is not None:
            norms = across[0](norms)
        return judge(norms, scale, refuses=refuses, complete=complete, measured=measured)

    def update(self, verdict: Verdict, lr: Tensor, scale: Tensor | None) -> None:
        """Unscale, clip, update and publish, in this order; a refused update changes nothing.

        Args:
            verdict: What `judge` said about these gradients.
            lr: float32, shape (1,).
            scale: float32, shape (1,): the scale that multiplied this step's loss, whatever the next one will be; None
                where losses are never scaled: on a CPU torch's Adam takes half the time without a division.
        """
        grad_scale = self._one if scale is None and self.one_pass else scale
        if self.clip_norm is not None:
            divisor = (1.0 if scale is None else scale) / clip_coefficient(verdict.grad_norm, self.clip_norm)
            grad_scale = divisor.clamp(max=FLOAT32.max).to(torch.float32)  # dividing by inf would zero every gradient
        self._step.add_(verdict.applied)
        stride = Stride(lr=lr, step=self._step, grad_scale=grad_scale, skip=verdict.skip)
        grads = self._grads()
        if not self._keeps_master:
            self._copy_to_work()
        if self.one_pass:
            if present := [grad for grad in grads if grad is not None]:
                self._kernels_for(grads).update(present, stride)
                increment_version(self._parts)
            return
        with torch.no_grad():  # some of the working tensors are the parameters themselves
            for members in self._live_groups(_live(grads)):
                self.rule.apply(members.group, members.of(grads), stride)
        increment_version(self._parts)  # neither our kernels nor torch's fused ones tell autograd of a change
        self.publish()

    def publish(self) -> None:
        """Round the working copies to half precision; FP16 saturates at 65504 instead of becoming inf."""
        half, wide = self._rounded
        if not half and not self._fp16:
            return
        with torch.no_grad():
            if half:
                torch._foreach_copy_(half, wide)
            if self._fp16:
                torch._foreach_clamp_max_(self._fp16, FLOAT16.max)
                torch._foreach_clamp_min_(self._fp16, -FLOAT16.max)

    def full_precision(self) -> dict[str, Tensor]:
        """The best copy of each parameter by name: the master where there is one, else the parameter."""
        masters = self._keeps_master
        return {
            name: as_part_of((work if masters or same else own).detach(), p)
            for name, p, own, work, same in zip(
                self.names, self._params, self._parts, self._work, self._in_place, strict=True
            )
        }

    def load_full_precision(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and master copies from `full_precision`'s values, whatever their dtype.

        Raises:
            CheckpointError: A parameter is missing or has another shape.
        """
        wrong = [
            f"{name} is {'missing' if name not in values else f'{tuple(values[name].shape)}, not {tuple(p.shape)}'}"
            for name, p in zip(self.names, self._params, strict=True)
            if name not in values or values[name].shape != p.shape
        ]
        if wrong:
            raise CheckpointError(
                f"the saved weights do not fit the model: {'; '.join(wrong[:5])}",
                "resume with the model it was saved from",
            )
        with torch.no_grad():
            for name, p, work in zip(self.names, self._params, self._work, strict=True):
                work.copy_(part_for(values[name], p))
        self.publish()

    def state_dict(self) -> dict[str, object]:
        """Optimizer state: ``step``, and for each parameter's name its state tensors, in the dtype they are kept in."""
        state = {
            name: {key: as_part_of(tensor, p) for key, tensor in tensors.items()}
            for name, p, tensors in zip(self.names, self._params, self._state, strict=True)
        }
        return {"step": self._step, "state": state}

    def load_state_dict(self, saved: Mapping[str, object]) -> list[str]:
        """Set the optimizer state by name; dtypes here stay as they are, FP32 moments stay FP32.

        Returns:
            What could not be restored, as sentences: state of another optimizer or of another model.
        """
        step, state = saved["step"], saved["state"]
        assert isinstance(step, torch.Tensor)
        assert isinstance(state, dict)
        own = dict(zip(self.names, self._state, strict=True))
        lost = [name for name in own if state.get(name, {}).keys() != own[name].keys()]
        if lost:  # moments without their count of steps would be corrected for the wrong bias
            return [f"the optimizer starts afresh: the checkpoint has no such state of {lost[0]}"]
        for (name, tensors), p in zip(own.items(), self._params, strict=True):
            for key, tensor in tensors.items():
                tensor.copy_(part_for(state[name][key], p))
        self._step.copy_(step)
        return []

    def _grads(self) -> list[Tensor | None]:
        grads = [parameter.grad for parameter in self._params]
        if self.sharded:
            grads = [None if grad is None else part(grad) for grad in grads]
        if not self._summed:
            return grads
        return [
            wide if filled else grad for grad, wide, filled in zip(grads, self._wide_grads, self._filled, strict=True)
        ]

    def _sum_of(self, index: int) -> Tensor:
        """Return the FP32 sum of one parameter's half gradients, made when it is first asked for."""
        wide = self._wide_grads[index]
        if wide is None:
            wide = self._wide_grads[index] = torch.empty_like(self._work[index])
        return wide

    def _copy_to_work(self) -> None:
        half, wide = self._rounded
        if half:
            torch._foreach_copy_(wide, [parameter.detach() for parameter in half])

    def _decay(self, parameter: Tensor) -> float:
        """The weight decay of one parameter."""
        return self.rule.weight_decay if parameter.ndim > 1 or self.rule.decay_norms_and_biases else 0.0

    def _kernels_for(self, grads: list[Tensor | None]) -> _Kernels:
        """The kernels for the parameters that have gradients; made once for each set of them."""
        live = _live(grads)
        if live not in self._kernels:
            if is_capturing(self._step.device):  # what a graph uploads is there only once the graph has run
                raise RuntimeError("other parameters have gradients than in the steps before")
            indices = [index for index, there in enumerate(live) if there]
            work = [self._work[i] for i in indices]
            update = MultiTensorUpdate(
                self.rule,
                work,
                {key: [self._state[i][key] for i in indices] for key in self._state[0]},
                [self._decay(self._params[i]) for i in indices],
                [None if self._in_place[i] else self._parts[i] for i in indices],
            )
            self._kernels[live] = _Kernels(indices, work, update)
        return self._kernels[live]

    def _live_groups(self, live: tuple[bool, ...]) -> list[_Members]:
        """The kernel calls for the parameters that have gradients; made once for each set of them."""
        if live not in self._groups:
            alike: dict[tuple[float, torch.dtype], list[int]] = {}
            for index, (parameter, work) in enumerate(zip(self._params, self._work, strict=True)):
                if live[index]:
                    alike.setdefault((self._decay(parameter), work.dtype), []).append(index)
            self._groups[live] = [
                _Members(indices, decay, self._work, self._state) for (decay, _), indices in alike.items()
            ]
        return self._groups[live]


class _Members:
    """Parameters that one call of a rule updates.

    The rule gets views in the order of memory. On a CPU torch's fused kernels take twice as long for channels_last, and are
    wrong without a word where a gradient has another order than its weight (seen in torch 2.15).

    Args:
        indices: Which they are.
        decay: Their weight decay.
        work: Working tensors of all parameters.
        state: Optimizer state of all parameters.
    """

    def __init__(self, indices: list[int], decay: float, work: list[Tensor], state: list[dict[str, Tensor]]) -> None:
        self._indices = indices
        self._orders = [memory_order(work[i]) for i in indices]
        names = state[indices[0]]
        self.group = Group(
            weights=self._views([work[i] for i in indices]),
            state={name: self._views([state[i][name] for i in indices]) for name in names},
            weight_decay=decay,
        )

    def of(self, grads: list[Tensor | None]) -> list[Tensor]:
        """Return the gradients of these parameters, each with the dimensions and strides of what the rule knows as its weight."""
        views = self._views([grads[i] for i in self._indices])  # type: ignore[misc]
        return [view if view.is_contiguous() else view.contiguous() for view in views]

    def _views(self, tensors: list[Tensor]) -> list[Tensor]:
        return [
            tensor if order is None else tensor.permute(order)
            for tensor, order in zip(tensors, self._orders, strict=True)
        ]


class _Kernels:
    """The kernels of `mptrain.optimizer.multi_tensor` for the parameters that have gradients.

    Args:
        indices: Which they are.
        weights: Their working tensors.
        update: Their update.
    """

    def __init__(self, indices: list[int], weights: list[Tensor], update: MultiTensorUpdate) -> None:
        self.update = update
        self._norms = MultiTensorNorms(weights, update.table)
        self._places = upload(torch.tensor(indices), weights[0].device)

    def norms(self, grads: list[Tensor], count: int) -> Tensor:
        """Norms of the gradients: float64, shape (count,), -1 where there is none."""
        found = self._norms(grads)
        if len(grads) == count:
            return found
        return torch.full((count,), -1.0, dtype=found.dtype, device=found.device).index_copy_(0, self._places, found)


def _live(grads: list[Tensor | None]) -> tuple[bool, ...]:
    return tuple([grad is not None for grad in grads])


def _wide_copy(parameter: Tensor, value: Tensor) -> Tensor:
    """An FP32 copy of a value in the memory layout of the parameter it belongs to.

    Gradients have the parameter's layout too, and torch's kernels for lists of tensors are fast, or on CUDA willing at
    all, only where corresponding tensors have equal strides.
    """
    return torch.empty_like(parameter, dtype=torch.float32).copy_(value.detach())
