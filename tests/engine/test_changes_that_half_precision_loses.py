"""Averages, counters and statistics whose small changes half precision rounds away: found and warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.loop import Loop
from mptrain.engine.telemetry import NoStorage
from mptrain.runlog.run_paths import RunPaths
from tests.engine.changing_networks import ROUNDED, Clips, Embeds, Small, run
from tests.small_runs import TINY


class Averages(nn.Module):
    """A frozen copy of a layer that follows it, in place or as a new parameter, as target networks do."""

    assigns, rate = False, 0.02

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.slow, self.head = nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(16, 10)
        self.slow.requires_grad_(False)

    def forward(self, images):
        if self.training:
            new = torch.lerp(self.slow.weight, self.body.weight.detach(), type(self).rate)
            if type(self).assigns:
                self.slow.weight = nn.Parameter(new, requires_grad=False)
            else:
                self.slow.weight.copy_(new)
        images = images.flatten(1)
        return self.head(torch.tanh(self.body(images) + 0.1 * self.slow(images)))


@pytest.mark.parametrize("assigns", [False, True])
def test_a_frozen_average_is_saved_as_it_is_and_small_changes_in_half_precision_are_warned_of(assigns, monkeypatch):
    monkeypatch.setattr(Averages, "assigns", assigns)
    wide = run(Averages, "precision=fp32", monkeypatch=monkeypatch)
    assert ROUNDED == []
    half = run(Averages, "precision=fp16_dynamic", monkeypatch=monkeypatch)
    assert ROUNDED == ["slow.weight"]
    saved = {**dict(half.model.named_parameters()), **half.full_precision()}
    assert "slow.weight" not in half.full_precision()
    assert "slow.bias" in half.full_precision()  # not changed, so as precise as it was drawn
    torch.testing.assert_close(saved["slow.weight"].float(), wide.model.slow.weight, rtol=0.02, atol=2e-3)


class Accumulates(Small):
    """A step counter, a running mean that is assigned, the last mean, and the rows of a queue: only two accumulate."""

    rate = 0.02

    def __init__(self):
        super().__init__()
        for name, shape in {"steps": (), "mean": 16, "last": 16, "queue": (64, 16)}.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, images):
        hidden = torch.tanh(self.body(images.flatten(1)))
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.mean = torch.lerp(self.mean, hidden.mean(0).to(self.mean.dtype), type(self).rate)
                self.last.copy_(hidden.mean(0))
                self.queue[:4].copy_(hidden[:4])
        return self.head(hidden)


class Writes(Accumulates):
    """A clamp that leaves its buffer as it is, and an average that half precision never moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bounded", torch.linspace(0.1, 1, 16))
        self.register_buffer("stalled", torch.ones(16))

    def forward(self, images):
        with torch.no_grad():
            self.bounded.clamp_(-100, 100)
            self.stalled.mul_(1 - 1e-4).add_(3e-4)
        return super().forward(images)


