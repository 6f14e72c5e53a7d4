"""A network whose gradients become infinite in some steps, and its training, alone or watched."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mptrain
from mptrain.system.records import OverflowRecord

#: Steps from 1 whose backward pass is not finite below the third layer.
FAULTS = (4, 9)
BEHIND = ["0.weight", "0.bias", "2.weight", "2.bias"]
STEPS = 12


class Network(nn.Sequential):
    """Three layers, whose gradients become infinite between the second and the third in some steps."""

    def __init__(self, *, reentrant=None, faults=FAULTS):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.reentrant, self.faults, self.calls = reentrant, faults, 0

    def first(self, x):
        return self[2](self[1](self[0](x)))

    def forward(self, x):
        self.calls += 1
        if self.reentrant is None:
            h = self.first(x)
        else:
            h = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        if self.calls in self.faults:
            h.register_hook(lambda gradient: gradient * torch.inf)
        return self[4](self[3](h))


def train(
    watched,
    *,
    network=Network,
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    scaled=True,
    clip=True,
    micro=1,
    wrap=lambda model: model,
    every=5,
    folder=None,
):
    """Train for `STEPS` updates, and return losses, weights, events and the watch."""
    torch.manual_seed(0)
    model = wrap(network())
    own = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0) if scaled else None
    watch, events, losses = None, [], []
    if watched:
        watch = mptrain.watch(model, own, scaler, every=every, dir=folder)
        watch.on_event(events.append)
    for _ in range(STEPS):
        own.zero_grad()
        for _ in range(micro):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            loss = nn.functional.cross_entropy(model(x), y) / micro
            (scaler.scale(loss) if scaler else loss).backward()
            losses.append(loss.item())
        if scaler:
            if clip:
                scaler.unscale_(own)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(own)
            scaler.update()
        else:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.step()
        schedule.step()
    if watch:
        watch.close()
    return losses, [one.detach().clone() for one in model.parameters()], events, watch


def overflows(events):
    return {one.step: one for one in events if isinstance(one, OverflowRecord)}


def names(record):
    return [name for name, _ in record.tensors]
