"""Weights of which every rank has a part: torch's fully_shard, told which modules to gather together.

Gradients come out of the backward pass summed over ranks, as parts again, in the parameters' dtype. FP32 masters are rounded to half precision
whenever they are gathered, by torch, which makes inf of what `mptrain.optimizer.weights.MasterWeights.copy_to_params` saturates: weights beyond 65504.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from mptrain.errors import ConfigError, did_you_mean


def shard(
    root: nn.Module,
    model: nn.Module,
    units: Sequence[str] | None,
    kept: Collection[nn.Module],
    comm: Any,
    *,
    compute: torch.dtype | None,
    wide: bool,
) -> None:
    """Leave on this rank its part of every parameter.

    Args:
        root: Its forward is a whole pass; what no unit has is gathered for all of it.
        model: Within it; the units are named as its modules are.
        units: Modules that are gathered when they are called; None chooses.
        kept: Modules with parameters of another dtype than their neighbours', which are gathered by themselves, as they are.
        comm: A `mptrain.parallel.communicator.DistributedCommunicator`.
        compute: Dtype to which parameters are rounded when they are gathered; None leaves them.
        wide: Sum half-precision gradients in FP32.

    Raises:
        ConfigError: There is no such module.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    mesh = DeviceMesh.from_group(comm.group, device.type)
    reduce = torch.float32 if wide else None
    rounded = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    as_it_is = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    chosen = composite_members(model) if units is None else [_named(model, name) for name in units]
    apart = {id(module): module for module in kept if any(True for _ in module.parameters())}
    order = {id(module): place for place, module in enumerate(model.modules())}
    gathered = {id(module): module for module in chosen} | apart
    for key in sorted(gathered, key=order.__getitem__, reverse=True):  # the inner ones first
        fully_shard(gathered[key], mesh=mesh, mp_policy=as_it_is if key in apart else rounded)
    fully_shard(root, mesh=mesh, mp_policy=rounded)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # shares of the whole are summed
            module.set_force_sum_reduction_for_comms(True)


def composite_members(model: nn.Module) -> list[nn.Module]:
    """Members of sequences and lists of modules that consist of modules themselves: the blocks of most networks.

    Those that share a parameter with anything outside are left out, since a parameter is gathered in one place.
    """
    places: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(id(module))
    found = []
    for holder in model.modules():
        if not isinstance(holder, (nn.Sequential, nn.ModuleList)):
            continue
        for member in holder.children():
            inside = {id(module) for module in member.modules()}
            own = list(member.parameters())
            if len(inside) > 1 and own and all(places[id(parameter)] <= inside for parameter in own):
                found.append(member)
    return found


def _named(model: nn.Module, name: str) -> nn.Module:
    known = dict(model.named_modules())
    if name not in known or not name:
        guess = did_you_mean(name, known)
        raise ConfigError(
            f"distributed.units: the model has no module {name!r}",
            f"did you mean {guess}?" if guess else "name modules as the model does",
        )
    found: nn.Module = known[name]
    return found
