"""Trains with DDP, watched, into a folder; the gradients of rank 1 alone overflow in the third step.

torchrun --nproc-per-node 2 -m tests.integrations.two_ranks FOLDER copies|views
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import mptrain
from tests.integrations.test_watch import Network

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = Network(faults=(3,) if dist.get_rank() == 1 else ())
    model = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=sys.argv[2] == "views")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with mptrain.watch(model, optimizer, scaler, dir=sys.argv[1]):
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()
