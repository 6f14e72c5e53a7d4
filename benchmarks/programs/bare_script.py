"""A script of 20 lines up to its first training step: the default network of `mptrain`, in FP32."""

import os

import torch
from torch import nn

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
inputs, targets = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
optimizer.zero_grad()
nn.functional.cross_entropy(model(inputs), targets).backward()
optimizer.step()
os._exit(0)
