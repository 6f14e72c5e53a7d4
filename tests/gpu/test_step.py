"""The step on a CUDA device: it never waits for the device, and refuses and resumes exactly as on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from tests.small_runs import TINY, loop_of, parts_of, steps_of, whole_and_resumed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]

DEVICE = "cuda"
MODES = ["fp32", "tf32", "amp_dynamic", "amp_static", "amp_bf16", "fp16_dynamic", "fp16_static", "fp16_pure", "bf16"]


def batches(parts, count):
    return [parts.prepare(batch) for batch, _ in zip(parts.loaders["train"].batches(0), range(count), strict=False)]


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_no_step_waits_for_the_device(precision, optimizer, model, no_waiting):
    parts, _ = parts_of(
        f"device={DEVICE}", f"model={model}", f"precision={precision}", f"optimizer={optimizer}", "train.clip_norm=1",
        "train.accumulate=2", "dataset.train_samples=128",
    )  # fmt: skip
    learner = parts.learners[0]
    ring = Ring(4, len(learner.weights.names), parts.device)
    good, other = batches(parts, 2)
    bad = dataclasses.replace(good, inputs=good.inputs.clone())
    bad.inputs[0] = float("inf")
    parts.model.train()
    ring.record(train_step(learner, parts.model, good, parts.plan))  # the first step may set libraries up
    torch.cuda.synchronize()
    with no_waiting():
        for batch in (bad, good, other):
            ring.record(train_step(learner, parts.model, batch, parts.plan))
    rows = ring.take(wait=True)
    assert len(rows) == 4
    assert rows[1].overflow
    assert all(value.isfinite().all() for value in parts.full_precision().values())


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize(
    "words",
    [
        ("model=word_lstm", "dataset.sequence_length=16", "train.batch_size=8", "train.ema_decay=0.9"),
        ("model=transformer", "model.dropout=0.1"),
        ("model=dcgan", "train.batch_size=16"),
    ],
    ids=["word_lstm", "transformer", "dcgan"],
)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")  # torch joins no weights in BF16
def test_no_step_of_another_shape_of_training_waits_for_the_device(precision, words, no_waiting):
    parts, _ = parts_of(f"device={DEVICE}", f"precision={precision}", "train.clip_norm=1", "train.accumulate=2", *words)
    rings = [Ring(4, len(learner.weights.names), parts.device) for learner in parts.learners]
    parts.model.train()
    for count, batch in enumerate(batches(parts, 3)):
        with no_waiting() if count else contextlib.nullcontext():  # the first step may set libraries up
            for learner, ring in zip(parts.learners, rings, strict=True):
                ring.record(train_step(learner, parts.model, batch, parts.plan))
    assert all(len(ring.take(wait=True)) == 3 for ring in rings)
    assert all(value.isfinite().all() for value in parts.full_precision().values())


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "fp16_pure"])
@pytest.mark.parametrize("scaler", ["als", "logmax", "smooth"])
def test_no_step_under_a_rule_that_looks_at_more_than_overflows_waits_for_the_device(precision, scaler, no_waiting):
    parts, _ = parts_of(*TINY, f"device={DEVICE}", f"precision={precision}", f"scaler={scaler}")
    learner = parts.learners[0]
    ring = Ring(4, len(learner.weights.names), parts.device)
    parts.model.train()
    for count, batch in enumerate(batches(parts, 4)):
        with no_waiting() if count else contextlib.nullcontext():  # the first step may set libraries up
            ring.record(train_step(learner, parts.model, batch, parts.plan))
    rows = ring.take(wait=True)
    assert rows[0].loss_scale == 1.0
    assert rows[-1].next_scale > 1.0


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "bf16"])
def test_a_run_goes_on_bit_for_bit_on_the_device(tmp_path, precision):
    words = (*TINY, f"device={DEVICE}", f"precision={precision}", "train.max_steps=12")
    whole, rest = whole_and_resumed(tmp_path, *words, after=5)
    assert steps_of(whole) == steps_of(rest)


@pytest.mark.parametrize("ring", [1, 3, 64])
def test_the_records_do_not_depend_on_when_the_host_looks(tmp_path, ring):
    reference = loop_of(tmp_path, *TINY, f"device={DEVICE}")
    reference.run()
    loop = loop_of(tmp_path, *TINY, f"device={DEVICE}", f"log.ring={ring}", "log.seconds=0")
    loop.run()
    assert steps_of(loop) == steps_of(reference)
