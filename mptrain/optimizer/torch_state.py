"""State of optimizers with torch's interface in a checkpoint, and its conversion to a state dict of `torch.optim`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.numerics.shards import as_part_of, part_for
from mptrain.optimizer.torch_rule import TorchRule, public_name
from mptrain.system.errors import instance
from mptrain.system.torch_private import skips_on_device


def torch_optim_state(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Return a state dict for a `torch.optim` optimizer, to continue a run of mptrain in a program of your own.

    State tensors have torch's names and meaning (`mptrain.optimizer.rules`), and each parameter the number of its own
    updates. Learning rate and other constants are those of
    ``optimizer``. State of an optimizer with torch's interface is returned as it is. For torch.optim.Muon, whose other
    parameters torch.optim.AdamW has updated, call this once for each of the two.

    Args:
        saved: Optimizer state in a checkpoint: ``state["learners"][LEARNER]["optimizer"]``.
        optimizer: Optimizer of the same kind, over the same parameters in FP32. It is not changed; give the result to
            its ``load_state_dict``.
        named: ``dict(model.named_parameters())``.

    Raises:
        ValueError: The state belongs to another kind of optimizer or another network; the message names the parameter.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    if "kind" in saved:
        return _adapted_state(saved, optimizer, names)
    expected = _keys_of(optimizer)
    own = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(order):
        name = names.get(id(parameter), "")
        tensors = saved["state"].get(name)
        if tensors is None:
            raise ValueError(f"the checkpoint has no state of {name or 'a parameter that is not in named'}")
        if expected is not None and tensors.keys() != expected:
            raise ValueError(
                f"the checkpoint has {_words(tensors)} of {name}, but {type(optimizer).__name__}"
                f" needs {_words(expected)}"
            )
        for key, value in tensors.items():
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)}, but the parameter has {tuple(parameter.shape)}"
                )
        count = saved["step"] - saved.get("missed", {}).get(name, 0)
        step = {} if tensors.keys() <= {"momentum_buffer"} else {"step": count.squeeze().cpu()}
        state[index] = {**step, **{name: value.clone() for name, value in tensors.items()}}
    return {"state": state, "param_groups": own["param_groups"]}


def _adapted_state(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    kind = public_name(type(optimizer))
    if kind not in saved["others"]:
        raise ValueError(f"the checkpoint has the state of {' and '.join(saved['others'])}, not of {kind}")
    kept = {name: group["values"] for group in saved["groups"] for name in group["names"]}
    own, state = optimizer.state_dict(), {}
    for group, numbered in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            name = names.get(id(parameter), "")
            if name not in kept:
                raise ValueError(f"the checkpoint has no state of {name or 'a parameter that is not in named'}")
            state[number] = copy.deepcopy(saved["state"].get(name, {}))
            numbered.update(copy.deepcopy(kept[name]))
    return {**own, "state": state, **copy.deepcopy(saved["others"][kind])}


def _keys_of(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the names of the state tensors of a checkpoint for an optimizer; None for an unknown kind."""
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    known = {"Adam": {"exp_avg", "exp_avg_sq"}, "AdamW": {"exp_avg", "exp_avg_sq"}, "Adagrad": {"sum"}}
    if kind == "SGD":
        return {"momentum_buffer"} if defaults["momentum"] else set()
    return known.get(kind)


def _words(keys: Iterable[str]) -> str:
    return " and ".join(sorted(keys)) or "no state"


#: Entries of every optimizer's state dict.
_USUAL = ("state", "param_groups")


