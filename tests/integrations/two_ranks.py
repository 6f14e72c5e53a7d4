"""Trains on two ranks, watched, into a folder; gradients of rank 1 alone overflow in the third step.

With DDP it is the backward pass of rank 1, with FSDP2 the shard of rank 1.

torchrun --nproc-per-node 2 -m tests.integrations.two_ranks FOLDER copies|views|shards
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mptrain
from tests.integrations.test_watch import Network


def wrapped(kind):
    network = Network(faults=(3,) if dist.get_rank() == 1 and kind != "shards" else ())
    if kind != "shards":
        return torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=kind == "views")
    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return fully_shard(network, mesh=init_device_mesh("cpu", (2,)))


def spoil(grad):
    """Make the gradient of this rank's shard infinite."""
    grad.to_local().fill_(torch.inf)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrapped(sys.argv[2])
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    with mptrain.watch(model, optimizer, scaler, dir=sys.argv[1]):
        for step in range(1, 6):
            optimizer.zero_grad()
            if sys.argv[2] == "shards" and step == 3 and dist.get_rank() == 1:
                first = next(model.parameters())
                handle = first.register_post_accumulate_grad_hook(lambda one: spoil(one.grad))
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            if step == 3 and sys.argv[2] == "shards" and dist.get_rank() == 1:
                handle.remove()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            scaler.step(optimizer)
            scaler.update()
    if dist.get_rank() == 0:
        print(norms)
    dist.destroy_process_group()
