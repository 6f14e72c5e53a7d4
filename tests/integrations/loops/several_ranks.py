"""Loops of two ranks."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.loops.judge import batches, cpu_scaler, loop, loss_of, mlp, norm, update

ALL = {"0.weight", "0.bias", "2.weight", "2.bias"}


@loop(processes=2, tolerance=2e-2, blamed={(1, 3): ALL})
def compressed_views(watch, truth):
    """DDP keeps gradients in its buckets and sends them in BF16; rank 1 alone overflows in the third update."""
    model, scaler = mlp(), cpu_scaler()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watch(parallel, optimizer, scaler):
        for i, x, y in batches(5, seed=10 + dist.get_rank()):
            if (i, dist.get_rank()) == (3, 1):
                x[:, 2] = math.inf
            update(truth, model, optimizer, loss_of(parallel, x, y), scaler, skipped=i == 3)
    return model


@loop(processes=2)
def sharded(watch, truth):
    """FSDP2 with a guard by the norm of all shards; the third batch of rank 1 is NaN."""
    model = mlp(outputs=4)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with watch(model, optimizer):
        for i, x, y in batches(5, outputs=4, seed=10 + dist.get_rank()):
            if (i, dist.get_rank()) == (3, 1):
                x[:, 0] = math.nan
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()
            if math.isfinite(total):
                truth.step(norm=total)
                optimizer.step()
            else:
                grads = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
                truth.spoiled([name for name, grad in grads.items() if not grad.isfinite().all()])
                truth.left_out += 1
    return [one.to_local() for one in model.parameters()]


@loop(processes=2, blamed={(1, 2): {"1.bias"}})
def pipeline(watch, truth):
    """Each rank has a stage and sends activations and gradients by hand; rank 1 overflows in the second update."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.ReLU(), nn.Linear(8, 3)) if rank else nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, optimizer):
        for i, x, y in batches(4):
            optimizer.zero_grad()
            if rank == 0:
                hidden = model(x)
                dist.send(hidden.detach(), 1)
                grad = torch.empty_like(hidden)
                dist.recv(grad, 1)
                hidden.backward(grad)
                truth.step(norm=norm(model))
            else:
                hidden = torch.empty(16, 8)
                dist.recv(hidden, 0)
                hook = model[1].bias.register_hook(lambda grad: grad * math.inf) if i == 2 else None
                F.cross_entropy(model(hidden.requires_grad_()), y).backward()
                dist.send(hidden.grad, 0)
                if hook is not None:
                    hook.remove()
                    model[1].bias.grad.zero_()
            optimizer.step()
    return model


@loop(processes=2, blamed={(1, 2): ALL})
def accumulated_without_sync(watch, truth):
    """DDP averages the last of three micro-batches; the fifth of rank 1 is NaN, and both ranks leave out its update."""
    model, data = mlp(), batches(12, seed=10 + dist.get_rank())
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watch(parallel, optimizer):
        for first in range(0, 12, 3):
            optimizer.zero_grad()
            for i, x, y in data[first : first + 3]:
                if (i, dist.get_rank()) == (5, 1):
                    x[:, 0] = math.nan
                with contextlib.nullcontext() if i % 3 == 0 else parallel.no_sync():
                    (loss_of(parallel, x, y) / 3).backward()
            truth.look(model)
            if math.isfinite(norm(model)):
                truth.step(norm=norm(model))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            else:
                truth.left_out += 1
    return model