class TorchState:
    """State of the optimizers with torch's interface that update P parameters, in the format of checkpoints.

    The optimizers update ``leaves``, one for each parameter in ``named``, those with the names ``in_half`` in half
    precision.
    """

    def __init__(
        self,
        rule: TorchRule,
        optimizers: Sequence[torch.optim.Optimizer],
        named: Mapping[str, nn.Parameter],
        leaves: Sequence[nn.Parameter],
        in_half: Sequence[str],
    ) -> None:
        self._rule, self._optimizers, self._named, self._in_half = rule, optimizers, named, in_half
        self._names = {id(leaf): name for name, leaf in zip(named, leaves, strict=True)}
        self._initial = [[_settings(group) for group in one.param_groups] for one in optimizers]

    def save(self) -> dict[str, object]:
        """Return the state, as in `TorchUpdater.state_dict` but for the number of updates, or raise ConfigError."""
        state, on_host = {}, set()
        for leaf, entries in itertools.chain.from_iterable(one.state.items() for one in self._optimizers):
            name = self._names.get(id(leaf))
            if name is None:
                raise self._rule.unsaved("state that belongs to no parameter")
            state[name] = {
                key: _like_part(self._plain(key, value), leaf, self._named[name]) for key, value in entries.items()
            }
            on_host |= {key for key, value in entries.items() if _is_on_host(value) and not _is_on_host(leaf)}
        groups = [
            {
                "names": [self._names[id(leaf)] for leaf in group["params"]],
                "values": {
                    key: self._plain(key, value)
                    for key, value in _settings(group).items()
                    if key != "lr" and not (key in initial and same(initial[key], value))
                },
            }
            for group, initial in zip(groups_of(self._optimizers), itertools.chain(*self._initial), strict=True)
        ]
        others = {
            public_name(type(one)): {
                key: self._plain(key, value) for key, value in one.state_dict().items() if key not in _USUAL
            }
            for one in self._optimizers
        }
        return {
            "state": state,
            "kind": self._rule.name,
            "groups": groups,
            "others": others,
            "on_host": sorted(on_host),
            "in_half": list(self._in_half),
        }

    def load(self, saved: Mapping[str, Any]) -> list[str]:
        """Load a state; return sentences for the user as `TorchUpdater.load_state_dict`."""
        if saved.get("kind") != self._rule.name:
            before = saved.get("kind") or "another optimizer"
            return [f"optimizer state reset: the checkpoint has the state of {before}, not of {self._rule.name}"]
        kept = {name: group["values"] for group in saved["groups"] for name in group["names"]}
        recast = set(self._in_half) ^ set(saved["in_half"])  # to another working dtype than when saved
        states = {
            name: {key: _part(value, self._named[name]) for key, value in saved["state"][name].items()}
            for name in self._named
            if name in saved["state"]
        }
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            others = saved["others"].get(public_name(type(optimizer)), {})
            self._load(optimizer, initial, states, kept, others)
            for leaf, state in optimizer.state.items():  # torch has cast it to the dtype of the parameter
                name = self._names[id(leaf)]
                for key, value in states[name].items() if name not in recast else ():
                    to_host = key in saved["on_host"] and not skips_on_device(optimizer)  # fused kernels read counts
                    state[key] = _placed(value, state.get(key), torch.device("cpu") if to_host else None)
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
        fresh, state = optimizer.state_dict(), dict[int, dict[str, Any]]()
        groups = []
        for own, values, numbered in zip(optimizer.param_groups, initial, fresh["param_groups"], strict=True):
            names = [self._names[id(leaf)] for leaf in own["params"]]
            groups.append({**values, **kept.get(names[0], {}), "params": numbered["params"]})
            state |= {
                number: states[name] for name, number in zip(names, numbered["params"], strict=True) if name in states
            }
        optimizer.load_state_dict({**fresh, **copy.deepcopy(dict(others)), "state": state, "param_groups": groups})

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
        raise self._rule.unsaved(f"{instance(value)} in '{key}'")


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups of optimizers in order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def same(one: Any, other: Any) -> bool:
    """Return whether two values of an optimizer are equal and of the same type."""
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


def _like_part(value: Any, leaf: Tensor, parameter: Tensor) -> Any:
    """Return state as part of a whole tensor, if its parameter is sharded and it has the shape of the shard."""
    return as_part_of(value, parameter) if isinstance(value, Tensor) and value.shape == leaf.shape else value


def _part(value: Any, parameter: Tensor) -> Any:
    return part_for(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
