"""Raw sound as a task: what is measured, what is left out, and what is heard."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.workloads.audio_generation import audio_dataset
from mptrain.workloads.audio_generation.task import RawAudio
from mptrain.workloads.base.batch import Batch
from tests.told_models import Says

TASK = RawAudio(levels=3, sample_rate=8000)


#: Two windows of three samples: the first has one sample of context, the second ends one too early.
TARGETS = torch.tensor([[-100, 0, 2], [1, 0, -100]])
LOGITS = torch.tensor(
    [[[5.0, 3.0, 0.0], [9.0, 1.0, 2.0], [0.0, 0.0, 1.0]], [[1.0, 0.0, 7.0], [0.0, 0.0, 7.0], [-2.0, 5.0, 1.0]]]
)
BATCH = Batch(torch.zeros(2, 3, dtype=torch.int64), TARGETS, (2, 2), {"speaker": torch.tensor([0, 1])})


def by_hand():
    losses = []
    for row, column in ((0, 1), (0, 2), (1, 0), (1, 1)):
        scores = LOGITS[row, :, column].tolist()
        losses.append(math.log(sum(map(math.exp, scores))) - scores[TARGETS[row, column]])
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_trap_04_the_loss_is_a_float32_mean_over_targets(dtype):
    model = Says(LOGITS.to(dtype))
    loss = TASK.loss(model, BATCH)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(sum(by_hand()) / 4, rel=1e-6)
    assert model.given == BATCH.extras


def test_sums_are_of_each_window_and_one_without_targets_is_free():
    sums = TASK.measure(Says(LOGITS), BATCH)
    first, second, third, fourth = by_hand()
    assert all(value.dtype == torch.float64 and value.shape == (2,) for value in sums.values())
    assert sums["loss"].tolist() == pytest.approx([first + second, third + fourth], rel=1e-6)
    assert sums["top1"].tolist() == [1.0, 0.0]
    batch = Batch(BATCH.inputs, torch.stack([TARGETS[0], torch.full((3,), -100)]), (2, 0))
    logits = LOGITS.clone().requires_grad_()
    TASK.loss(Says(logits), batch).backward()
    assert logits.grad[1].abs().sum() == 0
    assert logits.grad.isfinite().all()
    assert TASK.measure(Says(LOGITS), batch)["loss"][1] == 0


def test_bits_are_nats_in_base_two():
    metrics = TASK.summarise({"loss": 4 * math.log(8), "top1": 1.0}, 4)
    assert metrics == pytest.approx({"loss": math.log(8), "bits": 3.0, "perplexity": 8.0, "top1": 0.25})
    assert TASK.summarise({"loss": 1e6, "top1": 0.0}, 1)["perplexity"] == math.inf
    assert TASK.metric in metrics
    assert not TASK.higher_is_better


def test_trap_04_large_half_logits_have_finite_gradients():
    logits = (torch.randn(4, 256, 4000) * 20).half().requires_grad_()
    targets = torch.randint(256, (4, 4000))
    loss = RawAudio(levels=256, sample_rate=8000).loss(Says(logits), Batch(targets, targets, (4000,) * 4))
    (loss * 1024).backward()
    assert loss.item() == pytest.approx(F.cross_entropy(logits.detach().float(), targets).item(), rel=1e-5)
    assert logits.grad.isfinite().all()


class Draws(nn.Module):
    """Draws the level of the last one it was given, and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = None

    def drawn(self, given, count, source, **more):
        self.given = (given, count, more)
        torch.rand(1, generator=source)
        return given[:, -1:].expand(-1, count)


class TestSounds:
    def batch(self, samples=6, context=3, window=10):
        levels = torch.arange(context + window).expand(samples, -1) + 100
        targets = levels + 1
        targets[:, :context] = -100
        targets[:, -2:] = -100
        more = {"speaker": torch.arange(samples), "text": torch.ones(samples, 2), "place": levels - 100}
        return Batch(levels, targets, (window - 2,) * samples, more)

    def test_the_model_goes_on_from_the_context(self):
        task, model = RawAudio(levels=256, sample_rate=1000, seconds=0.005), Draws()
        before = torch.get_rng_state()
        shown = task.exhibits(model, self.batch())
        given, count, more = model.given
        assert (given.shape, count) == ((4, 4), 5)
        assert given[0].tolist() == [100, 101, 102, 103]
        assert [(name, *value.shape) for name, value in more.items()] == [
            ("speaker", 4),
            ("text", 4, 2),
            ("place", 4, 8),
        ]
        assert shown["drawn"].rate == shown["recorded"].rate == 1000
        torch.testing.assert_close(shown["drawn"].samples, audio_dataset.decode(torch.full((4, 5), 103), 256))
        torch.testing.assert_close(shown["recorded"].samples[0], audio_dataset.decode(torch.arange(104, 109), 256))
        assert torch.equal(torch.get_rng_state(), before)
        assert shown["drawn"].captions[0] == "Continuation of a recording by the model."

    def test_captions_say_who_is_heard(self):
        names = ("string", "vowel", "bell", "{0}", "fifth", "sixth")
        task = RawAudio(levels=256, sample_rate=1000, seconds=0.005, speaker_names=names)
        shown = task.exhibits(Draws(), self.batch())
        assert [name in said for name, said in zip(names, shown["recorded"].captions, strict=False)] == [True] * 4
        assert "of bell" in shown["drawn"].captions[2]

    def test_a_sound_ends_with_its_window_or_in_silence(self):
        shown = RawAudio(levels=256, sample_rate=1000, seconds=9.0).exhibits(Draws(), self.batch())
        assert shown["drawn"].samples.shape == shown["recorded"].samples.shape == (4, 10)
        assert shown["recorded"].samples[:, -2:].abs().max() < 1e-3
        assert RawAudio(levels=256, sample_rate=1000, seconds=0.0).exhibits(Draws(), self.batch()) == {}
        assert RawAudio(levels=256, sample_rate=1000).exhibits(nn.Identity(), self.batch()) == {}
