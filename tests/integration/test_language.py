"""Language models through the whole engine: state carried from batch to batch survives all that may befall a run."""

from __future__ import annotations

import math

import pytest
import torch
from capability import without
from precision_promises import PROMISED
from small_runs import Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mptrain.config.compose import compose
from mptrain.engine.evaluate import evaluate
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.system.errors import ConfigError, DataError
from mptrain.system.records import EvalRecord, StepRecord
from mptrain.workloads.base.batch import Batch

pytestmark = pytest.mark.workload

LSTM = ("model=word_lstm", "model.embedding_size=8", "model.hidden_size=8", "model.layers=2", "dataset.sequence_length=8",
        "train.batch_size=8", "dataset.train_samples=44", "dataset.max_vocabulary=50", "dataset.val_share=0.02",
        "dataset.test_share=0.01", "checkpoint.every_epochs=null")  # fmt: skip
TRANSFORMER = ("model=transformer", "model.width=8", "model.heads=2", "dataset.sequence_length=8", "train.batch_size=8",
               "dataset.train_samples=44", "dataset.val_share=0.02", "dataset.test_share=0.01", "checkpoint.every_epochs=null")  # fmt: skip
BIG = ("model=big_lstm_small", "model.embedding_size=8", "model.hidden_size=16", "model.projection=8", "model.samples=20",
       "model.cutoffs=[10,20]", "dataset.sequence_length=8", "train.batch_size=8", "dataset.train_samples=44",
       "dataset.max_vocabulary=50", "dataset.val_share=0.02", "dataset.test_share=0.01", "checkpoint.every_epochs=null")  # fmt: skip
#: mode: dtype of parameters, dtype of products
MODES = {name: (parameters, products) for name, (parameters, products, _) in PROMISED.items()}


def stepper(parts):
    """Steps of the only learner, one for each call with a prepared batch."""
    learner, ring = parts.learners[0], Ring(64, len(parts.learners[0].weights.names), parts.device)
    parts.model.train()
    return ring, lambda batch: ring.record(train_step(learner, parts.model, batch, parts.plan))


def batches(parts, count):
    return [parts.prepare(batch) for batch, _ in zip(parts.loaders["train"].batches(0), range(count), strict=False)]


def state_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class TestChoices:
    def test_a_language_model_chooses_its_task_and_its_data(self):
        for model in ("word_lstm", "char_lstm", "transformer"):
            config = compose([f"model={model}"])
            assert config.task.path == "mptrain.workloads.language.task.Language"
            assert config.dataset.path == "mptrain.workloads.language.datasets.python_docs.load_python_docs"
            assert config.dataset.arguments["tokens"] == ("word" if model == "word_lstm" else "char")
            assert config.dataset.arguments["stream"] == (model != "transformer")

    def test_the_command_line_has_the_last_word(self, tmp_path):
        text = tmp_path / "story.txt"
        text.write_text("once upon a time there was a loss\n" * 100)
        words = ("model=word_lstm", "dataset=text", f"dataset.path={text}", "dataset.tokens=char", "optimizer=sgd")
        config = compose([*words, "dataset.sequence_length=16", "train.batch_size=4"])
        assert config.optimizer.path == "mptrain.optimizer.SGD"
        dataset = config.dataset.build(seed=0, batch_size=4)
        assert (dataset.name, dataset.lanes, dataset.sequence_length) == ("text", 4, 16)
        assert dataset.vocabulary.tokens == "char"

    @pytest.mark.parametrize(
        ("words", "error", "said"),
        [
            (("model=word_lstm", "dataset=digits"), ConfigError, "vocabulary_size"),
            (("dataset=python_docs",), ConfigError, "num_classes"),
            (("model=transformer", "dataset.stream=true"), ConfigError, "carries no state"),
            (("model=transformer", "model.heads=5"), ConfigError, "model.width=64 is not a multiple of model.heads=5"),
            (("model=word_lstm", "dataset.sequence_length=100000"), ConfigError, "needs 100001"),
            (("model=word_lstm", "dataset=text", "dataset.path=/nosuch/file"), DataError, "looked for /nosuch/file"),
        ],
    )
    def test_what_does_not_go_together_is_refused_in_words(self, words, error, said):
        with pytest.raises(error, match=said):
            parts_of(*words)


