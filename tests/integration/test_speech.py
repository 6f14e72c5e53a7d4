"""Speech recognition through the whole engine: dtypes, learning, refused steps, resuming, and what is refused in words."""

from __future__ import annotations

import math

import pytest
import torch
from precision_promises import PROMISED
from small_runs import Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.system.errors import ConfigError
from mptrain.system.records import EvalRecord, StepRecord
from mptrain.workloads.base.task import Texts
from mptrain.workloads.speech.models.deepspeech2 import MaskedBatchNorm

pytestmark = pytest.mark.workload

SMALL = ("model=deepspeech2_small", "model.channels=2", "model.hidden_size=8", "dataset.train_samples=20",
         "dataset.val_samples=4", "dataset.test_samples=4", "dataset.hop_ms=20", "train.batch_size=8", "train.epochs=3",
         "checkpoint.every_epochs=null")  # fmt: skip
ARMS = ("fp32", "amp_dynamic", "fp16_dynamic")


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_the_models_choose_their_task_and_data_that_needs_no_download():
    for model, features in (("deepspeech2_small", "log_mel"), ("deepspeech2", "log_spectrogram")):
        config = compose([f"model={model}"])
        assert config.task.path == "mptrain.workloads.speech.task.Transcribe"
        assert config.dataset.path == "mptrain.workloads.speech.datasets.tone_words.make_tone_words"
        assert config.dataset.arguments["features"] == features


@pytest.mark.parametrize("precision", PROMISED)
def test_three_epochs_are_finite_learn_and_have_the_promised_dtypes(tmp_path, precision):
    parameters, products, norms = PROMISED[precision]
    kept = Kept()
    eps = ("optimizer.eps=1e-4",) if precision == "fp16_pure" else ()
    static = ("scaler.scale=128",) if precision.endswith("static") else ()
    loop = loop_of(tmp_path, *SMALL, f"precision={precision}", *eps, *static, kept=kept)
    seen = set()
    for module in loop.parts.model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    loop.run()
    assert seen == {products}
    steps = kept.of(StepRecord)
    assert len(steps) == 9
    assert all(math.isfinite(step.loss) for step in steps)
    epochs = [sum(step.loss for step in steps if step.epoch == epoch) for epoch in (0, 2)]
    assert epochs[1] < epochs[0]  # single steps hear short or long utterances
    metrics = kept.of(EvalRecord)[-1].metrics
    assert set(metrics) == {"loss", "cer", "wer"}
    for module in loop.parts.model.modules():
        for parameter in module.parameters(recurse=False):
            assert parameter.dtype == (norms if isinstance(module, MaskedBatchNorm) else parameters)


@pytest.mark.parametrize("precision", ARMS)
def test_a_few_utterances_are_learned_by_heart(tmp_path, precision):
    words = ("model=deepspeech2_small", "model.layers=1", "model.hidden_size=48", "dataset.train_samples=4", "train.batch_size=4",
             "dataset.val_samples=0", "dataset.test_samples=0", "dataset.hop_ms=20", "dataset.noise=0.1", "train.epochs=40",
             "schedule=constant", "checkpoint.every_epochs=null")  # fmt: skip
    loop = loop_of(tmp_path, *words, f"precision={precision}")
    loop.run()
    parts = loop.parts
    (batch,) = [parts.prepare(batch) for batch in parts.loaders["train"].batches(0)]
    parts.model.train()  # four utterances have statistics of their own
    with torch.no_grad(), parts.plan.products.context, parts.plan.autocast:
        shown = parts.task.exhibits(parts.model, batch)["transcripts"]
    assert isinstance(shown, Texts)
    assert all(reference == heard for reference, heard in shown.rows)


@pytest.mark.parametrize("precision", ARMS)
def test_a_run_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path, precision):
    words = (*SMALL, f"precision={precision}", "model.dropout=0.2")
    whole = loop_of(tmp_path, *words)
    whole.run()
    half = loop_of(tmp_path, *words)
    interrupt_after(half, 4)
    rest = continue_loop(half, *words)
    rest.run()
    assert steps_of(whole) == steps_of(rest)
    one, other = state_of(whole.parts.model), state_of(rest.parts.model)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ARMS)
def test_a_refused_step_leaves_weights_and_running_statistics_bit_unchanged(precision):
    parts, _ = parts_of(*SMALL, f"precision={precision}", "scaler=dynamic")
    learner = parts.learners[0]
    ring = Ring(64, len(learner.weights.names), parts.device)
    batch = parts.prepare(next(iter(parts.loaders["train"].batches(0))))
    before = state_of(parts.model)
    parts.model.letters.weight.register_hook(lambda gradient: gradient * float("inf"))
    ring.record(train_step(learner, parts.model.train(), batch, parts.plan))
    assert [row.overflow for row in ring.take(wait=True)] == [True]
    after = state_of(parts.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_accumulated_micro_batches_cut_padded_batches_anywhere(tmp_path):
    kept = Kept()
    loop_of(tmp_path, *SMALL, "precision=fp32", "train.accumulate=3", kept=kept).run()
    assert all(math.isfinite(step.loss) for step in kept.of(StepRecord))


def test_other_data_or_another_task_is_refused_in_words():
    with pytest.raises(ConfigError, match="task=transcribe needs decode, which dataset=digits does not have"):
        parts_of("model=deepspeech2_small", "dataset=digits")
    with pytest.raises(ConfigError, match="feature_size"):
        parts_of("model=deepspeech2_small", "dataset=digits", "task=classify")
    with pytest.raises(ConfigError, match="task=classify needs num_classes"):
        parts_of("model=deepspeech2_small", "task=classify")
