"""The average follows applied updates by its rule, and nothing else."""

from __future__ import annotations

import pytest
import torch

from mptrain.engine.step import train_step
from tests.small_runs import TINY, loop_of, parts_of

MODES = ["amp_dynamic", "fp16_dynamic", "fp16_pure"]


def by_hand(decay, values):
    """The rule over scalars: the first value is where the average starts."""
    average = values[0]
    for count, value in enumerate(values[1:], start=1):
        kept = min(decay, (1 + count) / (10 + count))
        average += (1 - kept) * (value - average)
    return average


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_it_is_the_rule_worked_out_over_the_weights_of_every_update(tmp_path, decay):
    loop = loop_of(tmp_path, *TINY, "precision=fp32", f"train.ema_decay={decay}", "train.max_steps=7")
    [learner] = loop.parts.learners
    seen = [{name: value.double().clone() for name, value in learner.weights.masters.full_precision().items()}]
    advance = learner.advance

    def watch(verdict):
        advance(verdict)
        seen.append({name: value.double().clone() for name, value in learner.weights.masters.full_precision().items()})

    learner.advance = watch
    loop.run()
    assert len(seen) == 8
    for name, value in learner.average.values().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), by_hand(decay, [step[name] for step in seen]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", MODES)
def test_trap_24_a_refused_step_leaves_it_bit_for_bit(precision):
    parts, _ = parts_of(*TINY, f"precision={precision}", "train.ema_decay=0.9")
    [learner] = parts.learners
    ring = type("Nowhere", (), {"record": lambda self, *row: None})()
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    ring.record(train_step(learner, parts.model, batch, parts.plan))
    before = {name: value.clone() for name, value in learner.average.values().items()}
    learner.scale_state = {**learner.scale_state, "scale": torch.full((1,), 2.0**100)}
    learner.rates = learner.rates * 0 + 1.0
    handle = next(parts.model.parameters()).register_hook(lambda grad: grad * torch.inf)
    ring.record(train_step(learner, parts.model, batch, parts.plan))
    assert learner.updates.item() == 1
    assert all(torch.equal(value, before[name]) for name, value in learner.average.values().items())
    handle.remove()
    learner.scale_state = learner.scaler.initial(torch.device("cpu"))
    ring.record(train_step(learner, parts.model, batch, parts.plan))
    assert learner.updates.item() == 2
    assert any(not torch.equal(value, before[name]) for name, value in learner.average.values().items())


def test_it_follows_the_masters_and_not_the_rounded_weights(tmp_path):
    loop = loop_of(tmp_path, *TINY, "precision=fp16_dynamic", "train.ema_decay=0.5", "train.max_steps=3")
    loop.run()
    [learner] = loop.parts.learners
    values = learner.average.values()
    assert any(not torch.equal(value, value.half().float()) for value in values.values())
