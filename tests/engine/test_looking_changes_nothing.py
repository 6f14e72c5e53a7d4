"""Weights and records of a run are the same bits whether anybody looks at it or not."""

from __future__ import annotations

import json

import pytest
import torch

from mptrain.system.records import StepRecord
from tests.small_runs import Kept, loop_of, steps_of, whole_and_resumed

WORKLOADS = {
    "convolutions": (
        "model=cnn",
        "dataset.image_size=8",
        "dataset.train_samples=96",
        "train.batch_size=16",
        "train.epochs=1",
    ),
    "state carried along": (
        "model=char_lstm",
        "train.max_steps=3",
        "train.batch_size=8",
        "model.dropout=0.2",
        "model.hidden_size=8",
    ),
    "attention": ("model=transformer", "train.max_steps=2", "train.batch_size=4", "train.accumulate=2"),
    "two networks": (
        "model=dcgan",
        "dataset.train_samples=48",
        "train.batch_size=16",
        "train.epochs=1",
        "model.width=4",
    ),
}


def trained(tmp_path, *overrides):
    kept = Kept()
    loop = loop_of(tmp_path, *overrides, "checkpoint.every_epochs=null", kept=kept)
    loop.train_epoch()
    return loop, kept.of(StepRecord)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "precision", "scale"),
    [
        *((workload, "fp16_dynamic", 1024) for workload in WORKLOADS),
        ("convolutions", "fp32", 1024),
        ("convolutions", "amp_dynamic", 1024),
        ("convolutions", "fp16_dynamic", 2**24),
    ],
)
def test_weights_and_records_are_the_same_bits_with_histograms(tmp_path, workload, precision, scale):
    dynamic = ("scaler=dynamic", f"scaler.init_scale={scale}", "scaler.growth_interval=2")
    words = (*WORKLOADS[workload], f"precision={precision}", *dynamic)
    plain, unseen = trained(tmp_path, *words)
    looked, seen = trained(tmp_path, *words, "diagnostics=histograms", "diagnostics.every=1")
    assert str(seen) == str(unseen)  # a norm may be NaN
    assert any(record.overflow for record in seen) == (scale > 1024)
    for name, value in plain.parts.model.state_dict().items():
        assert torch.equal(value, looked.parts.model.state_dict()[name]), name
    for name, value in plain.parts.full_precision().items():
        assert torch.equal(value, looked.parts.full_precision()[name]), name
    assert looked.storage.paths.histograms.exists()
    assert not plain.storage.paths.histograms.exists()


@pytest.mark.long
def test_a_resumed_run_has_every_histogram_once(tmp_path):
    words = (
        *WORKLOADS["convolutions"],
        "train.epochs=2",
        "diagnostics=histograms",
        "diagnostics.every=2",
        "precision=fp16_dynamic",
    )
    whole, resumed = whole_and_resumed(tmp_path, *words, after=5)
    for loop in (whole, resumed):
        loop.storage.writer.close()
    expected = whole.storage.paths.histograms.read_bytes()
    assert resumed.storage.paths.histograms.read_bytes() == expected
    assert [json.loads(line)["step"] for line in expected.splitlines()] == [1, 2, 4, 6, 8, 10, 12]


WORDS = (
    "model=cnn", "dataset.image_size=8", "dataset.train_samples=160", "train.batch_size=16", "train.epochs=2",
    "scaler=dynamic", "scaler.init_scale=16777216", "scaler.growth_interval=3", "checkpoint.every_epochs=null",
)  # fmt: skip


def two_epochs(folder, *words, record=True):
    loop = loop_of(folder, *WORDS, *words)
    if not record:
        for ring in loop.telemetry.rings:
            ring.record = lambda *_: None
    for _ in range(2):
        loop.train_epoch()
        loop.progress.epoch, loop.progress.batch = loop.progress.epoch + 1, 0
    return loop


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
def test_weights_and_scale_are_the_same_bits_with_a_ring_of_any_length_and_without_one(tmp_path, precision):
    word = f"precision={precision}"
    usual = two_epochs(tmp_path, word)
    others = [two_epochs(tmp_path, word, f"log.ring={length}") for length in (1, 7, 1000)]
    assert len(steps_of(usual)) == 20
    assert all(steps_of(other) == steps_of(usual) for other in others)
    silent = two_epochs(tmp_path, word, record=False)
    assert steps_of(silent) == []
    for other in (*others, silent):
        assert all(map(torch.equal, *(loop.parts.full_precision().values() for loop in (usual, other))))
        own, expected = other.parts.learners[0], usual.parts.learners[0]
        assert own.moving().keys() == expected.moving().keys()
        assert all(torch.equal(value, expected.moving()[name]) for name, value in own.moving().items())
