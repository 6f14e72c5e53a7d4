"""A training loop of your own, watched: its scaler skips updates, and the learning rate moves all the same."""

from __future__ import annotations

import torch
from torch import nn

import mptrain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

with mptrain.watch(model, optimizer, scaler, dir="outputs/watched") as watch:
    watch.on_event(print)
    for _ in range(100):
        images, labels = torch.randn(32, 64), torch.randint(10, (32,))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

print(watch.last)
print("mptrain report outputs/watched")
