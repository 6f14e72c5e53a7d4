"""A loop of torch's own with and without `mptrain.watch`: ResNet-18 on a CPU (C22), ResNet-50 on a GPU (G13)."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torchvision.models import resnet18, resnet50

import mptrain
from benchmarks.cases.case import Case, Setting
from benchmarks.results import Measurement, measured
from benchmarks.timing import Block, estimate, take_turns, timed

#: Steps between two histograms, by default.
_EVERY = 100


def watching(setting: Setting) -> list[Measurement]:
    """C22, G13: what records cost, and histograms in every hundredth step, against the step without either."""
    goal = "G13" if setting.device == "cuda" or setting.rehearsal else "C22"
    with contextlib.ExitStack() as watches:
        contenders = {
            "bare": _loop(setting, None, watches),
            "records": _loop(setting, 0, watches),
            "histograms": _loop(setting, 1, watches),  # in each step, to be divided by those between
        }
        times = take_turns(contenders, setting.seconds, least=3)
    rounds = list(zip(*(times.seconds[name] for name in contenders), strict=True))
    return [
        measured(goal, "records", estimate([records / bare - 1 for bare, records, _ in rounds])),
        measured(
            goal,
            "histograms",
            estimate([(records + (sampled - records) / _EVERY) / bare - 1 for bare, records, sampled in rounds]),
        ),
        measured(goal, "one step with histograms / the step", times.ratio("histograms", "bare"), judged=False),
    ]


def _loop(setting: Setting, every: int | None, watches: contextlib.ExitStack) -> Block:
    """Return a loop with its own network, watched until the stack is closed; None for a loop that is not watched."""
    torch.manual_seed(0)
    device = torch.device(setting.device)
    cuda = device.type == "cuda"
    batch, side, classes = (256, 224, 1000) if cuda else (32, 32, 10)
    model = resnet50() if cuda else resnet18(num_classes=classes)
    if not cuda:
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    layout = torch.channels_last if cuda else torch.contiguous_format
    model = model.to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=cuda)
    scaler = torch.amp.GradScaler(device.type)
    if every is not None:
        watches.enter_context(mptrain.watch(model, optimizer, scaler, every=every))
    images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=layout)
    labels = torch.randint(classes, (batch,), device=device)

    def step(_: int) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, enabled=cuda):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return timed(step, torch.cuda.synchronize if cuda else lambda: None)


CASES = (Case("watched loop", ("C22",), watching, 4),)
GPU_CASES = (Case("watched loop", ("G13",), watching, 1),)
