"""Optimizer state of a checkpoint as the optimizers of torch.optim take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn


def torch_optim_state(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, so that a program of one's own goes on where a run has ended.

    Names of state tensors and their meaning are torch's (`mptrain.optimizer.rules`). The count of updates, which is one for all
    parameters here, is given to each. Learning rate and other constants stay those of ``optimizer``.

    Args:
        saved: ``state["learners"][LEARNER]["optimizer"]`` of a checkpoint.
        optimizer: Of the same kind, over the same parameters in FP32.
        named: ``dict(model.named_parameters())``.

    Raises:
        KeyError: A parameter of the optimizer has no name, or no state in the checkpoint; it says which.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    own = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(order):
        tensors = saved["state"][names[id(parameter)]]
        step = {} if tensors.keys() <= {"momentum_buffer"} else {"step": saved["step"].squeeze().clone().cpu()}
        state[index] = {**step, **{name: value.clone() for name, value in tensors.items()}}
    return {"state": state, "param_groups": own["param_groups"]}
