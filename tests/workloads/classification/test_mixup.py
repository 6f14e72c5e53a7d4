"""Mixup: inputs and targets are mixed alike, in shares from a Beta distribution, without the host knowing them."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.classification.task import Classify, mixed
from tests.small_runs import steps_of, whole_and_resumed

TINY = ("model=mlp", "dataset.train_samples=96", "train.batch_size=16", "train.epochs=2", "task.mixup=0.2")


class Logits(nn.Module):
    """Answers with its inputs."""

    def forward(self, inputs):
        return inputs


def one_hot_batch(samples, classes=5, dtype=torch.float32):
    """Images that are their own targets."""
    targets = torch.arange(samples) % classes
    return Batch(nn.functional.one_hot(targets, classes).to(dtype), targets)


def shares_of(batch):
    """The larger class' share in each mixture of two different classes."""
    targets = batch.targets[(batch.targets > 0).sum(1) == 2]
    return targets.max(1).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_targets_are_mixed_in_the_same_shares_as_images(dtype):
    batch = one_hot_batch(64, dtype=dtype)
    found = mixed(batch, 5, 1.0)
    assert (found.inputs.dtype, found.targets.dtype) == (dtype, torch.float32)
    assert torch.allclose(found.targets.sum(1), torch.ones(64), atol=1e-6)
    assert torch.allclose(found.targets.to(dtype), found.inputs, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert 20 < len(shares_of(found)) < 64
    assert ((found.targets > 0).sum(1) <= 2).all()
    own = found.targets.gather(1, batch.targets[:, None])
    assert (own > 0).all()
    assert torch.equal(batch.inputs, one_hot_batch(64, dtype=dtype).inputs)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_come_from_the_beta_distribution(alpha):
    batch = Batch(torch.zeros(4000, 1), torch.arange(4000))
    targets = mixed(batch, 4000, alpha).targets
    own = targets.gather(1, batch.targets[:, None]).flatten()
    mixtures = own[(targets > 0).sum(1) == 2].numpy()
    # Not near 0 and 1, where half of what is drawn at 0.2 lies and mixtures are too little to be told from images.
    inner = mixtures[(mixtures > 0.01) & (mixtures < 0.99)]
    law = stats.beta(alpha, alpha)
    among = (law.cdf(inner) - law.cdf(0.01)) / (law.cdf(0.99) - law.cdf(0.01))
    assert len(inner) > 1000
    assert stats.kstest(among, "uniform").pvalue > 0.001


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mixture_of_both_losses(smoothing):
    batch = Batch(torch.randn(16, 5), torch.arange(16) % 5)
    torch.manual_seed(3)
    together = mixed(batch, 5, 0.4)
    torch.manual_seed(3)
    loss = Classify(num_classes=5, mixup=0.4, label_smoothing=smoothing).loss(Logits(), batch)
    settings = {"reduction": "none", "label_smoothing": smoothing}
    entropy = nn.functional.cross_entropy
    parts = [entropy(together.inputs, torch.full((16,), number), **settings) for number in range(5)]
    expected = (torch.stack(parts, 1) * together.targets).sum(1).mean()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_auxiliary_heads_see_the_same_mixture():
    class TwoHeads(nn.Module):
        def forward(self, inputs):
            return inputs, inputs

    batch = one_hot_batch(8)
    task = Classify(num_classes=5, mixup=1.0, aux_weight=0.5)
    torch.manual_seed(0)
    both = task.loss(TwoHeads(), batch)
    torch.manual_seed(0)
    assert both.item() == pytest.approx(1.5 * task.loss(Logits(), batch).item())


def test_without_mixup_and_in_evaluation_nothing_is_mixed():
    batch, before = one_hot_batch(8), torch.get_rng_state()
    plain = Classify(num_classes=5)
    assert plain.loss(Logits(), batch).item() == nn.functional.cross_entropy(batch.inputs, batch.targets).item()
    measured = Classify(num_classes=5, mixup=0.5).measure(Logits(), batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(measured[name], value) for name, value in plain.measure(Logits(), batch).items())
    alone = one_hot_batch(1)
    assert torch.allclose(mixed(alone, 5, 0.5).targets, alone.inputs)
    with pytest.raises(ConfigError, match="token numbers cannot be mixed"):
        Classify(num_classes=5, mixup=0.5).loss(Logits(), Batch(batch.targets, batch.targets))


def test_mixing_reads_nothing_on_the_host():
    with FakeTensorMode():
        batch = Batch(torch.empty(8, 1, 4, 4), torch.empty(8, dtype=torch.int64))
        found = mixed(batch, 10, 0.2)
    assert (found.inputs.shape, found.targets.shape) == ((8, 1, 4, 4), (8, 10))


def test_a_run_with_mixup_learns_and_resumes_bit_for_bit(tmp_path):
    words = (*TINY, "precision=fp16_dynamic", "train.accumulate=3", "task.label_smoothing=0.1")
    whole, rest = whole_and_resumed(tmp_path, *words, after=5)
    losses = [step["loss"] for step in steps_of(whole)]
    assert [step["loss"] for step in steps_of(rest)] == losses
    assert losses[-1] < losses[0]
