"""Histograms on a CUDA device: the same counts as on a CPU, no waiting before they are read, and no bit changed."""

from __future__ import annotations

import pytest
import torch

from mptrain.engine.histograms import HistogramWatch
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.numerics.tensors import count_exponents
from mptrain.system.records import StepRecord
from tests.small_runs import TINY, Kept, loop_of, parts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_are_those_of_a_cpu(dtype):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 100_000)
    values[::1000] = 0.0
    values[1::1000] = float("inf")
    values[2::1000] = float("nan")
    values = values.to(dtype)
    assert torch.equal(count_exponents(values.cuda()).cpu(), count_exponents(values))


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "fp16_pure"])
def test_looking_waits_for_the_device_only_when_it_is_read(precision, no_waiting):
    parts, _ = parts_of("device=cuda", "model=resnet18", f"precision={precision}", "dataset.train_samples=64")
    (learner,) = parts.learners
    ring = Ring(4, len(learner.weights.names), parts.device)
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    parts.model.train()
    ring.record(train_step(learner, parts.model, batch, parts.plan))  # the first step may set libraries up
    torch.cuda.synchronize()
    watch = HistogramWatch("main", 2)
    with no_waiting():
        ring.record(train_step(learner, parts.model, batch, parts.plan, watch))
    (record,) = watch.records()
    assert {"activations", "activation_gradients", "weight_gradients", "weights"} <= record.tensors.keys()


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_looking_changes_no_bit(tmp_path, precision):
    found = []
    for words in ((), ("diagnostics=histograms", "diagnostics.every=1")):
        kept = Kept()
        loop = loop_of(tmp_path, *TINY, "device=cuda", f"precision={precision}", *words, kept=kept)
        loop.train_epoch()
        found.append((str(kept.of(StepRecord)), loop.parts.full_precision()))
    (records, weights), (same_records, same_weights) = found
    assert records == same_records
    assert all(torch.equal(value, same_weights[name]) for name, value in weights.items())
