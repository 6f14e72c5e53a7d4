"""Language models through the whole engine: state carried from batch to batch survives all that may befall a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.engine.evaluate import evaluate
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from tests.small_runs import parts_of

pytestmark = pytest.mark.workload

LSTM = ("model=word_lstm", "model.embedding_size=8", "model.hidden_size=8", "model.layers=2", "dataset.sequence_length=8",
        "train.batch_size=8", "dataset.train_samples=44", "dataset.max_vocabulary=50", "dataset.val_share=0.02",
        "dataset.test_share=0.01", "checkpoint.every_epochs=null")  # fmt: skip
BIG = ("model=big_lstm_small", "model.embedding_size=8", "model.hidden_size=16", "model.projection=8", "model.samples=20",
       "model.cutoffs=[10,20]", "dataset.sequence_length=8", "train.batch_size=8", "dataset.train_samples=44",
       "dataset.max_vocabulary=50", "dataset.val_share=0.02", "dataset.test_share=0.01", "checkpoint.every_epochs=null")  # fmt: skip


def stepper(parts):
    """Steps of the only learner, one for each call with a prepared batch."""
    learner, ring = parts.learners[0], Ring(64, len(parts.learners[0].weights.names), parts.device)
    parts.model.train()
    return ring, lambda batch: ring.record(train_step(learner, parts.model, batch, parts.plan))


def batches(parts, count):
    return [parts.prepare(batch) for batch, _ in zip(parts.loaders["train"].batches(0), range(count), strict=False)]


def state_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


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


def test_in_every_precision_a_sampled_softmax_draws_the_same_tokens_step_by_step():
    drawn = {}
    for precision in ("fp32", "amp_dynamic", "fp16_dynamic", "bf16"):
        parts, _ = parts_of(*BIG, f"precision={precision}", "scaler=none", "optimizer.lr=1e-30")
        _, step = stepper(parts)
        for batch in batches(parts, 3):
            step(batch)
        drawn[precision] = torch.get_rng_state()
    assert all(torch.equal(state, drawn["fp32"]) for state in drawn.values())
