"""Updaters: the optimizers of P parameters, each of an update rule or of an optimizer with torch's interface.

`RuleUpdater` drives an update rule of mptrain, which uses the fastest kernels of the device. `TorchUpdater` drives
optimizers of torch.optim, timm or a user. `Updater` is what a training step and a checkpoint know of both.

An optimizer with torch's interface gets tensors that share the memory of the working tensors, with unscaled and
clipped gradients of their dtype. So it knows nothing of loss scales, half precision or shards.

torch.optim's classes use their fused kernels where the device has them, unless the arguments say otherwise: one kernel
instead of a dozen operators for each parameter. It divides by the loss scale itself.

A skipped update is one that is not made, so the host must know. On a CPU it reads memory anyway. On another device this
is one transfer a step, of the skip flag and the learning rate. An optimizer with torch's fused kernels needs none: the
kernels skip, and the learning rate is a device value. Except for the first update of each parameter: fused SGD, skipped
in its first step, would later read a momentum that was never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from typing_extensions import override

from mptrain.numerics.lost_updates import lost_decays, states_of
from mptrain.numerics.overflow_check import Verdict
from mptrain.numerics.tensors import as_part_of, memory_order, part_for
from mptrain.optimizer.rules import Group, ParameterOptions, Rule, UpdateInputs
from mptrain.optimizer.torch_rule import TorchRule, TorchState, groups_of, public_name, same
from mptrain.system.device import capabilities
from mptrain.system.errors import out_of_memory
from mptrain.system.torch_private import (
    begin_late_momentum,
    foreach_div,
    fused_step,
    has_step_hooks,
    skips_on_device,
    tree_leaves,
)

if TYPE_CHECKING:
    from mptrain.optimizer.masters import MasterWeights


#: Sets of parameters with gradients of which the views are kept. With stochastic depth or a mixture of experts, almost
#: every step has a set of its own.
_MOST_GROUPS = 64


class Updater(Protocol):
    """Interface of an optimizer of P parameters, with its state.

    Attributes:
        step: Number of applied updates, float32 of shape (1,), on the device of the weights.
    """

    step: Tensor

    def describe(self) -> str:
        """Describe in one line for the user what the configuration does not say of the optimizer; may be empty."""

    def __call__(self, grads: list[Tensor | None], verdict: Verdict, lr: Tensor, grad_scale: Tensor | None) -> None:
        """Apply one update: change the weights in place and round them to half-precision parameters.

        A skipped update changes neither weights nor optimizer state. The P gradients are scaled, and may be
        overwritten; a parameter with None is not updated. ``lr`` and ``grad_scale``, their divisor, are float32 of
        shape (1,); None does not divide. Raises ConfigError if an optimizer with torch's interface cannot be driven.
        """

    def lost_decays(self) -> list[dict[str, Any]]:
        """Return which state in half precision cannot fall (`mptrain.numerics.lost_updates.lost_decays`)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state for a checkpoint.

        ``step`` is that of the updater; ``state`` has for each parameter name its state by name, in its own dtype.
        Further entries are those of the class. Raises ConfigError if a checkpoint cannot hold the state.
        """

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Load an optimizer state, matched by parameter name.

        Returns sentences for the user, none if all was loaded. State of another optimizer or model is not loaded.
        """