@pytest.mark.parametrize("words", [LSTM, TRANSFORMER], ids=["lstm", "transformer"])
@pytest.mark.parametrize("precision", MODES)
def test_four_epochs_are_finite_learn_and_have_the_promised_dtypes(tmp_path, precision, words):
    kept, (parameters, compute) = Kept(), MODES[precision]
    eps = ("optimizer.eps=1e-4",) if precision == "fp16_pure" else ()
    loop = loop_of(tmp_path, *words, f"precision={precision}", "train.epochs=4", *eps, kept=kept)
    seen = set()
    for module in loop.parts.model.modules():
        if isinstance(module, (nn.Linear, nn.LSTM)):
            module.register_forward_hook(
                lambda _, __, output: seen.add((output[0] if isinstance(output, tuple) else output).dtype)
            )
    loop.run()
    assert seen == {compute}
    steps = kept.of(StepRecord)
    assert len(steps) == 24
    assert all(math.isfinite(step.loss) for step in steps)
    assert steps[-1].loss < steps[0].loss
    assert kept.of(EvalRecord)[-1].metrics["perplexity"] == pytest.approx(
        math.exp(kept.of(EvalRecord)[-1].metrics["loss"])
    )
    norms = {id(p) for module in loop.parts.kept.values() for p in module.parameters()}
    for name, parameter in loop.parts.model.named_parameters():
        assert parameter.dtype == (torch.float32 if id(parameter) in norms else parameters), name


@pytest.mark.parametrize("precision", MODES)
def test_trap_37_the_state_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path, precision):
    words = (*LSTM, f"precision={precision}", "model.dropout=0.3", "train.epochs=3")
    words += ("optimizer.eps=1e-4",) if precision == "fp16_pure" else ()
    whole = loop_of(tmp_path, *words)
    whole.run()
    half = loop_of(tmp_path, *words)
    interrupt_after(half, 9)
    rest = continue_loop(half, *words)
    assert rest.progress.batch == 3  # of 5 and a short one
    assert rest.parts.model.hidden.any()
    rest.run()
    assert steps_of(whole) == steps_of(rest)
    one, other = whole.parts.full_precision(), rest.parts.full_precision()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(a, b) for a, b in zip(whole.parts.model.buffers(), rest.parts.model.buffers(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic", "bf16"])
def test_trap_25_a_refused_step_leaves_the_carried_state_bit_unchanged(precision):
    parts, _ = parts_of(*LSTM, f"precision={precision}", "scaler=dynamic")
    ring, step = stepper(parts)
    first, second, third = batches(parts, 3)
    step(first)
    before = state_of(parts.model)
    assert before["hidden"].any()
    hook = parts.model.decoder.weight.register_hook(lambda grad: grad * float("inf"))
    step(second)
    assert all(torch.equal(before[name], buffer) for name, buffer in parts.model.named_buffers())
    hook.remove()
    step(third)
    assert not torch.equal(before["hidden"], parts.model.hidden)
    assert [row.overflow for row in ring.take(wait=True)] == [False, True, False]


@pytest.mark.parametrize("eval_in", ["same", "fp32"])
@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_evaluation_leaves_the_state_of_training_alone_and_does_not_begin_with_it(precision, eval_in):
    parts, _ = parts_of(*LSTM, f"precision={precision}", f"precision.eval={eval_in}")
    _, step = stepper(parts)

    def measured():
        outcome = evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False)
        return outcome.record.metrics

    step(batches(parts, 1)[0])
    before, first = state_of(parts.model), measured()
    assert all(torch.equal(before[name], buffer) for name, buffer in parts.model.named_buffers())
    parts.model.hidden.fill_(0.5)
    assert measured() == first


@pytest.mark.parametrize("accumulate", [3, 8])
def test_trap_20_micro_batches_carry_the_state_of_the_whole_batch(accumulate):
    def after(parts_count):
        parts, _ = parts_of(*LSTM, "precision=fp32", "optimizer=sgd", f"train.accumulate={parts_count}")
        ring, step = stepper(parts)
        for batch in batches(parts, 3):
            step(batch)
        return state_of(parts.model), [row.loss for row in ring.take(wait=True)]

    (whole, losses), (split, split_losses) = after(1), after(accumulate)
    assert split_losses == pytest.approx(losses, rel=1e-5)
    for name, buffer in whole.items():
        torch.testing.assert_close(split[name], buffer, rtol=1e-4, atol=1e-5)


def test_state_that_is_carried_is_what_the_next_batch_of_the_text_begins_with(tmp_path):
    """The losses of an epoch without updates are those of each lane read from end to end."""
    parts, _ = parts_of(*LSTM, "precision=fp32", "optimizer.lr=1e-30")
    ring, step = stepper(parts)
    given = batches(parts, 5)
    for batch in given:
        step(batch)
    tokens, targets = (torch.cat([getattr(batch, name) for batch in given], 1) for name in ("inputs", "targets"))
    with torch.no_grad():
        logits = parts.model.eval()(tokens)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    expected = losses.view(8, 5, 8).mean((0, 2)).tolist()
    assert [row.loss for row in ring.take(wait=True)] == pytest.approx(expected, rel=1e-5)


def test_two_epochs_begin_alike_whatever_was_carried_at_the_end_of_the_first():
    parts, _ = parts_of(*LSTM, "precision=fp32", "optimizer.lr=1e-30")
    ring, step = stepper(parts)
    for _ in range(2):
        for batch in batches(parts, 6):
            step(batch)
    losses = [row.loss for row in ring.take(wait=True)]
    assert losses[:6] == losses[6:]


@pytest.mark.parametrize("softmax", ["sampled", "adaptive", "full"])
@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_the_big_lstm_learns_in_small_and_goes_on_bit_for_bit_whatever_its_softmax(tmp_path, precision, softmax):
    words = (*BIG, f"precision={precision}", f"model.softmax={softmax}", "model.dropout=0.1", "train.epochs=3")
    kept = Kept()
    whole = loop_of(tmp_path, *words, kept=kept)
    whole.run()
    steps = kept.of(StepRecord)
    assert len(steps) == 18
    assert all(math.isfinite(step.loss) for step in steps)
    assert sum(not step.skipped for step in steps) > 8
    perplexities = [record.metrics["perplexity"] for record in kept.of(EvalRecord) if record.split == "val"]
    assert perplexities[-1] < perplexities[0] < 60
    assert whole.parts.model.hidden.shape == (2, 8, 8)
    assert whole.parts.model.cell.shape == (2, 8, 16)
    half = loop_of(tmp_path, *words)
    interrupt_after(half, 9)
    rest = continue_loop(half, *words)
    rest.run()
    assert steps_of(whole) == steps_of(rest)
    one, other = whole.parts.full_precision(), rest.parts.full_precision()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_first_loss_of_the_shipped_big_lstm_on_its_validation_text_is_the_logarithm_of_the_vocabulary():
    parts, _ = parts_of("model=big_lstm_small", "precision=fp32", "dataset.val_share=0.02")
    metrics = evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False).record.metrics
    assert metrics["loss"] == pytest.approx(math.log(parts.task.vocabulary_size), rel=0.01)


