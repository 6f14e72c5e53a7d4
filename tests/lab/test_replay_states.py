"""States of rules that are kept: the same, step by step, as the rule itself computes them anew."""

import gc
import math
import random

import pytest
import torch

from mptrain.lab import replay
from mptrain.lab.replay import RuleStates
from mptrain.numerics.overflow_check import Verdict
from tests.scaler.walking import ALL, CPU, preset, with_window


def judged(overflow, norm, scale, measured):
    """As the step would say it, every tensor made anew."""

    def one(value, dtype=torch.float64):
        return torch.tensor([value], dtype=dtype)

    norm = math.inf if overflow else norm
    refused, applied = one(overflow, torch.bool), one(not overflow, torch.bool)
    return Verdict(refused, applied, one(overflow, torch.float32), one(norm), one(norm * scale), one(measured))


def drawn(seed, steps=400):
    """Stretches of clean steps and of overflows, with norms and measurements."""
    rng = random.Random(seed)
    while steps > 0:
        overflow, length = rng.random() < 0.4, min(rng.choice([1, 1, 2, 3, 8, 30]), steps)
        steps -= length
        for _ in range(length):
            yield overflow, rng.random() * 10, rng.choice([0.0, 1e-8, 0.25, 3.0, 60000.0])


def require_equal_walks(scaler, steps):
    states = RuleStates(scaler)
    tensors, state = scaler.initial(CPU), states.first
    for overflow, norm, measured in steps:
        tensors = scaler.after(tensors, judged(overflow, norm, float(tensors["scale"]), measured))
        state = states.after(state, overflow, norm, measured)
        assert state.scale == float(tensors["scale"])
        assert state.tensors.keys() == tensors.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(state.tensors[name], value, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", [*ALL, "dynamic", "static", "none"])
def test_states_are_those_of_the_rule_at_every_step(name):
    for seed in range(3):
        require_equal_walks(preset(name), drawn(seed))
        if name in ALL:
            require_equal_walks(with_window(name, 5), drawn(seed))


def test_states_are_those_of_the_rule_where_few_can_be_kept(monkeypatch):
    monkeypatch.setattr(replay, "_MOST", 3)
    require_equal_walks(with_window("torch", 5), drawn(0))


def test_no_more_states_are_held_than_can_be_kept(monkeypatch):
    """Of a rule whose state never comes back."""

    class Summing:
        def initial(self, device):
            return {"scale": torch.ones(1, dtype=torch.float64)}

        def after(self, state, verdict):
            return {"scale": state["scale"] + verdict.measured}

    monkeypatch.setattr(replay, "_MOST", 10)
    gc.collect()
    before = sum(type(one) is replay.RuleState for one in gc.get_objects())
    states = RuleStates(Summing())
    state = states.first
    for step in range(100):
        state = states.after(state, False, 1.0, 1.0 + step)
    assert sum(type(one) is replay.RuleState for one in gc.get_objects()) - before <= 12


class Counted:
    """A rule that counts how often it is asked, and looks at what ``reads`` reads of a verdict."""

    def __init__(self, reads=lambda verdict: verdict.overflow):
        self._rule, self._reads, self.asked = with_window("torch", 10), reads, 0

    def initial(self, device):
        return self._rule.initial(device)

    def after(self, state, verdict):
        self.asked += 1
        self._reads(verdict)
        return self._rule.after(state, verdict)


def walked(rule, steps):
    states = RuleStates(rule)
    state = states.first
    for overflow, norm, _ in steps:
        state = states.after(state, overflow, norm, math.nan)


def test_a_rule_is_asked_once_about_what_happens_again():
    rule = Counted()
    walked(rule, [(step % 11 == 10, 1.0 + step, 0.0) for step in range(2000)])
    assert rule.asked < 100


@pytest.mark.parametrize(
    "reads",
    [lambda verdict: verdict.grad_norm, lambda verdict: verdict.norms, lambda verdict: [*verdict], lambda v: v[3]],
    ids=["grad_norm", "norms", "unpacked", "by place"],
)
def test_a_rule_that_reads_norms_is_asked_about_every_step(reads):
    rule = Counted(reads)
    walked(rule, [(step % 21 == 20, 1.0 + step, 0.0) for step in range(200)])
    assert rule.asked == 200


def test_a_rule_may_follow_the_norm():
    class Following:
        def initial(self, device):
            return {"scale": torch.ones(1)}

        def after(self, state, verdict):
            return {"scale": torch.where(verdict.overflow, state["scale"] / 2, verdict.grad_norm.float())}

    require_equal_walks(Following(), drawn(1))
