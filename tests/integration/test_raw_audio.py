"""WaveNet through the whole engine: precision modes, sounds, resuming, data that are missing or broken."""

from __future__ import annotations

import math

import pytest
import torch
from precision_promises import PROMISED
from scipy.io import wavfile
from small_runs import Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.evaluate import evaluate
from mptrain.engine.step import accumulate_gradients
from mptrain.system.errors import ConfigError, DataError
from mptrain.system.records import EvalRecord, StepRecord

pytestmark = pytest.mark.workload

NARROW = ("model=wavenet_small", "model.stacks=1", "model.layers=4", "model.residual=8", "model.skip=12", "model.condition=4",
          "dataset.train_samples=12", "dataset.val_samples=4", "dataset.test_samples=4", "dataset.window=1000",
          "dataset.context=15", "train.batch_size=8", "train.epochs=4", "optimizer.lr=0.02", "task.seconds=0.004",
          "checkpoint.every_epochs=null")  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_four_epochs_learn_speak_and_go_on_bit_for_bit_with_the_promised_dtypes(tmp_path, precision):
    words, kept = (*NARROW, f"precision={precision}"), Kept()
    parameters, compute, _ = PROMISED[precision]
    whole = loop_of(tmp_path, *words, kept=kept)
    seen = set()
    for module in whole.parts.model.modules():
        if isinstance(module, nn.Conv1d):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    whole.run()
    assert seen == {compute}
    assert {parameter.dtype for parameter in whole.parts.model.parameters()} == {parameters}
    steps, validated = kept.of(StepRecord), [one.metrics for one in kept.of(EvalRecord) if one.split == "val"]
    assert len(steps) == 24
    assert all(math.isfinite(step.loss) for step in steps)
    assert sum(not step.skipped for step in steps) > 12
    assert validated[-1]["bits"] < validated[0]["bits"] < 8.1
    assert validated[-1]["bits"] < 7.7
    assert validated[-1]["bits"] == pytest.approx(validated[-1]["loss"] / math.log(2))
    sounds = sorted((whole.storage.paths.root / "samples").glob("drawn-*.wav"))
    assert len(sounds) == 4 * 4
    rate, samples = wavfile.read(sounds[0])
    assert (rate, samples.shape) == (8000, (32,))
    half = loop_of(tmp_path, *words)
    interrupt_after(half, 9)
    rest = continue_loop(half, *words)
    rest.run()
    assert steps_of(whole) == steps_of(rest)
    one, other = whole.parts.full_precision(), rest.parts.full_precision()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_first_loss_of_the_shipped_network_is_the_logarithm_of_the_levels():
    parts, _ = parts_of("model=wavenet_small", "precision=fp32", "dataset.val_samples=4")
    metrics = evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False).record.metrics
    assert metrics["loss"] == pytest.approx(math.log(256), rel=0.02)


def test_micro_batches_have_the_gradient_of_the_whole_batch():
    """Windows with different numbers of targets: each counts by its samples."""

    def after(accumulate):
        parts, _ = parts_of(*NARROW, "precision=fp32", "dataset.window=3000", f"train.accumulate={accumulate}")
        batch = parts.prepare(next(parts.loaders["train"].batches(0)))
        assert len(set(batch.counts)) == 2
        total = accumulate_gradients(parts.learners[0], parts.model, batch, parts.plan)
        return total.item(), [parameter.grad.clone() for parameter in parts.model.parameters()]

    (whole, grads), (split, split_grads) = after(1), after(3)
    assert split == pytest.approx(whole, rel=1e-5)
    for one, other in zip(grads, split_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_the_network_chooses_its_task_its_data_and_how_much_they_let_it_hear():
    config = compose(["model=wavenet_small"])
    assert (config.chosen["task"], config.chosen["dataset"], config.chosen["optimizer"]) == (
        "audio",
        "made_up_sounds",
        "adam",
    )
    assert config.dataset.arguments["context"] == 510
    published = compose(["model=wavenet", "dataset=asterisk_audio"])
    assert (published.dataset.arguments["context"], published.dataset.arguments["window"]) == (3069, 16000)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("model=wavenet_small", "dataset=digits"), ConfigError, "levels"),
        (
            ("model=wavenet_small", "dataset=recordings", "dataset.root=/nosuch"),
            DataError,
            "looked for the folder /nosuch",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(words, error, says):
    with pytest.raises(error, match=says):
        parts_of(*words)