class RuleUpdater(Updater):
    """Update rule of mptrain with its optimizer state for P parameters.

    Its state dict may also have ``missed``: by parameter name, the number of applied updates without a gradient,
    float32 of shape (1,). State tensors are loaded in the present dtypes, so that FP32 moments stay FP32.
    """

    def __init__(
        self,
        rule: Rule,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        masters: MasterWeights,
        options: Sequence[ParameterOptions],
    ) -> None:
        self._rule, self._names, self._params, self._masters = rule, tuple(names), list(params), masters
        self._options = list(options)
        self._state = [rule.state(work) for work in masters.work]
        device = masters.work[0].device
        self.step = torch.zeros(1, dtype=torch.float32, device=device)
        self._cohorts = [_Cohort({*range(len(self._names))})]
        self._groups: dict[tuple[bool, ...], list[_Members]] = {}

    @override
    def describe(self) -> str:
        return ""

    @override
    def __call__(self, grads: list[Tensor | None], verdict: Verdict, lr: Tensor, grad_scale: Tensor | None) -> None:
        self.step.add_(verdict.applied)
        inputs = UpdateInputs(lr=lr, step=self.step, grad_scale=grad_scale, skip=verdict.skip)
        self._masters.copy_from_params()
        live = tuple([grad is not None for grad in grads])
        if False in live:
            self._count_missed(live, verdict.applied)
        with torch.no_grad():  # some working tensors are the parameters themselves
            for members in self._live_groups(live):
                members.follow_weights()
                self._rule.apply(members.group, members.of(grads), members.own(inputs))
        increment_version(self._masters.parts)  # torch's fused kernels do not notify autograd
        self._masters.copy_to_params(self.step)

    @override
    def lost_decays(self) -> list[dict[str, Any]]:
        return lost_decays((state, vars(self._rule)) for state in self._state)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {
            name: {key: as_part_of(tensor, p) for key, tensor in tensors.items()}
            for name, p, tensors in zip(self._names, self._params, self._state, strict=True)
        }
        missed = {
            self._names[i]: cohort.missed
            for cohort in self._cohorts
            if cohort.missed is not None
            for i in cohort.indices
        }
        return {"step": self.step, "state": state, **({"missed": missed} if missed else {})}

    @override
    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        step, state = saved["step"], saved["state"]
        assert isinstance(step, torch.Tensor)
        assert isinstance(state, dict)
        own = dict(zip(self._names, self._state, strict=True))
        lost = [name for name in own if state.get(name, {}).keys() != own[name].keys()]
        if lost:  # moments without their step count would get the wrong bias correction
            return [f"optimizer state reset: the checkpoint has no matching state of {lost[0]}"]
        for (name, tensors), p in zip(own.items(), self._params, strict=True):
            for key, tensor in tensors.items():
                tensor.copy_(part_for(state[name][key], p))
        self.step.copy_(step)
        missed = saved.get("missed", {})
        assert isinstance(missed, dict)
        # Parameters with equal counts are one cohort, whatever their history: bias corrections read the count alone.
        alike: dict[float, set[int]] = {}
        for index, name in enumerate(self._names):
            alike.setdefault(float(missed.get(name, 0.0)), set()).add(index)
        self._cohorts = [
            _Cohort(indices, torch.full_like(self.step, count) if count else None) for count, indices in alike.items()
        ]
        self._groups = {}
        return []

    def _count_missed(self, live: tuple[bool, ...], applied: Tensor) -> None:
        """Count an update for the parameters without a gradient; those of a cohort that differ now are parted."""
        for cohort in [*self._cohorts]:
            absent = {index for index in cohort.indices if not live[index]}
            if not absent:
                continue
            parted = cohort
            if absent != cohort.indices:
                cohort.indices -= absent
                parted = _Cohort(absent, None if cohort.missed is None else cohort.missed.clone())
                self._cohorts.append(parted)
                self._groups = {}
            if parted.missed is None:
                parted.missed = torch.zeros_like(self.step)
            parted.missed.add_(applied)

    def _live_groups(self, live: tuple[bool, ...]) -> list[_Members]:
        if live not in self._groups:
            if len(self._groups) == _MOST_GROUPS:
                self._groups = {}
            work, alike = self._masters.work, dict[tuple[ParameterOptions, torch.dtype, int], list[int]]()
            cohorts = {index: number for number, cohort in enumerate(self._cohorts) for index in cohort.indices}
            for index, own in enumerate(self._options):
                if live[index]:
                    alike.setdefault((own, work[index].dtype, cohorts[index]), []).append(index)
            self._groups[live] = [
                _Members(indices, own, self._cohorts[number], work, self._state)
                for (own, _, number), indices in alike.items()
            ]
        return self._groups[live]


@dataclass
class _Cohort:
    """Parameters that have had gradients in the same updates, by index.

    ``missed``, float32 of shape (1,), is the number of applied updates without one; None for 0. As in torch's
    optimizers, the bias correction of a parameter counts its own updates.
    """

    indices: set[int]
    missed: Tensor | None = None


