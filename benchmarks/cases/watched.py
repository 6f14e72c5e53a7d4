"""A loop of torch's own with and without `mptrain.watch` (C22): ResNet-18 for 32 px, batch 32, GradScaler."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torchvision.models import resnet18

import mptrain
from benchmarks.cases.case import Case, Setting
from benchmarks.results import Measurement, measured
from benchmarks.timing import Block, estimate, take_turns, timed

#: Steps between two histograms, by default.
_EVERY = 100


def watching(setting: Setting) -> list[Measurement]:
    """C22: what records cost, and histograms in every hundredth step, against the step without either."""
    with contextlib.ExitStack() as watches:
        contenders = {
            "bare": _loop(None, watches),
            "records": _loop(0, watches),
            "histograms": _loop(1, watches),  # in each step, to be divided by those between
        }
        times = take_turns(contenders, setting.seconds, least=3)
    rounds = list(zip(*(times.seconds[name] for name in contenders), strict=True))
    return [
        measured("C22", "records", estimate([records / bare - 1 for bare, records, _ in rounds])),
        measured(
            "C22",
            "histograms",
            estimate([(records + (sampled - records) / _EVERY) / bare - 1 for bare, records, sampled in rounds]),
        ),
        measured("C22", "one step with histograms / the step", times.ratio("histograms", "bare"), judged=False),
    ]


def _loop(every: int | None, watches: contextlib.ExitStack) -> Block:
    """Return a loop with its own network, watched until the stack is closed; None for a loop that is not watched."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), torch.amp.GradScaler("cpu")
    if every is not None:
        watches.enter_context(mptrain.watch(model, optimizer, scaler, every=every))
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def step(_: int) -> None:
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
        scaler.step(optimizer)
        scaler.update()

    return timed(step)


CASES = (Case("watched loop", ("C22",), watching, 4),)
