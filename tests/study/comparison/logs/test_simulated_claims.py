"""Simulated runs of skewed and unlike shapes: how often claims about logs are false, as the page on them says."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from mptrain.study.comparison.logs.compare_logs import judge_arm
from mptrain.study.comparison.logs.runs import LoggedRun, Question

SHAPES = {
    "normal": lambda draws, n: draws.standard_normal(n),
    "tail": lambda draws, n: draws.exponential(1, n) - 1,
    "long tail": lambda draws, n: (np.exp(draws.standard_normal(n)) - math.exp(0.5)) / 2.16,
    "rare collapse": lambda draws, n: 0.1 * draws.standard_normal(n) + 20 * ((draws.random(n) < 0.05) - 0.05),
}


@pytest.fixture(autouse=True)
def without_power(monkeypatch):
    """Leave out what takes most of the time and decides nothing."""
    for name, value in (("power_of_equivalence", math.nan), ("runs_for_power", None), ("_overturned_at", math.nan)):
        monkeypatch.setattr(f"mptrain.study.comparison.logs.compare_logs.{name}", lambda *_, value=value, **__: value)


def claims(shape, other, n, *, count, by=1.0, shift=0.0, margin=4.0):
    """Return the shares of verdicts, in per cent, on arms of n runs whose means differ by ``shift``.

    Without ``other`` the question is whether the arm beats its true mean.
    """
    draws, found = np.random.default_rng(n), Counter()
    form = "equivalent" if other else "beats target"
    question = Question("loss", form, margin, 0.0, "last", paired=False, looks=1, lower_is_better=True)
    for _ in range(count):
        own, others = by * SHAPES[shape](draws, n) + shift, SHAPES[other](draws, n) if other else ()
        runs = [[LoggedRun("", "", "", 1, float(one)) for one in some] for some in (own, others)]
        found[judge_arm("arm", runs[0], runs[1] if other else runs[0], question, 0.05).verdict] += 100 / count
    return found


#: Largest shares of false claims that the page states, in per cent; of arms by (shape, that of the reference, spread).
TARGETS = {"normal": 5, "tail": 18, "long tail": 21}
ARMS = {
    ("tail", "normal", 1): 6,
    ("normal", "tail", 1): 6,
    ("tail", "tail", 1): 5,
    ("normal", "normal", 3): 5,
    ("tail", "tail", 3): 13,
    ("rare collapse", "normal", 1): 55,
}


def at_most(share, stated, count):
    return share <= stated + 300 * math.sqrt(stated / 100 * (1 - stated / 100) / count)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 8, 20])
@pytest.mark.parametrize("shape", TARGETS)
def test_a_target_that_is_the_true_mean_is_beaten_no_more_often_than_the_page_says(shape, n):
    found = claims(shape, "", n, count=1000)
    print(f"\n{shape}, {n} runs, true mean: {dict(found)}")
    assert at_most(found["beats target"], TARGETS[shape], 1000)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 8, 20])
@pytest.mark.parametrize(("shape", "other", "by"), ARMS)
def test_unlike_arms_are_called_equivalent_or_different_no_more_often_than_the_page_says(shape, other, by, n):
    stated = ARMS[shape, other, by]
    for shift in (4.0, -4.0):
        found = claims(shape, other, n, count=1000, by=by, shift=shift)
        print(f"\n{by} x {shape} against {other}, {n} runs, at {shift:+}: {dict(found)}")
        assert at_most(found["equivalent"], stated, 1000)
    found = claims(shape, other, n, count=1000, by=by, margin=1e-6)
    assert at_most(found["better"] + found["worse"], stated, 1000)


def test_skew_is_looked_at_in_every_sample(monkeypatch):
    """The same draws, with and without a look at the skew: of claims at a tie with a tail, fewer are false."""
    questions = {"target": ("long tail", "", {}), "an arm": ("tail", "normal", {"by": 3, "shift": 4.0})}
    seen = {name: claims(*words, 8, count=150, **more) for name, (*words, more) in questions.items()}
    monkeypatch.setattr("mptrain.study.comparison.logs.compare_logs.looks_skewed", lambda values: False)
    unseen = {name: claims(*words, 8, count=150, **more) for name, (*words, more) in questions.items()}
    assert seen["target"]["beats target"] < unseen["target"]["beats target"] - 2
    assert seen["an arm"]["equivalent"] < unseen["an arm"]["equivalent"]
