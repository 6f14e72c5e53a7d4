"""Conversion of the optimizer state in a checkpoint to a state dict of `torch.optim`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mptrain.optimizer.torch_rule import public_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def torch_optim_state(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Return a state dict for a `torch.optim` optimizer, to continue a run of mptrain in a program of your own.

    State tensors have torch's names and meaning (`mptrain.optimizer.rules`). mptrain counts updates once for all
    parameters; the state dict repeats that count for each. Learning rate and other constants are those of
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
        step = {} if tensors.keys() <= {"momentum_buffer"} else {"step": saved["step"].squeeze().clone().cpu()}
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