class Observes(Small):
    """Statistics of BatchNorm, as a mean over all batches or not, and observers as in quantisation, which start at inf."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=momentum)
        for name, value in {"low": torch.inf, "high": -torch.inf, "most": -torch.inf}.items():
            self.register_buffer(name, torch.full((17,), value))

    def forward(self, images):
        hidden = self.norm(self.body(images.flatten(1)))
        if self.training:
            with torch.no_grad():
                for buffer, now in ((self.low, hidden.amin(0)), (self.high, hidden.amax(0))):
                    own = buffer[:16]  # the last one never gets a value
                    own.copy_(torch.where(own.isinf(), now.to(own.dtype), torch.lerp(own, now.to(own.dtype), 0.01)))
                self.most[:16] = hidden.amax(0)
        return self.head(hidden)


@pytest.mark.parametrize(("momentum", "accumulate"), [(0.1, 1), (None, 1), (None, 8)])
def test_means_over_all_batches_and_observers_that_start_at_inf_accumulate(momentum, accumulate, monkeypatch):
    words = ("precision=bf16", "precision.keep_fp32=[]", f"train.accumulate={accumulate}")
    run(lambda: Observes(momentum), *words, monkeypatch=monkeypatch)
    assert ROUNDED == ["high", "low", "norm.running_mean", "norm.running_var"]
    run(lambda: Observes(momentum), *words[1:], "precision=fp16_dynamic", monkeypatch=monkeypatch)
    slow = ["norm.running_mean", "norm.running_var"] if momentum is None else []
    assert ["high", "low", *slow] == ROUNDED


@pytest.mark.parametrize(
    ("kind", "names"), [(Clips, "body.weight"), (Embeds, "first.weight"), (Accumulates, "mean, steps")]
)
def test_what_forward_passes_change_in_half_precision_is_warned_of(kind, names, monkeypatch):
    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda *_: kind())
    for precision, warns in (("fp32", False), ("amp_bf16", False), ("bf16", True)):
        parts, options = mptrain.run.build.parts.build(compose((*TINY, "train.max_steps=2", f"precision={precision}")))
        said = []
        loop = Loop(parts, options, NoStorage(RunPaths(Path("u"))))
        monkeypatch.setattr(loop.telemetry, "warn", said.append)
        loop.run()
        found = [one for one in said if one.startswith(f"forward passes change {names}")]
        assert len(found) == warns, (precision, said)
        assert all("precision.keep_fp32" in one for one in found)


class Tied(nn.Module):
    """A table that shortens the rows it reads, tied to the matrix of the head, and a count that two modules share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.body, self.head = nn.Embedding(10, 16, max_norm=0.5), nn.Linear(64, 16), nn.Linear(16, 10)
        self.head.weight = self.table.weight
        self.body.register_buffer("seen", torch.zeros(()))
        self.head.register_buffer("seen", self.body.seen)

    def forward(self, images):
        if self.training:
            with torch.no_grad():
                self.body.seen.add_(1)
        words = images.flatten(1).argmax(1) % 10
        return self.head(torch.tanh(self.body(images.flatten(1))) + self.table(words))


class Refuses(Accumulates):
    def forward(self, images):
        assert self.steps == self.steps.round(), "a count is a whole number"
        return super().forward(images)


@pytest.mark.parametrize(
    ("kind", "rate", "precision", "rounded"),
    [
        (Accumulates, 0.02, "fp16_dynamic", ["mean", "steps"]),
        (Accumulates, 0.02, "bf16", ["mean", "steps"]),
        (Accumulates, 0.02, "amp_dynamic", []),
        (Accumulates, 0.2, "fp16_dynamic", ["steps"]),  # a fast running mean loses nothing
        (Writes, 0.02, "fp16_dynamic", ["mean", "stalled", "steps"]),  # and a clamp without effect
        (
            Averages,
            0.02,
            "fp16_dynamic",
            ["slow.weight"],
        ),  # an average stops about eps / (2 rate) beside the right value:
        (Averages, 0.02, "bf16", ["slow.weight"]),  # 0.2 % in FP16 with a rate of 0.25, and 1.6 % in BF16
        (Averages, 0.25, "fp16_dynamic", []),
        (Averages, 0.25, "bf16", ["slow.weight"]),
        (Averages, 0.5, "fp16_dynamic", []),
        (Averages, 0.5, "bf16", []),
        (Tied, None, "bf16", ["body.seen"]),  # casting gives each module a buffer of its own
        (Tied, None, "fp32", []),
        (Refuses, 0.02, "bf16", ["last", "mean", "queue", "steps"]),
    ],
)
def test_tensors_that_half_precision_rounds_away_are_found(kind, rate, precision, rounded, monkeypatch):
    monkeypatch.setattr(kind, "rate", rate, raising=False)
    run(kind, f"precision={precision}", monkeypatch=monkeypatch)
    assert rounded == ROUNDED
