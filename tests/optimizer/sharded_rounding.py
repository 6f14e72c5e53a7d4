"""Steps of wrapped optimizers on two ranks with FSDP2 shards, compared with the same steps of whole weights.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.optimizer.sharded_rounding
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import mptrain
from mptrain.numerics.lost_updates import RoundedUpdates, lost_at_start
from mptrain.optimizer import compensated, stochastic


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 51), nn.LayerNorm(51), nn.Linear(51, 7)).bfloat16()


def steps(model, optimizer, *, sharded):
    for step in range(3):
        torch.manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape).bfloat16()
            parameter.grad = (
                distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if sharded else gradient
            )
        optimizer.step()
    return {name: (value.full_tensor() if sharded else value).detach() for name, value in model.named_parameters()}


def told_and_seen(model):
    """Shares of the updates that are lost, of this rank's shards: from the state, and as seen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    told = seen = updates = 0
    for step in range(10):
        torch.manual_seed(100 + step)
        model(torch.randn(16, 30).bfloat16()).float().square().mean().backward()
        before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            update = RoundedUpdates(optimizer).exact(parameter, old, lambda tensor: tensor)
            told += int(((update != 0) & ((old.float() + update).bfloat16() == old)).sum())
            seen += int(((update != 0) & (parameter.to_local() == old)).sum())
            updates += int((update != 0).sum())
        optimizer.zero_grad()
    return told / updates, seen / updates


if __name__ == "__main__":
    dist.init_process_group("gloo")
    answers = {}
    for wrap in (stochastic, compensated):
        whole = network()
        expected = steps(whole, wrap(torch.optim.AdamW(whole.parameters(), lr=1e-3)), sharded=False)
        parts = fully_shard(network())
        got = steps(parts, wrap(torch.optim.AdamW(parts.parameters(), lr=1e-3)), sharded=True)
        answers[wrap.__name__] = all(torch.equal(expected[name], got[name]) for name in expected)
    wide = fully_shard(network().float(), mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-5)
    answers["fp32 shards"] = lost_at_start(optimizer) is None
    answers["fp32 shards lose"] = any(RoundedUpdates(optimizer).are_lost(parameter) for parameter in wide.parameters())
    answers["shares"] = told_and_seen(fully_shard(network()))
    with mptrain.watch(parts, torch.optim.SGD(parts.parameters(), lr=1e-3), every=1) as watch:
        parts(torch.randn(4, 30).bfloat16()).float().mean().backward()
        watch.learners[0].optimizer.step()
        watch.flush()
        answers["watched"] = watch.last["lost_updates"]
    if dist.get_rank() == 0:
        print(json.dumps(answers))
    dist.destroy_process_group()
