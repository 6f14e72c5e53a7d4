"""Optimizer of P parameters: an update rule with its state, on the fastest kernels of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mptrain.numerics.overflow_check import Verdict, memory_order
from mptrain.numerics.shards import as_part_of, part_for
from mptrain.optimizer.rules import Group, ParameterOptions, Rule, UpdateInputs

if TYPE_CHECKING:
    from mptrain.optimizer.masters import MasterWeights


class Updater:
    """Update rule with its optimizer state for P parameters; ``step`` (float32, shape (1,)) counts applied updates."""

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

    def describe(self) -> str:
        """Return an empty text: the configuration says all about an update rule."""
        return ""

    def __call__(self, grads: list[Tensor | None], verdict: Verdict, lr: Tensor, grad_scale: Tensor | None) -> None:
        """Apply one update: change the weights in place and round them to half-precision parameters.

        A skipped update changes neither weights nor optimizer state. The P gradients are scaled; a parameter with None
        is not updated. ``lr`` and ``grad_scale``, their divisor, are float32 of shape (1,); None does not divide.
        """
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
        self._masters.copy_to_params()

    def state_dict(self) -> dict[str, object]:
        """Return the optimizer state for a checkpoint.

        ``step``, float32 of shape (1,), is the number of applied updates; ``state`` has for each parameter name its
        state tensors by name, in their own dtype; ``missed``, if there are any, the number of applied updates without a
        gradient by parameter name, float32 of shape (1,).
        """
        state = {
            name: {key: as_part_of(tensor, p) for key, tensor in tensors.items()}
            for name, p, tensors in zip(self._names, self._params, self._state, strict=True)
        }
        missed = {self._names[i]: one.missed for one in self._cohorts if one.missed is not None for i in one.indices}
        return {"step": self.step, "state": state, **({"missed": missed} if missed else {})}

    def load_state_dict(self, saved: Mapping[str, object]) -> list[str]:
        """Load an optimizer state, matched by parameter name, in the present dtypes, so that FP32 moments stay FP32.

        Returns sentences for the user, none if all was loaded. State of another optimizer or model is not loaded.
        """
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
            work, alike = self._masters.work, dict[tuple[ParameterOptions, torch.dtype, int], list[int]]()
            cohorts = {index: number for number, one in enumerate(self._cohorts) for index in one.indices}
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
        places = [(weight.data_ptr(), weight.stride()) for weight in self._weights]
        if places == self._places:
            return
        self._places, self._orders = places, [memory_order(weight) for weight in self._weights]
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
