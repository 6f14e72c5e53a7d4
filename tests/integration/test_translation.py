"""Translation through the whole engine: every precision mode, a run that goes on, a pair learned by heart."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from capability import without
from precision_promises import PROMISED
from small_runs import Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of
from torch._subclasses.fake_tensor import FakeTensorMode

from mptrain.config.compose import compose
from mptrain.engine.evaluate import evaluate
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.system.errors import ConfigError, EnvironmentRefused
from mptrain.system.records import EvalRecord, StepRecord
from mptrain.workloads.base.batch import Batch

pytestmark = pytest.mark.workload

DATA = (
    "dataset.samples=40",
    "dataset.vocabulary=80",
    "train.batch_size=8",
    "checkpoint.every_epochs=null",
    "task.length_extra=3",
)
LSTM = ("model=seq2seq_small", "model.width=16", *DATA)
TRANSFORMER = ("model=transformer_small_translation", "model.width=16", "model.heads=2", "model.inner=32", "model.layers=1",
               "schedule.warmup=2", *DATA)  # fmt: skip
MODELS = {"lstm": LSTM, "transformer": TRANSFORMER}
MODELS_OF_TRANSLATION = (
    *("seq2seq_small", "seq2seq_3x1024", "seq2seq_5x1024"),
    *("transformer_small_translation", "transformer_base"),
)


@pytest.mark.parametrize("name", MODELS_OF_TRANSLATION)
def test_a_model_chooses_its_task_and_data_that_need_no_files(name):
    config = compose([f"model={name}"])
    assert config.task.path == "mptrain.workloads.translation.task.Translate"
    assert config.dataset.path == "mptrain.workloads.translation.datasets.number_words.load_number_words"
    assert config.task.arguments["label_smoothing"] == (0.1 if name == "transformer_base" else 0.0)
    assert config.dataset.arguments["shared"] == name.startswith("transformer")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=seq2seq_small", "dataset=digits"), "needs target_vocabulary_size, decode, decode_source"),
        (("task=translate",), "target_vocabulary_size"),
        (("model=transformer_small_translation", "dataset.shared=false"), "set dataset.shared=true"),
        (("model=seq2seq_small", "dataset.vocabulary=5"), "too small for the characters"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(words, said):
    with pytest.raises(ConfigError) as refused:
        parts_of(*words)
    assert said in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize("missing", ["sentencepiece", "sacrebleu"])
def test_a_library_that_is_missing_is_named_before_anything_is_trained(monkeypatch, missing):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == missing else found(name, *more))
    with pytest.raises(EnvironmentRefused, match=missing) as refused:
        parts_of(*LSTM)
    assert refused.value.hint == "pip install 'mptrain[translation]'"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "bf16"])
def test_a_training_is_finite_learns_and_has_the_promised_dtypes(tmp_path, precision, kind):
    kept = Kept()
    loop = loop_of(tmp_path, *MODELS[kind], f"precision={precision}", "train.epochs=3", kept=kept)
    seen = set()
    loop.parts.model.output.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    loop.run()
    assert seen == {PROMISED[precision][1]}
    steps, last = kept.of(StepRecord), kept.of(EvalRecord)[-1].metrics
    assert all(math.isfinite(step.loss) for step in steps)
    assert steps[-1].loss < steps[0].loss
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert 0 <= last["bleu"] <= 100
    assert 0 <= last["exact"] <= 1
    assert list((loop.storage.paths.root / "samples").iterdir())


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_trap_37_a_run_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path, precision):
    words = (*LSTM, f"precision={precision}", "model.dropout=0.2", "train.epochs=2")
    whole = loop_of(tmp_path, *words)
    whole.run()
    half = loop_of(tmp_path, *words)
    interrupt_after(half, 4)
    rest = continue_loop(half, *words)
    rest.run()
    assert steps_of(whole) == steps_of(rest)
    one, other = whole.parts.full_precision(), rest.parts.full_precision()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("accumulate", [3, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_trap_20_micro_batches_of_different_lengths_give_the_gradients_of_the_whole(kind, accumulate):
    norms = []
    for parts_count in (1, accumulate):
        parts, _ = parts_of(*MODELS[kind], "precision=fp32", f"train.accumulate={parts_count}")
        learner = parts.learners[0]
        ring = Ring(8, len(learner.weights.names), parts.device)
        batch = next(iter(parts.loaders["train"].batches(0)))
        assert len(set(batch.counts)) > 1
        ring.record(train_step(learner, parts.model.train(), parts.prepare(batch), parts.plan))
        (row,) = ring.take(wait=True)
        norms.append((row.loss, row.grad_norm))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "precision", "rate"), [("lstm", "amp_dynamic", 0.02), ("transformer", "fp16_dynamic", 0.01)]
)
def test_a_few_pairs_can_be_learned_by_heart(kind, precision, rate):
    steps = 120
    words = (
        *MODELS[kind],
        f"precision={precision}",
        "model.width=32",
        "dataset.train_samples=4",
        f"optimizer.lr={rate}",
    )
    parts, _ = parts_of(
        *words, "schedule=constant", "schedule.warmup=10", f"train.max_steps={steps}", "train.epochs=1000"
    )
    learner = parts.learners[0]
    ring = Ring(steps, len(learner.weights.names), parts.device)
    batch = parts.prepare(next(iter(parts.loaders["train"].batches(0))))
    for _ in range(steps):
        ring.record(train_step(learner, parts.model.train(), batch, parts.plan))
    measured = evaluate(parts, parts.loaders["train"], "val", 0, 0, stop=lambda: False).record.metrics
    assert measured["exact"] == 1.0
    assert measured["bleu"] == pytest.approx(100.0)
    assert measured["perplexity"] < 1.5


@pytest.fixture(scope="module")
def valueless():
    """torch has no implementation of its fused optimizers for tensors without values: they write in place, no more."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for overload in ("", ".tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_fused_adam_{overload}", "Meta"):
            library.impl(f"_fused_adam_{overload}", lambda *args, **kwargs: None)
    return library


@pytest.mark.usefixtures("valueless")
@pytest.mark.parametrize(("kind", "precision"), [("lstm", "amp_dynamic"), ("transformer", "fp16_dynamic")])
def test_no_step_reads_a_length_or_any_other_value_on_the_host(precision, kind):
    with without(host=False):
        parts, _ = parts_of(*MODELS[kind], f"precision={precision}")
    batch = parts.prepare(next(iter(parts.loaders["train"].batches(0))))
    learner = parts.learners[0]
    ring = Ring(8, len(learner.weights.names), parts.device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        more = {name: torch.empty_like(tensor) for name, tensor in batch.more.items()}
        fake = Batch(torch.empty_like(batch.inputs), torch.empty_like(batch.targets), batch.counts, more)
        ring.record(train_step(learner, parts.model.train(), fake, parts.plan))
    assert isinstance(learner.updates, torch._subclasses.FakeTensor)
