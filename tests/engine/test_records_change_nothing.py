"""Training is the same, bit for bit, however often its records are read, and if there are none."""

from __future__ import annotations

import pytest
import torch

from tests.small_runs import loop_of, steps_of

WORDS = (
    "model=cnn", "dataset.image_size=8", "dataset.train_samples=160", "train.batch_size=16", "train.epochs=2",
    "scaler=dynamic", "scaler.init_scale=16777216", "scaler.growth_interval=3", "checkpoint.every_epochs=null",
)  # fmt: skip


def trained(folder, *words, record=True):
    loop = loop_of(folder, *WORDS, *words)
    if not record:
        for ring in loop.telemetry.rings:
            ring.record = lambda *_: None
    for _ in range(2):
        loop.train_epoch()
        loop.progress.epoch, loop.progress.batch = loop.progress.epoch + 1, 0
    return loop


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_weights_and_scale_are_the_same_bits_with_a_ring_of_any_length_and_without_one(tmp_path, precision):
    word = f"precision={precision}"
    usual = trained(tmp_path, word)
    others = [trained(tmp_path, word, f"log.ring={length}") for length in (1, 7, 1000)]
    assert len(steps_of(usual)) == 20
    assert all(steps_of(other) == steps_of(usual) for other in others)
    silent = trained(tmp_path, word, record=False)
    assert steps_of(silent) == []
    for other in (*others, silent):
        assert all(map(torch.equal, *(loop.parts.full_precision().values() for loop in (usual, other))))
        own, expected = other.parts.learners[0], usual.parts.learners[0]
        assert own.moving().keys() == expected.moving().keys()
        assert all(torch.equal(value, expected.moving()[name]) for name, value in own.moving().items())
