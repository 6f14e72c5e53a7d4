from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.language.task import Language
from tests.told_models import Says


def batch_of(targets, **more):
    targets = torch.tensor(targets)
    return Batch(torch.zeros_like(targets), targets, (targets.shape[1],) * len(targets), more)


LOGITS = torch.tensor([[[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]], [[1.0, 0.0, -2.0], [0.0, 0.0, 5.0]]])
TARGETS = [[0, 2], [1, 2]]
TASK = Language(vocabulary_size=3)


def by_hand():
    return [
        math.log(sum(math.exp(value) for value in row)) - row[target]
        for rows, targets in zip(LOGITS.tolist(), TARGETS, strict=True)
        for row, target in zip(rows, targets, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_trap_04_the_loss_is_a_float32_scalar_mean_over_tokens(dtype):
    model, more = Says(LOGITS.to(dtype)), {"lane": torch.arange(2), "fresh": torch.ones(2, dtype=torch.bool)}
    loss = TASK.loss(model, batch_of(TARGETS, **more))
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(sum(by_hand()) / 4, rel=1e-6)
    assert model.given == more


def test_trap_04_8192_half_tokens_have_a_finite_loss():
    logits = (torch.randn(64, 128, 50) * 30).half().requires_grad_()
    targets = torch.randint(50, (64, 128))
    loss = TASK.loss(Says(logits), Batch(targets, targets))
    per_token = F.cross_entropy(logits.detach().float().flatten(0, 1), targets.flatten(), reduction="none")
    assert per_token.half().cumsum(0, dtype=torch.float16)[-1].isinf()  # what an FP16 sum over the batch would be
    assert loss.item() == pytest.approx(per_token.double().mean().item(), rel=1e-5)
    (loss * 1024.0).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.dtype == torch.float16


def test_perplexity_is_that_of_the_whole_split():
    whole = TASK.measure(Says(LOGITS), batch_of(TARGETS))
    assert all(value.dtype == torch.float64 and value.shape == (2,) for value in whole.values())
    assert whole["loss"].tolist() == pytest.approx([sum(by_hand()[:2]), sum(by_hand()[2:])], rel=1e-6)
    assert whole["top1"].tolist() == [1.0, 1.0]
    sums = {"loss": 0.0, "top1": 0.0}
    for part in (slice(0, 1), slice(1, 2)):
        for name, value in TASK.measure(Says(LOGITS[part]), batch_of(TARGETS[part])).items():
            sums[name] += value.sum().item()
    metrics = TASK.summarise(sums, 4)
    assert metrics["loss"] == pytest.approx(sum(by_hand()) / 4, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(by_hand()) / 4), rel=1e-6)
    assert metrics["top1"] == 0.5


def test_smoothing_changes_the_trained_loss_alone():
    smooth = Language(vocabulary_size=3, label_smoothing=0.2)
    batch = batch_of(TARGETS)
    expected = F.cross_entropy(LOGITS.flatten(0, 1), torch.tensor(TARGETS).flatten(), label_smoothing=0.2)
    assert smooth.loss(Says(LOGITS), batch).item() == pytest.approx(expected.item(), rel=1e-6)
    assert smooth.measure(Says(LOGITS), batch)["loss"].sum().item() == pytest.approx(sum(by_hand()), rel=1e-6)


class TestModelsThatComputeTheirLosses:
    class Knows(nn.Module):
        takes_targets = True

        def __init__(self, losses, best=None) -> None:
            super().__init__()
            self.losses, self.best, self.given = losses, best, None

        def forward(self, tokens, **more):
            self.given = more
            return self.losses, self.best

    LOSSES = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def test_its_losses_are_trained_on_and_measured(self):
        model, batch = self.Knows(self.LOSSES), batch_of(TARGETS, lane=torch.arange(2))
        assert TASK.loss(model, batch).item() == 2.5
        assert model.given == {"lane": batch.extras["lane"], "targets": batch.targets}
        sums = TASK.measure(self.Knows(self.LOSSES, torch.tensor([[0, 0], [1, 2]])), batch)
        assert {name: value.tolist() for name, value in sums.items()} == {"loss": [3.0, 7.0], "top1": [1.0, 2.0]}
        assert all(value.dtype == torch.float64 for value in sums.values())
        with pytest.raises(ConfigError, match=r"task.label_smoothing=0.1: Knows computes its losses itself"):
            Language(vocabulary_size=3, label_smoothing=0.1).loss(model, batch)


class Counts(nn.Module):
    """Says that the next number follows, and remembers how long its texts were."""

    def __init__(self, vocabulary=100) -> None:
        super().__init__()
        self.vocabulary, self.lengths = vocabulary, []

    def forward(self, tokens):
        self.lengths.append(tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % self.vocabulary, self.vocabulary).half() * 1000


class TestContinuations:
    def shown(self, length, samples=6, model=None):
        task = Language(vocabulary_size=100, decode=lambda numbers: " ".join(map(str, numbers)))
        windows = torch.arange(length).expand(samples, -1)
        return task.exhibits(model or Counts(), Batch(windows, windows))["continuations"]

    def test_the_model_writes_on_where_a_window_is_broken_off(self):
        texts = self.shown(6)
        assert texts.columns == ("text", "true continuation", "model's continuation")
        assert texts.rows == (("0 1 2", "3 4 5", "3 4 5"),) * 4
        broken, windows = Counts(), torch.zeros(3, 1, dtype=torch.int64)
        broken.forward = lambda tokens: torch.full((*tokens.shape, 100), math.nan)
        assert len(self.shown(6, model=broken).rows) == 4
        assert Language(vocabulary_size=100, decode=str).exhibits(Counts(), Batch(windows, windows)) == {}
        assert TASK.exhibits(Counts(), batch_of(TARGETS)) == {}

    def test_long_windows_are_cut(self):
        for length, asked in ((8, range(4, 8)), (9, range(4, 9)), (90, range(32, 64))):
            model = Counts()
            self.shown(length, model=model)
            assert model.lengths == list(asked)

    def test_what_is_drawn_is_the_same_each_time(self):
        flat = Counts()
        flat.forward = lambda tokens: torch.zeros(*tokens.shape, 100)
        before = torch.get_rng_state()
        assert self.shown(60, model=flat) == self.shown(60, model=flat)
        assert torch.equal(torch.get_rng_state(), before)
        assert len(set(self.shown(60, model=flat).rows[0][2].split())) > 5
