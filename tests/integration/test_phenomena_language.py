"""The paper's language model in small: without loss scaling it falls behind, with a scale of 128 it equals FP32."""

from __future__ import annotations

import functools

import pytest
from small_runs import Kept, loop_of

from mptrain.system.records import EvalRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def loss_after_120_steps(tmp_path_factory):
    @functools.cache
    def run(*words):
        kept = Kept()
        root = tmp_path_factory.mktemp("runs")
        loop_of(root, "model=word_lstm", "train.max_steps=120", "checkpoint.every_epochs=null", *words, kept=kept).run()
        (last,) = [record for record in kept.of(EvalRecord) if record.split == "val"][-1:]
        return last.metrics["loss"]

    return run


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("precision", ["fp16_static", "amp_static"])
def test_the_word_lstm_falls_behind_at_scale_1_and_equals_fp32_at_scale_128(loss_after_120_steps, precision, seed):
    words = f"precision={precision}", f"seed={seed}"
    reference = loss_after_120_steps("precision=fp32", f"seed={seed}")
    unscaled = loss_after_120_steps(*words, "scaler.scale=1")
    scaled = loss_after_120_steps(*words, "scaler.scale=128")
    assert reference < 5.0  # a model that learned: word frequencies alone give about 6
    assert unscaled - reference > 0.08
    assert abs(scaled - reference) < 0.01