class _Members:
    """Parameters that one call of a rule updates.

    The rule receives views in memory order. On a CPU torch's fused kernels take twice as long for channels_last, and
    are silently wrong if a gradient has another memory order than its weight (observed in torch 2.15).
    """

    def __init__(
        self,
        indices: list[int],
        options: ParameterOptions,
        cohort: _Cohort,
        work: list[Tensor],
        state: list[dict[str, Tensor]],
    ) -> None:
        self._indices, self._options, self._cohort = indices, options, cohort
        self._weights, self._kept = [work[i] for i in indices], [state[i] for i in indices]
        self._places: list[tuple[int, tuple[int, ...]]] = []
        self.follow_weights()

    def follow_weights(self) -> None:
        """Renew the views of weights and state if a module has reallocated a parameter or changed its memory order."""
        layouts = [(weight.data_ptr(), weight.stride()) for weight in self._weights]
        if layouts == self._places:
            return
        self._places, self._orders = layouts, [memory_order(weight) for weight in self._weights]
        for weight, kept in zip(self._weights, self._kept, strict=True):
            for name, tensor in kept.items():
                if tensor.stride() != weight.stride():
                    kept[name] = torch.empty_like(weight, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        self.group = Group(
            weights=self._views(self._weights),
            state={name: self._views([kept[name] for kept in self._kept]) for name in self._kept[0]},
            weight_decay=self._options.weight_decay,
        )

    def own(self, inputs: UpdateInputs) -> UpdateInputs:
        factor, missed = self._options.lr_factor, self._cohort.missed
        if missed is not None:
            inputs = inputs._replace(step=inputs.step - missed)
        return inputs if factor == 1 else inputs._replace(lr=inputs.lr * factor)

    def of(self, grads: list[Tensor | None]) -> list[Tensor]:
        views = self._views([grads[i] for i in self._indices])  # type: ignore[misc]
        return [view if view.is_contiguous() else view.contiguous() for view in views]

    def _views(self, tensors: list[Tensor]) -> list[Tensor]:
        if set(self._orders) == {None}:
            return tensors
        pairs = zip(tensors, self._orders, strict=True)
        return [tensor if order is None else tensor.permute(order) for tensor, order in pairs]


class TorchUpdater(Updater):
    """Optimizer with torch's interface, or two of them, with its state for P parameters.

    Raises ConfigError if the optimizer cannot be made of these parameters (`TorchRule.make`).

    Its state dict also has ``kind``, the name of the optimizer; ``groups``, values that it keeps for groups of
    parameters, with the names of these; ``others``, further entries of its own state dict; ``on_host``, names of state
    in host memory on another device; ``in_half``, names of parameters updated in half precision. State is loaded with
    its dtypes and values unchanged.
    """

    def __init__(
        self,
        rule: TorchRule,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        masters: MasterWeights,
        options: Sequence[ParameterOptions],
    ) -> None:
        self._rule, self._names, self._masters = rule, tuple(names), masters
        self._leaves = [nn.Parameter(work.detach()) for work in masters.work]
        self._optimizers, self._factors = rule.make(self._leaves, options)
        named = dict(zip(names, params, strict=True))
        self._state = TorchState(rule, self._optimizers, named, self._leaves, masters.in_place_half())
        self._first_updates = FirstUpdates(rule, self._optimizers, masters, self._leaves)
        device = masters.work[0].device
        self.step = torch.zeros(1, dtype=torch.float32, device=device)
        self._begun: set[int] = set()  # parameters that have been updated, by index
        # Hooks would see scaled gradients, and run for updates that the kernels skip.
        self._fused = all(skips_on_device(opt) and not has_step_hooks(opt) for opt in self._optimizers)
        self._on_host = capabilities(device).host
        self._may_keep = not all(public_name(type(opt)).startswith("torch.optim.") for opt in self._optimizers)

    @property
    def reads(self) -> bool:
        """True if the host reads a value from the device in every step."""
        return not self._fused and not self._on_host

    @override
    def describe(self) -> str:
        words = [public_name(type(optimizer)) for optimizer in self._optimizers]
        if words[1:]:
            counts = [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in self._optimizers]
            words[0] += f" for parameters with two dimensions ({counts[0]})"
            words[1] += f" for the others ({counts[1]})"
        return ", ".join([*words, *(["one host read a step"] if self.reads else [])])

    @override
    def __call__(self, grads: list[Tensor | None], verdict: Verdict, lr: Tensor, grad_scale: Tensor | None) -> None:
        live = {index for index, grad in enumerate(grads) if grad is not None}
        on_device = self._fused and not self._on_host and live <= self._begun
        rate: float | Tensor = lr[0]
        if not on_device:
            skip, rate = self._read(verdict.skip, lr)
            if skip:
                return
        self.step.add_(verdict.applied)
        self._masters.copy_from_params()
        addresses = self._follow_weights()
        self._hand(grads, None if self._fused else grad_scale)
        for group, factor in zip(groups_of(self._optimizers), self._factors, strict=True):
            group["lr"] = rate * factor if factor != 1 else rate
        self._masters.mark()
        checked = nullcontext() if on_device else self._first_updates.checked(rate, verdict.grad_norm)
        with checked, torch.no_grad():
            for optimizer in self._optimizers:
                if self._fused and not on_device:
                    begin_late_momentum(optimizer)
                self._step(optimizer, grad_scale, verdict.skip if on_device else None)
            self._take_over(addresses)
        for leaf in self._leaves:
            leaf.grad = None
        increment_version(self._masters.parts)  # torch's fused kernels do not notify autograd
        self._masters.copy_to_params(self.step)
        if not self._begun:
            self.state_dict()  # an optimizer whose state cannot be saved is refused now, not at the first checkpoint
        self._begun |= live

    @override
    def lost_decays(self) -> list[dict[str, Any]]:
        return lost_decays(pair for optimizer in self._optimizers for pair in states_of(optimizer))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self._state.save()}

    @override
    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        notes = self._state.load(saved)
        if not notes:
            self.step.copy_(saved["step"])
            begun = saved["state"] if self.step.item() else ()
            self._begun = {index for index, name in enumerate(self._names) if name in begun}
        return notes

    def _read(self, skip: Tensor, lr: Tensor) -> tuple[bool, float]:
        """Return whether to skip the update, and the learning rate: the one host read of a step."""
        skipped, rate = torch.cat([skip, lr]).tolist()
        return skipped == 1, rate

    def _follow_weights(self) -> list[int]:
        """Renew the shared memory if a module has reallocated a parameter or changed its memory order."""
        addresses = []
        for leaf, work in zip(self._leaves, self._masters.work, strict=True):
            addresses.append(work.data_ptr())
            if leaf.data_ptr() == addresses[-1] and leaf.stride() == work.stride():
                continue
            before = leaf.stride()
            leaf.data = work.detach()
            for optimizer in self._optimizers:
                state = optimizer.state.get(leaf, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == leaf.shape and value.stride() == before:
                        state[key] = torch.empty_like(leaf, dtype=value.dtype, requires_grad=False).copy_(value)

        return addresses

    def _take_over(self, addresses: Sequence[int]) -> None:
        """Copy weights to which an update gave other memory back to the working tensors, or raise ConfigError."""
        groups = groups_of(self._optimizers)
        if len(groups) != len(self._factors):
            raise self._rule.refused("adds or removes groups of parameters in an update")
        own = {id(leaf) for group in groups for leaf in group["params"]}
        if own != set(map(id, self._leaves)):
            raise self._rule.refused("replaces parameters in its groups, and the model keeps the old ones")
        for name, leaf, work, address in zip(self._names, self._leaves, self._masters.work, addresses, strict=True):
            if leaf.data_ptr() != address:
                if (leaf.shape, leaf.dtype) != (work.shape, work.dtype):
                    raise self._rule.refused(f"changes the shape or dtype of {name}")
                work.copy_(leaf)
                leaf.data = work.detach()
        for index in self._masters.touched():
            raise self._masters.lost_change(index, "in an update or by a hook of the optimizer")

    def _hand(self, grads: list[Tensor | None], grad_scale: Tensor | None) -> None:
        """Give the optimizers the gradients, divided by a scale, in dtype and memory order of the working tensors."""
        there = [(leaf, grad) for leaf, grad in zip(self._leaves, grads, strict=True) if grad is not None]
        divided = [grad if grad.dtype == leaf.dtype else grad.to(leaf.dtype) for leaf, grad in there]
        if grad_scale is not None and there:
            divided = list(foreach_div(divided, grad_scale[0]))
        elif self._may_keep:  # these gradients may be in memory that the next step uses again
            divided = [grad.clone() for grad in divided]
        for (leaf, _), grad in zip(there, divided, strict=True):
            fits = grad.dtype == leaf.dtype and grad.stride() == leaf.stride()
            leaf.grad = grad if fits else torch.empty_like(leaf, requires_grad=False).copy_(grad)

    def _step(self, optimizer: torch.optim.Optimizer, grad_scale: Tensor | None, skip: Tensor | None) -> None:
        try:
            if self._fused:
                fused_step(optimizer, None if grad_scale is None else grad_scale[0], None if skip is None else skip[0])
            else:
                optimizer.step()
        except torch.AcceleratorError:  # a device error, not one of the optimizer
            raise
        except Exception as error:  # optimizers of third parties may raise anything
            if refused := out_of_memory(error, f"updating with {self._rule.name}"):
                raise refused from error
            raise self._rule.failed("fails in an update", error) from error


#: Number of updates in which an optimizer may move no weight.
MOST_STILL = 10


class FirstUpdates:
    """Check of updates until one has moved a weight: no half-precision parameter and no attribute may change."""

    def __init__(
        self,
        rule: TorchRule,
        optimizers: Sequence[torch.optim.Optimizer],
        masters: MasterWeights,
        leaves: Sequence[Tensor],
    ) -> None:
        self._rule, self._optimizers, self._masters, self._leaves = rule, optimizers, masters, leaves
        self._still: int | None = 0  # updates that moved no weight; None once one has

    @contextmanager
    def checked(self, rate: float | Tensor, norm: Tensor) -> Iterator[None]:
        """Check one update, made inside at a learning rate and with a norm of the gradients, shape (1,).

        Raises ConfigError for an optimizer that moves no weight or keeps state where it is not saved.
        """
        if self._still is None:
            yield
            return
        weights, halves, own = self._copies()
        yield
        now, halves_now, own_now = self._copies()
        for index, pair in enumerate(zip(halves_now, halves, strict=True)):
            if not torch.equal(*pair):
                raise self._masters.lost_change(index, "in an update or by a hook of the optimizer")
        for key, values in own_now.items():
            before = own.get(key, [])
            if len(values) != len(before) or not all(map(same, values, before)):
                raise self._rule.unsaved(f"state in its attribute {key} instead of in state[parameter]")
        if not all(map(torch.equal, now, weights)) or self._masters.in_place_half():
            self._still = None
        elif rate > 0 and norm > 0:
            self._still += 1
            if self._still == MOST_STILL:
                still = f"moved no weight in {MOST_STILL} updates with nonzero gradients and a rate of {rate:.2g}"
                raise self._rule.refused(still)

    def _copies(self) -> tuple[list[Tensor], list[Tensor], dict[str, list[Any]]]:
        """Return copies of the weights, of their half-precision parameters, and of the optimizers' own attributes."""
        halves = [half.clone() for half in self._masters.rounded_into() if half is not None]
        own = {
            key: [x.clone() if isinstance(x, Tensor) else x for x in self._values(value)]
            for optimizer in self._optimizers
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict  # others save more
            for key, value in vars(optimizer).items()
            if key not in ("state", "param_groups", "defaults")
        }
        return [leaf.detach().clone() for leaf in self._leaves], halves, own

    def _values(self, value: Any) -> list[Any]:
        own = set(map(id, self._leaves))
        return [x for x in tree_leaves(value) if type(x) in (Tensor, int, float) and id(x) not in own]
