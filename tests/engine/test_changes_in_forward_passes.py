"""Weights that forward passes change, at once or later: in FP32 and in the master weights, and without trace of the rehearsal."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from mptrain.optimizer import SGD
from mptrain.optimizer.weights import Weights
from mptrain.system.errors import ConfigError
from tests.engine import changing_networks
from tests.engine.changing_networks import Clips, Embeds, Small, run


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "fp16_dynamic", "bf16_pure"])
def test_rows_that_a_pass_shortens_stay_short_in_training(precision, monkeypatch):
    parts = run(Embeds, f"precision={precision}", monkeypatch=monkeypatch)
    weights = parts.full_precision()
    read = weights["first.weight"].float().norm(dim=1)
    assert read.max() < 0.8  # an update comes after the last pass; at the start they are about 4


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_a_change_through_data_in_place_reaches_the_master_weights(precision, monkeypatch):
    parts = run(Clips, f"precision={precision}", monkeypatch=monkeypatch)
    assert parts.full_precision()["body.weight"].abs().max() < 0.08


def test_one_that_begins_later_is_right_without_master_weights_and_refused_with_them(monkeypatch):
    monkeypatch.setattr(Clips, "begins", 5)
    parts = run(Clips, "precision=fp32", "train.batch_size=4", batches=20, monkeypatch=monkeypatch)
    assert parts.full_precision()["body.weight"].abs().max() < 0.08
    with pytest.raises(ConfigError, match=r"body.weight was changed through \.data"):
        run(Clips, "precision=bf16", "train.batch_size=4", batches=20, monkeypatch=monkeypatch)


class Later(Small):
    """Halves a weight in place from some pass on: seen in that very step."""

    passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes > 3:
            with torch.no_grad():
                self.body.weight.mul_(0.5)
        return super().forward(images)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_that_begins_later_in_place_is_written_through_at_once(accumulate, monkeypatch):
    words = f"train.accumulate={accumulate}"
    wide, half = (
        run(Later, f"precision={one}", words, monkeypatch=monkeypatch).full_precision()
        for one in ("fp32", "fp16_dynamic")
    )
    for name, value in wide.items():
        torch.testing.assert_close(half[name], value, rtol=0.01, atol=2e-3)


class Begins(nn.Module):
    """Sets its shift by its first batch, and keeps what it has seen in plain attributes, some of them new."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.shift = nn.Linear(64, 10), nn.Parameter(torch.zeros(64))
        self.begun, self.mean, self.seen, self.table = False, None, [], torch.eye(64).to_sparse()
        self.grid, self.sums = torch.zeros(1).expand(4), torch.zeros(64)
        self._calls, self._sizes = 0, Counter()

    def forward(self, images):
        images = images.flatten(1)
        if self.training:
            if not self.begun:
                self.shift.data.copy_(-images.mean(0))
            self.begun, self.last = True, images[0]
            self.mean = images.mean(0) if self.mean is None else torch.lerp(self.mean, images.mean(0), 0.1)
            self.sums += images.sum(0)
            self.seen.append(len(images))
            self._calls += 1
            self._sizes[len(images)] += 1
        return self.body(torch.sparse.mm(self.table, (images + self.shift).T).T)


def test_a_rehearsal_leaves_no_trace_in_plain_attributes(monkeypatch):
    parts = run(Begins, "precision=fp32", monkeypatch=monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(changing_networks, "rehearse", lambda *_: None)
        patched.setattr(changing_networks, "rounded_tensors", lambda *_: ())
        alone = run(Begins, "precision=fp32", monkeypatch=patched)
    assert parts.model.seen == alone.model.seen
    assert (parts.model._calls, parts.model._sizes) == (alone.model._calls, alone.model._sizes)
    for name in ("mean", "sums", "last", "shift"):
        assert torch.equal(getattr(parts.model, name), getattr(alone.model, name)), name


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = parametrizations.spectral_norm(nn.Linear(64, 16))
        self.norm = nn.BatchNorm1d(16)
        self.old = spectral_norm(nn.Linear(16, 16))
        self.dir = parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = prune.l1_unstructured(nn.Linear(16, 10), "weight", 0.3)
        self.one, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.one.weight

    def forward(self, images):
        hidden = torch.relu(self.norm(self.body(images.flatten(1))))
        return self.head(self.dir(self.old(self.tied(self.one(hidden)))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_parametrizations_pruning_and_batch_statistics_are_nobodys_business(precision, monkeypatch):
    parts = run(Spectral, f"precision={precision}", monkeypatch=monkeypatch)
    assert parts.learners[0].updates == 12


def test_master_weights_keep_what_rounding_took_unless_the_change_is_larger():
    half = nn.Parameter(torch.tensor([1.0, 1.0, 5.0]).bfloat16())
    weights = Weights({"w": half}, SGD(), master_weights=True)
    (wide,) = weights.masters.work
    wide.copy_(torch.tensor([1.001, 1.001, 5.009]))
    weights.masters.mark()
    with torch.no_grad():
        half.copy_(torch.tensor([1.0, 0.5, 0.01]))
    weights.masters.take_changes(torch.tensor([False]))
    assert torch.equal(wide, torch.tensor([1.001, 1.001, 5.009]))
    weights.masters.take_changes(torch.tensor([True]))
    torch.testing.assert_close(wide, torch.tensor([1.001, 0.501, half[2].item()]), rtol=0, atol=1e-6)
    assert torch.equal(wide.bfloat16(), half)
