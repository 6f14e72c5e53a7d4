"""A short run of any network or optimizer, and networks that change their own weights in a forward pass."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.rehearsal import rehearse, rounded_tensors
from mptrain.engine.step import train_step
from tests.small_runs import TINY

#: Tensors in which the newest `run` loses small changes.
ROUNDED: list[str] = []


def run(net, *words, batches=8, kind=None, monkeypatch):
    """Train a network for some steps, and return the parts of its run; `ROUNDED` is what it loses."""
    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda *_: net())
    if kind is not None:
        kind.__module__ = "torch.optim"
        monkeypatch.setattr(torch.optim, kind.__name__, kind, raising=False)
        words += ("optimizer=torch", f"optimizer.name={kind.__name__}")
    else:
        words += ("optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.nesterov=false")
    parts, _ = mptrain.run.build.parts.build(compose((*TINY, "schedule=constant", "optimizer.lr=0.1", *words)))
    taken = list(itertools.islice(parts.loaders["train"].batches(0), batches))
    parts.model.train()
    for number, one in enumerate(taken * 2):
        batch = parts.prepare(one)
        if not number:
            ROUNDED[:] = rounded_tensors(parts, batch, rehearse(parts, batch))
        train_step(parts.learners[0], parts.model, batch, parts.plan)
    parts.plan.guard.require_seen()
    return parts


class Embeds(nn.Module):
    """Two embeddings with a largest norm, one with sparse gradients, of which the passes shorten the rows they read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Embedding(4, 16, max_norm=0.5, sparse=True)
        self.second = nn.EmbeddingBag(4, 16, max_norm=0.5, mode="sum", sparse=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        words = (images.flatten(1)[:, :5].float() * 3.99).clamp(0, 3).long()
        return self.head(self.first(words).mean(1) + self.second(words).to(self.head.weight.dtype))


class Small(nn.Module):
    """Two layers, drawn alike each time, with a tanh between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images):
        return self.head(torch.tanh(self.body(images.flatten(1))))


class Clips(Small):
    """Clips its weights through ``.data`` where the caller says: nothing in a version counter shows it."""

    begins = passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes > type(self).begins:
            self.body.weight.data.clamp_(-0.05, 0.05)
        return super().forward(images)
