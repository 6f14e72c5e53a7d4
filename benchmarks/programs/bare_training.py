"""The training of ``mptrain precision=fp32`` or ``amp_dynamic`` with its evaluations, as a script of stock torch.

It prints the seconds of training, without evaluation.
"""

import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from mptrain.workloads.images.datasets.digits import MEAN, STD, digits_path

EPOCHS, BATCH, RATE = 10, 32, 0.05
HALF = sys.argv[1:] == ["amp_dynamic"]

torch.manual_seed(0)
table = torch.from_numpy(np.loadtxt(digits_path(), delimiter=",", dtype=np.float32))
table = table[torch.randperm(len(table))]
images, labels = ((table[:, :64] / 16 - MEAN) / STD).view(-1, 1, 8, 8), table[:, 64].long()
TRAIN, VAL, TEST = torch.arange(1200), torch.arange(1200, 1400), torch.arange(1400, len(labels))

layers: list[nn.Module] = []
for width, outputs, pool in ((1, 32, False), (32, 32, True), (32, 64, True), (64, 128, False)):
    layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.MaxPool2d(2)] if pool else []
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
model.to(memory_format=torch.channels_last)
decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 1e-4}, {"params": others}]
optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * -(-len(TRAIN) // BATCH))
scaler = torch.amp.GradScaler("cpu", enabled=HALF)


def accuracy(which: torch.Tensor) -> float:
    """Share of samples that are classified correctly."""
    model.eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.float16, enabled=HALF):
        right = sum(int((model(images[part]).argmax(1) == labels[part]).sum()) for part in which.split(BATCH))
    model.train()
    return right / len(which)


seconds = 0.0
for _ in range(EPOCHS):
    started = time.perf_counter()
    for part in TRAIN[torch.randperm(len(TRAIN))].split(BATCH):
        inputs = images[part].contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=HALF):
            loss = nn.functional.cross_entropy(model(inputs), labels[part])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    seconds += time.perf_counter() - started
    accuracy(VAL)
if accuracy(TEST) < 0.9:
    sys.exit("the network has not learned")
print(seconds)
