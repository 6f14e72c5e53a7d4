"""Sharding of a model's weights over ranks with torch's fully_shard (FSDP2).

The backward pass yields sharded gradients, summed over ranks, in the dtype of the parameters. torch rounds FP32 master
weights to half precision when it gathers them: weights beyond 65504 become inf, whereas
`mptrain.optimizer.weights.MasterWeights.copy_to_params` saturates them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from mptrain.system.errors import ConfigError, did_you_mean


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
    """Shard every parameter of a model over ranks, in place, with gradients summed over ranks instead of averaged.

    A unit is a module whose parameters are gathered together before it is called.

    Args:
        root: Module whose forward is a whole pass; parameters outside all units are gathered for the whole pass.
        model: Model within ``root``; units are named like its modules.
        units: Qualified names of the modules that form units; None selects `composite_members`.
        kept: Modules with parameters of another dtype, which form units of their own and are not rounded.
        comm: A `mptrain.parallel.communicator.DistributedCommunicator`.
        compute: Dtype to which gathered parameters are rounded; None does not round.
        wide: Whether to sum half-precision gradients in FP32.

    Raises:
        ConfigError: The model has no module of a given name.
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
    for key in sorted(gathered, key=order.__getitem__, reverse=True):  # inner modules first
        fully_shard(gathered[key], mesh=mesh, mp_policy=as_it_is if key in apart else rounded)
    fully_shard(root, mesh=mesh, mp_policy=rounded)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are shares of the global batch: sum, do not average
            module.set_force_sum_reduction_for_comms(True)


def composite_members(model: nn.Module) -> list[nn.Module]:
    """Return the members of ``nn.Sequential`` and ``nn.ModuleList`` that have submodules: the blocks of most networks.

    Members without parameters are left out, and members that share a parameter with a module outside, because a
    parameter belongs to one unit.
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
            f"did you mean {guess}?" if guess else "use qualified names of the model's modules",
        )
    found: nn.Module = known[name]
    return found