def test_in_every_precision_a_sampled_softmax_draws_the_same_tokens_step_by_step():
    drawn = {}
    for precision in ("fp32", "amp_dynamic", "fp16_dynamic", "bf16"):
        parts, _ = parts_of(*BIG, f"precision={precision}", "scaler=none", "optimizer.lr=1e-30")
        _, step = stepper(parts)
        for batch in batches(parts, 3):
            step(batch)
        drawn[precision] = torch.get_rng_state()
    assert all(torch.equal(state, drawn["fp32"]) for state in drawn.values())


@pytest.fixture(scope="module")
def valueless():
    """torch has no implementation of its fused optimizers for tensors without values: they write in place, no more."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
        for overload in ("", ".tensor_lr"):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}{overload}", "Meta"):
                library.impl(f"{name}{overload}", lambda *args, **kwargs: None)
    return library


@pytest.mark.usefixtures("valueless")
@pytest.mark.parametrize("words", [LSTM, TRANSFORMER, BIG], ids=["lstm", "transformer", "big"])
@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "amp_bf16", "fp16_dynamic", "bf16"])
def test_no_step_reads_a_value_on_the_host(precision, words):
    with without(host=False):
        parts, _ = parts_of(*words, f"precision={precision}", "train.clip_norm=1", "train.accumulate=3")
    batch = batches(parts, 1)[0]
    _, step = stepper(parts)
    with FakeTensorMode(allow_non_fake_inputs=True):
        more = {name: torch.empty_like(tensor) for name, tensor in batch.more.items()}
        fake = Batch(torch.empty_like(batch.inputs), torch.empty_like(batch.targets), batch.counts, more)
        for _ in range(2):
            step(fake)
    assert isinstance(parts.learners[0].updates, torch._subclasses.FakeTensor)
