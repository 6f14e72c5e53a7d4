"""Training with the rules that measure gradients, and what that costs the others: nothing."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.system.records import ScaleRecord
from tests.small_runs import TINY, Kept, loop_of, parts_of, steps_of, whole_and_resumed

RULES = ("als", "logmax", "smooth")


class Operators(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def learner_with_gradients(*words):
    """A learner after one step; its gradients are still there."""
    parts, _ = parts_of(*TINY, *words)
    learner, ring = parts.learners[0], Ring(4, len(parts.learners[0].weights.names), parts.device)
    batch = parts.prepare(next(iter(parts.loaders["train"].batches(0))))
    ring.record(train_step(learner, parts.model, batch, parts.plan))
    return learner


@pytest.mark.parametrize(("scaler", "precision"), [*((rule, "fp16_dynamic") for rule in RULES), ("als", "amp_dynamic")])
def test_a_network_learns_in_fp16_under_each_rule_and_its_scale_finds_its_place(tmp_path, scaler, precision):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, f"precision={precision}", f"scaler={scaler}", "train.epochs=12", kept=kept)
    loop.run()
    steps = steps_of(loop)
    assert steps[-1]["loss"] < 0.75 * steps[0]["loss"]
    scales = [step["loss_scale"] for step in steps]
    assert scales[0] == 1.0
    assert scales[-1] >= 256.0
    assert all(step["updates"] > 0 for step in steps[1:])
    moved = {(record.from_scale < record.to_scale, record.why) for record in kept.of(ScaleRecord)}
    assert moved <= {(True, "growth"), (False, "overflow"), (False, "measured")}


def test_a_scale_that_falls_without_an_overflow_is_on_record_as_measured(tmp_path):
    kept = Kept()
    loop_of(tmp_path, *TINY, "precision=fp32", "scaler=als", "train.epochs=6", kept=kept).run()
    falls = [record for record in kept.of(ScaleRecord) if record.to_scale < record.from_scale]
    assert falls
    assert {record.why for record in falls} == {"measured"}


@pytest.mark.parametrize("scaler", RULES)
def test_a_run_resumed_under_each_rule_is_bit_identical_to_one_that_was_not(tmp_path, scaler):
    words = (*TINY, "precision=fp16_dynamic", f"scaler={scaler}")
    whole, rest = whole_and_resumed(tmp_path, *words, after=7)
    assert rest.notes == []
    assert steps_of(rest) == steps_of(whole)


def test_what_is_measured_is_that_of_the_scaled_gradients(tmp_path):
    learner = learner_with_gradients("precision=fp32", "scaler=logmax", "scaler.init_scale=64")
    largest = max(grad.abs().max().item() for grad in learner.weights.gradients.by_name().values())
    assert learner.judge().measured.item() == largest
    x = math.log2(largest)  # the update has unscaled them
    assert learner.scale_state["fast"].item() == pytest.approx(0.01 * x, rel=1e-6)


@pytest.mark.parametrize("scaler", ["none", "dynamic", "fairseq", "smooth"])
def test_a_rule_that_needs_nothing_measured_launches_nothing_for_it(scaler):
    """The verdict takes one norm, one stack, and what decides; a measuring rule's takes more."""

    def judged(*words):
        learner = learner_with_gradients("precision=fp32", *words)
        with Operators() as operators:
            verdict = learner.judge()
        return operators.counts, verdict

    plain, verdict = judged(f"scaler={scaler}")
    assert verdict.measured is None
    assert sum(count for name, count in plain.items() if "norm" in name) == 2  # of each gradient, and of all
    more, verdict = judged("scaler=logmax")
    assert verdict.measured.shape == torch.Size([1])
    assert set(more - plain) == {
        f"aten.{name}" for name in ("_foreach_norm.Scalar", "stack.default", "amax.default", "view.default")
    }
    assert not plain - more
