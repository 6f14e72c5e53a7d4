"""What leaves the range of half precision only later is found at the first step, and what never does is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mptrain.engine.observer import Operation
from mptrain.lab.doctor.headroom import close_calls, worth_a_look
from mptrain.numerics.formats import BFLOAT16, FLOAT16
from mptrain.numerics.tensors import count_exponents, read_counts
from tests.faulty_networks import WIDTH
from tests.loops import each


def operation(name, result, *, given=1.0, dtype=torch.float16, module="part", phase="forward"):
    counts = read_counts(count_exponents(torch.tensor([result], dtype=dtype)).tolist(), dtype)
    return Operation(phase, module, "", name, (counts.dtype,), (counts,), True, given, 0, False)


@each(
    ("name", "result", "given", "found"),
    [
        ("exp", math.exp(5.5), 5.5, False),
        ("exp", math.exp(5.6), 5.6, True),
        ("expm1", math.exp(10), 10.0, True),
        ("log", -9.5, 1.0, False),
        ("log", -10.0, 1.0, True),
        ("log2", -13.5, 1.0, False),
        ("log2", -15.0, 1.0, True),
        ("rsqrt", 120.0, 1.0, False),
        ("rsqrt", 140.0, 1.0, True),
        ("reciprocal", 17000.0, 1.0, True),
        ("sum", 16000.0, 30.0, False),
        ("sum", 17000.0, 30.0, True),
        ("bmm", 60000.0, 30.0, True),
        ("sum", 60000.0, 30000.0, False),  # large numbers that it was given
        ("masked_fill", -60000.0, 1.0, False),
        ("_softmax", 1.0, 1000.0, False),
    ],
)
def test_a_result_counts_as_close_by_what_its_operator_does_to_growing_inputs(name, result, given, found):
    assert bool(close_calls([operation(name, result, given=given)], FLOAT16)) is found
    elsewhere = [operation(name, result, given=given, dtype=torch.float32)]
    assert not close_calls([*elsewhere, operation(name, result, given=given, phase="backward")], FLOAT16)


def test_each_operator_of_a_module_is_named_once_at_its_worst():
    calls = close_calls([operation("exp", math.exp(one), given=one) for one in (6.0, 8.25, 7.0)], FLOAT16)
    assert [(one.module, one.operator, one.what) for one in calls] == [("part", "exp", "exp reaches 8.25 of 11.09")]
    assert not close_calls([operation("exp", math.exp(11), dtype=torch.bfloat16)], BFLOAT16)
    assert close_calls([operation("exp", math.exp(50), dtype=torch.bfloat16)], BFLOAT16)


def test_only_networks_with_something_that_may_grow_are_trained_for_it():
    assert worth_a_look([operation("exp", 1.0)], FLOAT16)
    assert worth_a_look([operation("bmm", 2000.0)], FLOAT16)
    assert not worth_a_look([operation("_softmax", 1.0), operation("bmm", 500.0), operation("add", 2000.0)], FLOAT16)


class Sharpens(nn.Module):
    """Probabilities by hand, of scores that grow while it learns."""

    def __init__(self, *, subtracts):
        super().__init__()
        self.scores, self.subtracts = nn.Linear(WIDTH, 8), subtracts

    def forward(self, given):
        scores = self.scores(given) * 20
        if self.subtracts:
            scores = scores - scores.amax(1, keepdim=True)
        large = torch.exp(scores * 0.05 if not self.subtracts else scores)
        return given + (large / large.sum(1, keepdim=True)).repeat(1, WIDTH // 8)


class HandMadeLogProbabilities(nn.Module):
    """A softplus by hand, whose exponential has no bound."""

    def forward(self, given):
        return torch.log(1 + torch.exp(given * 3)) / 3


@pytest.mark.long
def test_an_exponential_that_grows_is_found_and_one_that_is_bounded_is_a_note(examined):
    more = "dataset.train_samples=640"
    found = examined(HandMadeLogProbabilities, more, "optimizer=adamw", "optimizer.lr=0.02").findings
    assert [(one.kind, one.where) for one in found] == [("headroom", ("odd",))]
    assert "may leave its range later: exp " in found[0].what
    assert "steps in FP32" in found[0].what
    assert found[0].hint.endswith("odd]")
    report = examined(lambda: Sharpens(subtracts=True), more)
    assert not report.findings
    assert any("exp" in note for note in report.notes)


class AddsMask(nn.Module):
    """Attention of places to places whose mask is a buffer of large numbers in FP32, cast to the dtype of the scores."""

    def __init__(self, gain):
        super().__init__()
        self.register_buffer("mask", torch.triu(torch.full((8, 8), -3e4), 1))
        self.gain = nn.Parameter(torch.full((1, 1), gain))

    def forward(self, given):
        places = given.reshape(len(given), 8, -1)
        scores = places @ places.transpose(1, 2) + self.mask.to(places.dtype)
        mixed = (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ places
        return mixed.reshape(given.shape) + (self.gain.float() * 2e4).to(given.dtype) * 1e-7


@pytest.mark.long
@pytest.mark.parametrize("gain", [0.0, 1.4])
def test_a_large_number_that_stays_what_it_is_never_leaves_the_range(gain, examined):
    found = examined(lambda: AddsMask(gain), "precision.keep_fp32=[norms]", "optimizer=adamw").findings
    assert [one.kind for one in found] == ["headroom"] * bool(gain)


class OfOne(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, given):
        return self.norm(given)


class OneKey(nn.Module):
    """Attention of all places to one: its weights are 1, whatever query and key say."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        key = self.key(given.mean(0, keepdim=True))
        return given * (self.query(given) @ key.t()).softmax(-1)


@pytest.mark.parametrize(
    ("make", "where"),
    [(lambda: OfOne(nn.GroupNorm(WIDTH, WIDTH)), ("odd.norm",)), (OneKey, ("odd",))],
)
def test_what_normalises_single_elements_is_said_to_and_nothing_else(make, where, examined):
    (found,) = examined(make).findings
    assert (found.kind, found.where) == ("of_one", where)
    assert "over single elements" in found.what


def test_a_group_of_several_elements_is_sound(examined):
    assert not examined(lambda: OfOne(nn.GroupNorm(WIDTH // 4, WIDTH))).findings


def test_later_steps_that_could_not_be_seen_are_a_note(examined, monkeypatch):
    monkeypatch.setattr("mptrain.lab.doctor.check.after_some_steps", lambda *given: (0, ()))
    report = examined(HandMadeLogProbabilities)
    assert not report.findings
    assert any("was not seen: trained in FP32, the weights are not finite" in note for note in report.notes)
