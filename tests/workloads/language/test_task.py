from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.language.task import Language


class Says(nn.Module):
    """A model that answers what it was told, and remembers what else it was given."""

    def __init__(self, logits) -> None:
        super().__init__()
        self.logits = logits
        self.given = None

    def forward(self, tokens, **more):
        self.given = more
        return self.logits


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
def test_trap_04_the_loss_is_a_float32_scalar_the_mean_over_all_tokens_whatever_the_logits_are(dtype):
    loss = TASK.loss(Says(LOGITS.to(dtype)), batch_of(TARGETS))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(sum(by_hand()) / 4, rel=1e-6)


def test_trap_04_8192_tokens_of_a_large_vocabulary_in_half_precision_have_a_finite_loss_and_finite_gradients():
    logits = (torch.randn(64, 128, 50) * 30).half().requires_grad_()
    targets = torch.randint(50, (64, 128))
    loss = TASK.loss(Says(logits), Batch(targets, targets))
    per_token = F.cross_entropy(logits.detach().float().flatten(0, 1), targets.flatten(), reduction="none")
    assert per_token.half().cumsum(0, dtype=torch.float16)[-1].isinf()  # what an FP16 sum over the batch would be
    assert loss.item() == pytest.approx(per_token.double().mean().item(), rel=1e-5)
    (loss * 1024.0).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.dtype == torch.float16


def test_at_scale_1_the_gradients_of_rare_tokens_are_zero_in_fp16_and_a_scale_of_128_brings_them_back():
    """The mean over 8,192 tokens divides what pushes a rare token down, its probability, by 8,192."""
    targets = torch.zeros(64, 128, dtype=torch.int64)
    for scale, alive in ((1.0, False), (128.0, True)):
        logits = torch.zeros(64, 128, 20, dtype=torch.float16)
        logits[..., 1] = 9.0
        logits.requires_grad_()
        (TASK.loss(Says(logits), Batch(targets, targets)) * scale).backward()
        assert (logits.grad[..., :2] != 0).all()
        assert (logits.grad[..., 2:] != 0).all() == alive
        assert logits.grad[..., 2:].any() == alive


def test_what_a_batch_carries_besides_reaches_the_model_by_name():
    lane, fresh = torch.arange(2), torch.ones(2, dtype=torch.bool)
    model = Says(LOGITS)
    TASK.loss(model, batch_of(TARGETS, lane=lane, fresh=fresh))
    assert model.given == {"lane": lane, "fresh": fresh}
    TASK.measure(model, batch_of(TARGETS))
    assert model.given == {}


def test_sums_of_each_window_by_hand():
    sums = TASK.measure(Says(LOGITS), batch_of(TARGETS))
    assert all(value.dtype == torch.float64 and value.shape == (2,) for value in sums.values())
    first, second, third, fourth = by_hand()
    assert sums["loss"].tolist() == pytest.approx([first + second, third + fourth], rel=1e-6)
    assert sums["top1"].tolist() == [1.0, 1.0]


def test_perplexity_is_that_of_the_whole_split_and_not_a_mean_of_perplexities():
    sums = {"loss": 0.0, "top1": 0.0}
    for part in (slice(0, 1), slice(1, 2)):
        for name, value in TASK.measure(Says(LOGITS[part]), batch_of(TARGETS[part])).items():
            sums[name] += value.sum().item()
    metrics = TASK.summarise(sums, 4)
    assert metrics["loss"] == pytest.approx(sum(by_hand()) / 4, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(by_hand()) / 4), rel=1e-6)
    assert metrics["top1"] == 0.5


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary():
    sums = TASK.measure(Says(torch.zeros(2, 2, 3)), batch_of(TARGETS))
    assert TASK.summarise({name: value.sum().item() for name, value in sums.items()}, 4)["perplexity"] == pytest.approx(
        3.0
    )


def test_smoothing_changes_the_loss_that_is_trained_and_not_the_one_that_is_measured():
    smooth = Language(vocabulary_size=3, label_smoothing=0.2)
    batch = batch_of(TARGETS)
    expected = F.cross_entropy(LOGITS.flatten(0, 1), torch.tensor(TARGETS).flatten(), label_smoothing=0.2)
    assert smooth.loss(Says(LOGITS), batch).item() == pytest.approx(expected.item(), rel=1e-6)
    assert smooth.measure(Says(LOGITS), batch)["loss"].sum().item() == pytest.approx(sum(by_hand()), rel=1e-6)


def test_there_is_one_objective_for_all_parameters_and_the_metric_is_better_when_lower():
    (objective,) = TASK.objectives()
    assert (objective.learner, objective.modules) == ("main", ("",))
    assert TASK.metric in TASK.summarise({"loss": 1.0, "top1": 0.0}, 1)
    assert TASK.higher_is_better is False
    assert TASK.term == "tokens"


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

    def test_the_loss_is_the_mean_of_what_it_says_of_the_targets_which_it_is_given_with_the_rest(self):
        model, batch = self.Knows(self.LOSSES), batch_of(TARGETS, lane=torch.arange(2))
        assert TASK.loss(model, batch).item() == 2.5
        assert model.given == {"lane": batch.more["lane"], "targets": batch.targets}

    def test_what_is_measured_are_its_losses_and_its_guesses(self):
        sums = TASK.measure(self.Knows(self.LOSSES, torch.tensor([[0, 0], [1, 2]])), batch_of(TARGETS))
        assert {name: value.tolist() for name, value in sums.items()} == {"loss": [3.0, 7.0], "top1": [1.0, 2.0]}
        assert all(value.dtype == torch.float64 for value in sums.values())

    def test_labels_cannot_be_smoothed_for_it(self):
        with pytest.raises(ConfigError, match=r"task.label_smoothing=0.1: Knows computes its losses itself"):
            Language(vocabulary_size=3, label_smoothing=0.1).loss(self.Knows(self.LOSSES), batch_of(TARGETS))


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

    def test_long_windows_are_cut_and_no_text_becomes_longer_than_a_window(self):
        for length, asked in ((8, range(4, 8)), (9, range(4, 9)), (90, range(32, 64))):
            model = Counts()
            self.shown(length, model=model)
            assert model.lengths == list(asked)

    def test_what_is_drawn_is_the_same_each_time_and_leaves_torchs_generator_alone(self):
        flat = Counts()
        flat.forward = lambda tokens: torch.zeros(*tokens.shape, 100)
        before = torch.get_rng_state()
        assert self.shown(60, model=flat) == self.shown(60, model=flat)
        assert torch.equal(torch.get_rng_state(), before)
        assert len(set(self.shown(60, model=flat).rows[0][2].split())) > 5

    def test_logits_that_are_not_finite_are_written_down_as_well(self):
        broken = Counts()
        broken.forward = lambda tokens: torch.full((*tokens.shape, 100), math.nan)
        assert len(self.shown(6, model=broken).rows) == 4

    def test_a_window_of_one_token_or_data_that_cannot_decode_have_none(self):
        windows = torch.zeros(3, 1, dtype=torch.int64)
        assert Language(vocabulary_size=100, decode=str).exhibits(Counts(), Batch(windows, windows)) == {}
        assert TASK.exhibits(Counts(), batch_of(TARGETS)) == {}
