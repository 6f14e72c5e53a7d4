"""Optimizer of torch's interface for P parameters: what `mptrain.optimizer.updater` does for update rules.

The optimizer gets tensors that share the memory of the working tensors, with unscaled and clipped gradients of their
dtype. So it knows nothing of loss scales, half precision or shards.

torch.optim's classes use their fused kernels where the device has them, unless the arguments say otherwise: one kernel
instead of a dozen operators for each parameter. It divides by the loss scale itself.

A skipped update is one that is not made, so the host must know. On a CPU it reads memory anyway. On another device this
is one transfer a step, of the skip flag and the learning rate. An optimizer with torch's fused kernels needs none: the
kernels skip, and the learning rate is a device value. Except for the first update of each set of parameters: fused SGD,
skipped in its first step, would later read a momentum that was never written.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mptrain.numerics.shards import as_part_of, is_sharded, part_for
from mptrain.optimizer.torch_rule import TorchRule, prefer_fused, public_name
from mptrain.system.device import capabilities
from mptrain.system.errors import ConfigError, instance, out_of_memory
from mptrain.system.torch_private import foreach_div, fused_step, has_step_hooks, skips_on_device, tree_leaves

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Verdict
    from mptrain.optimizer.masters import MasterWeights
    from mptrain.optimizer.parameter_groups import ParameterOptions


class TorchUpdater:
    """Optimizer of torch's interface with its state for P parameters; has the arguments and methods of `Updater`.

    torch.optim.Muon takes only matrices. The other parameters are updated by torch.optim.AdamW with the same learning
    rate and weight decay. Raises ConfigError if the optimizer cannot be made of these parameters.
    """

    def __init__(
        self,
        rule: TorchRule,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        masters: MasterWeights,
        options: Sequence[ParameterOptions],
    ) -> None:
        self._rule, self._names, self._params, self._masters = rule, tuple(names), list(params), masters
        self._leaves = [nn.Parameter(work.detach()) for work in masters.work]
        device = masters.work[0].device
        self.step = torch.zeros(1, dtype=torch.float32, device=device)
        self._index = {id(leaf): index for index, leaf in enumerate(self._leaves)}
        self._optimizers, self._factors = self._make(options)
        self._initial = [[_settings(group) for group in one.param_groups] for one in self._optimizers]
        self._begun: set[tuple[bool, ...]] = set()
        self._still: int | None = 0  # updates that moved no weight; None once one has
        self._fused = all(skips_on_device(one) and not has_step_hooks(one) for one in self._optimizers)
        self._on_host = capabilities(device).host

    @property
    def reads(self) -> bool:
        """True if the host reads a value from the device in every step."""
        return not self._fused and not self._on_host

    def describe(self) -> str:
        """Describe the optimizers in one line for the user: names, number of parameters and host reads."""
        words = [public_name(type(one)) for one in self._optimizers]
        if words[1:]:
            counts = [sum(len(group["params"]) for group in one.param_groups) for one in self._optimizers]
            words[0] += f" for parameters with two dimensions ({counts[0]})"
            words[1] += f" for the others ({counts[1]})"
        return ", ".join([*words, *(["one host read a step"] if self.reads else [])])

    def __call__(self, grads: list[Tensor | None], verdict: Verdict, lr: Tensor, grad_scale: Tensor | None) -> None:
        """Apply one update as `Updater` does, or raise ConfigError. Only fused kernels change the gradients."""
        live = tuple([grad is not None for grad in grads])
        on_device = self._fused and not self._on_host and live in self._begun
        rate: float | Tensor = lr[0]
        if not on_device:
            skip, rate = self._read(verdict.skip, lr)
            if skip:
                return
        self.step.add_(verdict.applied)
        self._masters.copy_from_params()
        places = self._follow_weights()
        self._hand(grads, None if self._fused else grad_scale)
        for group, factor in zip(self._groups(), self._factors, strict=True):
            group["lr"] = rate * factor if factor != 1 else rate
        self._masters.mark()
        before = None if on_device or self._still is None else self._values()
        with torch.no_grad():
            for optimizer in self._optimizers:
                self._step(optimizer, grad_scale, verdict.skip if on_device else None)
            self._take_over(places)
        if before is not None:
            self._require_sound(before, rate, verdict.grad_norm)
        for leaf in self._leaves:
            leaf.grad = None
        increment_version(self._masters.parts)  # torch's fused kernels do not notify autograd
        self._masters.copy_to_params()
        if not self._begun:
            self.state_dict()  # an optimizer whose state cannot be saved is refused now, not at the first checkpoint
        self._begun.add(live)

    def state_dict(self) -> dict[str, object]:
        """Return the optimizer state for a checkpoint, or raise ConfigError if a checkpoint cannot hold it.

        ``step``, float32 of shape (1,), is the number of applied updates; ``state`` has for each parameter name its
        state by name, in its own dtype; ``kind`` is the name of the optimizer; ``groups`` has values that it keeps for
        groups of parameters, with the names of these; ``others`` further entries of its own state dict; ``on_host``
        names of state in host memory on another device; ``in_half`` names of parameters updated in half precision.
        """
        state, on_host = {}, set()
        for leaf, entries in itertools.chain.from_iterable(one.state.items() for one in self._optimizers):
            index = self._index.get(id(leaf))
            if index is None:
                raise self._unsaved("state that belongs to no parameter")
            state[self._names[index]] = {
                key: self._sharded(index, self._plain(key, value)) for key, value in entries.items()
            }
            on_host |= {key for key, value in entries.items() if _is_on_host(value) and not _is_on_host(leaf)}
        groups = [
            {
                "names": [self._name(leaf) for leaf in group["params"]],
                "values": {
                    key: self._plain(key, value)
                    for key, value in _settings(group).items()
                    if key != "lr" and not (key in initial and _same(initial[key], value))
                },
            }
            for group, initial in zip(self._groups(), itertools.chain(*self._initial), strict=True)
        ]
        others = {
            public_name(type(one)): {
                key: self._plain(key, value) for key, value in one.state_dict().items() if key not in _USUAL
            }
            for one in self._optimizers
        }
        return {
            "step": self.step,
            "state": state,
            "kind": self._rule.name,
            "groups": groups,
            "others": others,
            "on_host": sorted(on_host),
            "in_half": self._masters.in_place_half(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Load an optimizer state, matched by parameter name, with its dtypes and values unchanged.

        Returns sentences for the user, none if all was loaded. State of another optimizer is not loaded.
        """
        if saved.get("kind") != self._rule.name:
            before = saved.get("kind") or "another optimizer"
            return [f"optimizer state reset: the checkpoint has the state of {before}, not of {self._rule.name}"]
        kept = {name: group["values"] for group in saved["groups"] for name in group["names"]}
        recast = set(self._masters.in_place_half()) ^ set(saved["in_half"])  # to another working dtype than when saved
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            others = saved["others"].get(public_name(type(optimizer)), {})
            self._load(optimizer, initial, saved["state"], kept, others)
            for leaf, state in optimizer.state.items():  # torch has cast it to the dtype of the parameter
                name = self._name(leaf)
                for key, value in saved["state"][name].items() if name not in recast else ():
                    to_host = key in saved["on_host"] and not skips_on_device(optimizer)  # fused kernels read counts
                    device = torch.device("cpu") if to_host else None
                    state[key] = _placed(self._part(name, value), state.get(key), device)
        self.step.copy_(saved["step"])
        self._begun.clear()
        if self.step.item():
            self._begun.add(tuple([name in saved["state"] for name in self._names]))
        return []

    def _load(
        self,
        optimizer: torch.optim.Optimizer,
        initial: Sequence[Mapping[str, Any]],
        states: Mapping[str, Any],
        kept: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> None:
        """Load a state into one optimizer, whose groups keep their constants as configured (``initial``)."""
        fresh, state = optimizer.state_dict(), {}
        groups = []
        for own, values, numbered in zip(optimizer.param_groups, initial, fresh["param_groups"], strict=True):
            names = [self._name(leaf) for leaf in own["params"]]
            groups.append({**values, **kept.get(names[0], {}), "params": numbered["params"]})
            for name, number in zip(names, numbered["params"], strict=True):
                if name in states:
                    state[number] = {key: self._part(name, value) for key, value in states[name].items()}
        optimizer.load_state_dict({**fresh, **copy.deepcopy(dict(others)), "state": state, "param_groups": groups})

    def _name(self, leaf: Tensor) -> str:
        return self._names[self._index[id(leaf)]]

    def _make(self, options: Sequence[ParameterOptions]) -> tuple[list[torch.optim.Optimizer], list[float]]:
        """Return the optimizers, and the learning rate factor of each of their groups in order."""
        rule, all_of_them, device = self._rule, range(len(self._leaves)), self.step.device
        kinds = [(rule.kind, rule.arguments, list(all_of_them))]
        if rule.name == "torch.optim.Muon":
            matrices = [index for index in all_of_them if self._params[index].ndim == 2]
            others = [index for index in all_of_them if self._params[index].ndim != 2]
            if not matrices:
                raise ConfigError(
                    f"{rule.name} updates parameters with two dimensions, and there are none", "choose adamw"
                )
            kinds = [(rule.kind, rule.arguments, matrices), (torch.optim.AdamW, {"lr": rule.lr}, others)]
        optimizers, factors = [], []
        for kind, arguments, members in kinds:
            alike: dict[ParameterOptions, list[nn.Parameter]] = {}
            for index in members:
                alike.setdefault(options[index], []).append(self._leaves[index])
            groups = [
                {
                    "params": leaves,
                    "lr": rule.lr * one.lr_factor,
                    **({"weight_decay": one.weight_decay} if rule.decays else {}),
                }
                for one, leaves in alike.items()
            ]
            if groups:
                try:
                    optimizers.append(kind(groups, **prefer_fused(kind, arguments, device)))
                except Exception as error:  # constructors of third parties may raise anything
                    raise self._failed("cannot be made of the model's parameters", error) from error
                factors += [one.lr_factor for one in alike]
        return optimizers, factors

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _read(self, skip: Tensor, lr: Tensor) -> tuple[bool, float]:
        """Return whether to skip the update, and the learning rate: the one host read of a step."""
        skipped, rate = torch.cat([skip, lr]).tolist()
        return skipped == 1, rate

    def _follow_weights(self) -> list[int]:
        """Renew the shared memory if a module has reallocated a parameter or changed its memory order."""
        places = []
        for leaf, work in zip(self._leaves, self._masters.work, strict=True):
            places.append(work.data_ptr())
            if leaf.data_ptr() == places[-1] and leaf.stride() == work.stride():
                continue
            before = leaf.stride()
            leaf.data = work.detach()
            for optimizer in self._optimizers:
                state = optimizer.state.get(leaf, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == leaf.shape and value.stride() == before:
                        state[key] = torch.empty_like(leaf, dtype=value.dtype, requires_grad=False).copy_(value)

        return places

    def _take_over(self, places: Sequence[int]) -> None:
        """Copy weights to which an update gave other memory back to the working tensors, or raise ConfigError."""
        own = [self._index.get(id(leaf)) for group in self._groups() for leaf in group["params"]]
        if len(own) != len(places) or None in own:
            raise self._refused("replaces parameters in its groups, and the model keeps the old ones")
        for name, leaf, work, place in zip(self._names, self._leaves, self._masters.work, places, strict=True):
            if leaf.data_ptr() != place:
                if (leaf.shape, leaf.dtype) != (work.shape, work.dtype):
                    raise self._refused(f"changes the shape or dtype of {name}")
                work.copy_(leaf)
                leaf.data = work.detach()
        for index in self._masters.touched():
            raise self._masters.lost_change(index, "in an update or by a hook of the optimizer")

    def _values(self) -> tuple[list[Tensor], list[Tensor], dict[str, list[Any]]]:
        """Return copies of the weights, of their half-precision parameters, and of the optimizers' own attributes."""
        halves = [half.clone() for half in self._masters.rounded_into() if half is not None]
        own = {
            key: [x.clone() if isinstance(x, Tensor) else x for x in self._own_values(value)]
            for one in self._optimizers
            if type(one).state_dict is torch.optim.Optimizer.state_dict  # others save more
            for key, value in vars(one).items()
            if key not in ("state", "param_groups", "defaults")
        }
        return [leaf.detach().clone() for leaf in self._leaves], halves, own

    def _own_values(self, value: Any) -> list[Any]:
        return [x for x in tree_leaves(value) if type(x) in (Tensor, int, float) and id(x) not in self._index]

    def _require_sound(
        self, before: tuple[list[Tensor], list[Tensor], dict[str, list[Any]]], rate: float | Tensor, norm: Tensor
    ) -> None:
        """Refuse, in the first updates, an optimizer that moves no weight or keeps state where it is not saved."""
        weights, halves, own = self._values()
        for index, pair in enumerate(zip(halves, before[1], strict=True)):
            if not torch.equal(*pair):
                raise self._masters.lost_change(index, "in an update or by a hook of the optimizer")
        for key, values in own.items():
            was = before[2].get(key, [])
            if len(values) != len(was) or not all(map(_same, values, was)):
                raise self._unsaved(f"state in its attribute {key} instead of in state[parameter]")
        if not all(map(torch.equal, weights, before[0])) or self._masters.in_place_half():
            self._still = None
        elif rate > 0 and norm > 0:
            self._still = (self._still or 0) + 1
            if self._still == 10:
                raise self._refused(f"moved no weight in 10 updates with nonzero gradients and a rate of {rate:.2g}")

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._rule.name} {what}",
            "let step() change the parameters that the optimizer was given, or choose another optimizer or rate",
        )

    def _hand(self, grads: list[Tensor | None], grad_scale: Tensor | None) -> None:
        """Give the optimizers the gradients, divided by a scale, in dtype and memory order of the working tensors."""
        there = [(leaf, grad) for leaf, grad in zip(self._leaves, grads, strict=True) if grad is not None]
        divided = [grad if grad.dtype == leaf.dtype else grad.to(leaf.dtype) for leaf, grad in there]
        if grad_scale is not None and there:
            divided = list(foreach_div(divided, grad_scale[0]))
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
            raise self._failed("fails in an update", error) from error

    def _failed(self, what: str, error: Exception) -> ConfigError:
        said = str(error).strip().partition("\n")[0]
        return ConfigError(
            f"{self._rule.name} {what}: {type(error).__name__}: {said}",
            "choose another optimizer, or other arguments; --traceback shows where it failed",
        )

    def _plain(self, key: str, value: Any) -> Any:
        """Return a value of the optimizer in plain containers, numbers, text and tensors, or raise ConfigError."""
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, Mapping):
            return {name: self._plain(key, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._plain(key, item) for item in value])
        if type(value) in (str, int, float, bool, type(None)):
            return value
        raise self._unsaved(f"{instance(value)} in '{key}'")

    def _unsaved(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._rule.name} keeps {what}, which a checkpoint cannot hold",
            "choose another optimizer: a run must be able to resume",
        )

    def _sharded(self, index: int, value: Any) -> Any:
        """Return state as part of a whole tensor, if its parameter is sharded and it has the shape of the shard."""
        sharded = isinstance(value, Tensor) and is_sharded(self._params[index])
        return as_part_of(value, self._params[index]) if sharded and value.shape == self._leaves[index].shape else value

    def _part(self, name: str, value: Any) -> Any:
        like = self._params[self._names.index(name)]
        return part_for(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value


#: Entries of every optimizer's state dict.
_USUAL = ("state", "param_groups")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _placed(value: Any, loaded: Any, device: torch.device | None) -> Any:
    """Return a copy of a saved value on a device, or where torch has loaded it; dtypes are kept."""
    if isinstance(value, Tensor):
        place = device or (loaded.device if isinstance(loaded, Tensor) else value.device)
        return value.detach().to(place, copy=True)
    if isinstance(value, Mapping):
        there = loaded if isinstance(loaded, Mapping) else {}
        return {name: _placed(item, there.get(name), device) for name, item in value.items()}
    if isinstance(value, list | tuple):
        near = loaded if isinstance(loaded, list | tuple) and len(loaded) == len(value) else [None] * len(value)
        return type(value)([_placed(item, place, device) for item, place in zip(value, near, strict=True)])
    return value
