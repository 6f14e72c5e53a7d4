"""Networks that keep things for themselves, trained step by step as a run does, and in a plain loop of torch."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.checkpointing import take_snapshot
from mptrain.engine.loop import Loop
from mptrain.engine.rehearsal import rehearse
from mptrain.engine.step import train_step
from mptrain.engine.telemetry import NoStorage
from mptrain.runlog.run_paths import RunPaths
from tests.small_runs import TINY

STEPS, RESUMED = 5, 3
WORDS = (*TINY, "optimizer=sgd", "optimizer.lr=0.1", "optimizer.nesterov=false", "optimizer.momentum=0.9")
PLAIN = ("optimizer.weight_decay=0", "schedule=constant")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.register_buffer("factor", torch.ones(1))

    def features(self, images):
        return torch.tanh(self.body(images.flatten(1)))

    def forward(self, images):
        return self.head(self.features(images)) * self.factor


class Queue(Net):
    """Reads features of past batches from a tensor that is no buffer, as a memory bank does."""

    def __init__(self):
        super().__init__()
        self._queue = torch.zeros(8, 16)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            self._queue = torch.cat([self._queue[4:], hidden.detach()[:4].to(self._queue)])
        return self.head(hidden - self._queue.mean(0).to(hidden.dtype))


class Meter:
    def __init__(self):
        self.count, self.log, self.sums, self.draws = 0, [], torch.zeros(2), random.Random(3)


class Helped(Net):
    """Counts in an object of its own, in a list, in a tensor in a dictionary, and draws from a private generator."""

    def __init__(self):
        super().__init__()
        self.meter, self.tables, self._draws = Meter(), {"a": [torch.zeros(1)]}, torch.Generator().manual_seed(3)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            self.meter.count += 1
            self.meter.log.append(self.meter.draws.random())
            self.meter.sums += 1
            self.tables["a"][0] += torch.rand(1, generator=self._draws)
            self._late = getattr(self, "_late", torch.zeros(1)) + 1
            total = self.meter.count + self.meter.log[-1] + self.meter.sums.sum() + self.tables["a"][0] + self._late
            hidden = hidden / total.to(hidden.dtype)
        return self.head(hidden)


def new_loop(make, monkeypatch, *words):
    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda *_: make())
    return Loop(*mptrain.run.build.parts.build(compose((*WORDS, *PLAIN, *words))), NoStorage(RunPaths(Path("unused"))))


def first_batches(loop):
    parts = loop.parts
    return [parts.prepare(one) for one in itertools.islice(parts.loaders["train"].batches(0), STEPS)]


def trained(make, monkeypatch, *words, resumed=False):
    """Train some steps as a run does, with a rehearsal before the first and after a resume; return the loop and losses."""
    loop, losses, batches = new_loop(make, monkeypatch, *words), [], None
    for number in range(STEPS):
        if number == RESUMED and resumed:
            state = copy.deepcopy(take_snapshot(loop.parts, loop.telemetry.step_log, loop.progress))
            loop = new_loop(make, monkeypatch, *words)
            assert loop.checkpointing.restore(state, forgive=False) == []
        batches = batches or first_batches(loop)
        parts = loop.parts
        parts.model.train()
        if number == 0 or (number == RESUMED and resumed):
            loop.found = rehearse(parts, batches[number])
        for learner in parts.learners:
            losses.append(train_step(learner, parts.model, batches[number], parts.plan).loss.item())
    parts.plan.guard.settle()
    return loop, losses


def in_plain_torch(make, monkeypatch, *, fused=True):
    """Train in FP32; without ``fused``, torch may round the last elements of a tensor once more on some CPUs."""
    net = make()
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9, fused=fused)
    net.train()
    losses = []
    for batch in first_batches(new_loop(make, monkeypatch, "precision=fp32")):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses
