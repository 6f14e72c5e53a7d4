"""Trains on two ranks, watched, into a folder; gradients of rank 1 alone overflow in the third step.

With DDP it is the backward pass of rank 1, with FSDP2 the shard of rank 1, or with replicas of all its backward pass.
The last line has the gradient norms that torch measured and the losses of rank 0.

torchrun --nproc-per-node 2 -m tests.integrations.two_ranks FOLDER copies|views|shards|replicas [MICROBATCHES]
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mptrain
from tests.integrations.watched_training import Network

KIND, FSDP, MICRO = sys.argv[2], sys.argv[2] in ("shards", "replicas"), int((*sys.argv, "1")[3])


def wrapped():
    network = Network(faults=(3 * MICRO,) if dist.get_rank() == 1 and KIND != "shards" else ())
    if not FSDP:
        return torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=KIND == "views")
    names = ("replicas", "shards") if KIND == "replicas" else ("shards",)
    mesh = init_device_mesh("cpu", (2, 1)[: len(names)], mesh_dim_names=names)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def synchronised(model, last):
    """A context in which gradients of ranks are added up only after the last micro-batch."""
    if FSDP:
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext() if FSDP or last else model.no_sync()


def spoil(grad):
    """Make the gradient of this rank's shard infinite."""
    grad.to_local().fill_(torch.inf)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrapped()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms, losses = [], []
    with mptrain.watch(model, optimizer, scaler, dir=sys.argv[1]):
        for step in range(1, 6):
            optimizer.zero_grad()
            if KIND == "shards" and step == 3 and dist.get_rank() == 1:
                first = next(model.parameters())
                handle = first.register_post_accumulate_grad_hook(lambda one: spoil(one.grad))
            losses.append(0.0)
            for micro in range(1, MICRO + 1):
                with synchronised(model, micro == MICRO):
                    loss = model(torch.randn(4, 8)).square().mean() / MICRO
                    scaler.scale(loss).backward()
                losses[-1] += loss.item()
            if step == 3 and KIND == "shards" and dist.get_rank() == 1:
                handle.remove()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            scaler.step(optimizer)
            scaler.update()
    if dist.get_rank() == 0:
        print([norms, losses])
    dist.destroy_process_group()
