"""Judgement of an expectation by numbers: met, not met by an amount, or undecided with too few seeds."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from mptrain.study.recipe.expectations import MEASURES, judge_expectation, unknown_measures
from mptrain.study.recipe.recipe import Expectation
from tests.loops import each
from tests.study.comparison.fake_runs import failed as failing
from tests.study.comparison.fake_runs import measures


def runs_of(**arms):
    """Return the runs of arms with one top-1 value for each seed; None is a run that failed numerically."""
    return {
        name: [
            measures(seed, top1) if top1 is not None else failing(measures(seed, 0.1))
            for seed, top1 in enumerate(values)
        ]
        for name, values in arms.items()
    }


def found(arm, measure, arms, **relation):
    return judge_expectation(Expectation(arm, measure, **relation), runs_of(**arms))


def outcome(arm, measure, runs, **relation):
    return judge_expectation(Expectation(arm, measure, **relation), runs).outcome


GOOD, BAD = (0.96, 0.95, 0.97), (0.08, 0.09, 0.08)
BOTH = {"good": GOOD, "bad": BAD}


def test_an_arm_that_is_far_below_another_is_below_it():
    one = found("bad", "top1", BOTH, below="good", by=0.5)
    assert (one.text, one.outcome) == ("bad top1 below good by 0.5", "met")
    assert one.numbers.startswith("bad 0.08333, good 0.96: the paired difference in top1 is -0.877, and its 95 % CI")
    assert "excludes -0.5 (3 pairs)" in one.numbers


def test_the_interval_is_that_of_the_paired_t_test():
    values, others = (0.90, 0.93, 0.91, 0.95), (0.96, 0.95, 0.97, 0.96)
    arms = {"a": [1 - value for value in values], "b": [1 - value for value in others]}
    one = found("a", "loss", arms, below="b")
    interval = stats.ttest_rel(values, others).confidence_interval(0.95)
    assert one.statistics["low"] == pytest.approx(interval.low)
    assert one.statistics["high"] == pytest.approx(interval.high)
    assert one.statistics["n"] == 4


def test_the_wrong_side_is_not_met_and_says_by_how_much():
    one = found("good", "top1", BOTH, below="bad", by=0.5)
    assert one.outcome == "not met"
    assert one.statistics["off"] == pytest.approx(0.5 + 0.96 - 0.25 / 3)
    assert one.numbers.endswith("; off by 1.377")


def test_a_lower_loss_is_below_and_a_higher_one_above():
    runs = runs_of(**BOTH)
    assert outcome("good", "loss", runs, below="bad") == "met"
    assert outcome("bad", "loss", runs, above="good") == "met"
    assert outcome("good", "loss", runs, above="bad") == "not met"


@each("relation", [{"below": "b"}, {"equals": "b", "within": 0.5}, {"above": 0.5}])
def test_one_seed_alone_decides_nothing(relation):
    one = found("a", "top1", {"a": (0.1,), "b": (0.9,)}, **relation)
    assert one.outcome == "undecided"
    assert "at least two seeds" in one.numbers


def test_arms_with_nearly_the_same_values_are_the_same():
    arms = {"a": (0.950, 0.955, 0.960, 0.952), "b": (0.951, 0.954, 0.961, 0.951)}
    assert found("a", "top1", arms, equals="b", within=0.03).outcome == "met"
    one = found("a", "loss", arms, equals="b", within=0.03)
    assert one.outcome == "met"
    differences = [y - x for x, y in zip(arms["a"], arms["b"], strict=True)]
    half = stats.t.ppf(0.95, 3) * stats.tstd(differences) / 2
    assert one.statistics["high_90"] == pytest.approx(sum(differences) / 4 + half)
    assert "two one-sided 5 % tests" in one.numbers


def test_too_few_seeds_leave_it_undecided_and_say_the_power_and_how_many_it_takes():
    arms = {"a": (0.95, 0.90, 0.97), "b": (0.92, 0.96, 0.95)}
    one = found("a", "top1", arms, equals="b", within=0.03)
    assert one.outcome == "undecided"
    assert f"{100 * one.statistics['power']:.0f} %" in one.numbers
    assert f"{one.statistics['seeds_for_80']} pairs would reach 80 %" in one.numbers


def test_a_difference_beyond_the_margin_is_not_the_same_by_what_is_over():
    one = found("bad", "top1", BOTH, equals="good", within=0.03)
    assert one.outcome == "not met"
    assert one.statistics["off"] == pytest.approx(0.96 - 0.25 / 3 - 0.03)


def test_seeds_that_agree_are_compared_with_a_number():
    same = {"a": [measures(seed, skip_rate=1.0) for seed in range(3)]}
    assert outcome("a", "skip_rate", same, above=0.95) == "met"
    assert outcome("a", "skip_rate", same, above=1) == "undecided"
    assert outcome("a", "skip_rate", same, below=0.5) == "not met"
    assert outcome("a", "skip_rate", same, equals=1) == "met"
    beyond = judge_expectation(Expectation("a", "skip_rate", equals=0.9, within=0.05), same)
    assert (beyond.outcome, beyond.statistics["off"]) == ("not met", pytest.approx(0.05))
    assert "the difference of skip_rate from 0.9 is +0.1" in beyond.numbers
    assert "all runs have the same value" in beyond.numbers


def test_without_a_margin_all_seeds_have_to_be_equal():
    one = found("a", "top1", {"a": (0.95, 0.96), "b": (0.95, 0.97)}, equals="b")
    assert one.outcome == "not met"
    assert "the values differ by -0.005 on average" in one.numbers
    equal = found("a", "top1", {"a": (0.95, 0.96), "b": (0.95, 0.96)}, equals="b")
    assert (equal.outcome, equal.numbers) == ("met", "a 0.955, b 0.955: the same at all 2 seeds")
    assert found("a", "top1", {"a": (0.95,), "b": (0.95,)}, equals="b").outcome == "undecided"


def test_a_number_is_compared_with_the_mean_of_the_seeds():
    arms = {"a": (0.95, 0.96, 0.97)}
    assert found("a", "top1", arms, above=0.9).outcome == "met"
    interval = stats.ttest_1samp((0.95, 0.96, 0.97), 0.9).confidence_interval(0.95)
    assert found("a", "loss", arms, below=0.1).statistics["low"] == pytest.approx(0.9 - interval.high)
    assert found("a", "top1", arms, below=0.9).outcome == "not met"
    assert found("a", "top1", arms, above=0.99, by=0.5).outcome == "not met"


def test_a_factor_multiplies_the_other_side():
    slow = [measures(seed, terms_per_second=value) for seed, value in enumerate((100.0, 110.0, 105.0))]
    runs = {"slow": slow, "fast": [measures(run.seed, terms_per_second=2 * run.terms_per_second) for run in slow]}
    speed = Expectation("fast", "terms_per_second", above="slow", times=1.9)
    assert speed.text == "fast terms_per_second above 1.9 times slow"
    assert judge_expectation(speed, runs).outcome == "met"
    assert outcome("slow", "terms_per_second", runs, below="fast", times=0.6) == "met"
    assert outcome("fast", "terms_per_second", runs, above="slow", times=4) == "not met"


SIX = {"good": (0.96, 0.95, 0.97, 0.96, 0.95, 0.97), "bad": (None,) * 6}


def test_an_arm_six_of_whose_runs_failed_is_worse():
    runs = runs_of(**SIX)
    assert outcome("bad", "top1", runs, below="good", by=0.5) == "met"
    assert outcome("good", "top1", runs, above="bad", by=0.5) == "met"
    assert outcome("bad", "loss", runs, above="good") == "met"
    assert outcome("bad", "top1", runs, above="good") == "not met"
    assert outcome("bad", "top1", runs, equals="good", within=0.5) == "not met"
    assert outcome("bad", "top1", runs, equals="good") == "not met"
    assert outcome("bad", "loss", runs, below="good") == "not met"
    assert found("a", "top1", {"a": (None,) * 6, "b": (None,) * 6}, below="b").outcome == "undecided"
    assert "6 of 6 runs failed numerically" in found("bad", "top1", SIX, below="good").numbers
    assert found("good", "top1", SIX, above="bad").numbers.startswith("good 0.96, bad has no value")


def test_one_failed_run_leaves_an_arm_neither_better_nor_the_same():
    arms = {"good": (*GOOD, 0.95), "lost": (*GOOD, None), "bad": (*BAD, None), "low": (*BAD, 0.08)}
    same = found("lost", "top1", arms, equals="good", within=0.1)
    assert same.outcome == found("lost", "top1", arms, above="low").outcome == "undecided"
    assert "seed 3 failed numerically" in same.numbers
    worse = found("bad", "top1", arms, below="good", by=0.5)
    assert (worse.outcome, worse.statistics["n"]) == ("met", 3)
    assert found("good", "top1", arms, above="bad", by=0.5).outcome == "met"


def test_a_failed_run_still_says_how_many_steps_were_skipped_and_that_it_failed():
    runs = {"bad": [failing(measures(seed, skip_rate=1.0)) for seed in range(3)]}
    assert outcome("bad", "skip_rate", runs, above=0.95) == "met"
    assert outcome("bad", "failed", runs, equals=1) == "met"


@each(("measure", "relation"), [("train_seconds", {"below": 100}), ("energy", {"above": "good"})])
def test_what_a_whole_run_takes_is_not_decided_by_runs_that_failed(measure, relation):
    runs = {
        "bad": [failing(measures(seed, energy=5.0)) for seed in range(3)],
        "good": [measures(seed, energy=9.0) for seed in range(3)],
    }
    one = judge_expectation(Expectation("bad", measure, **relation), runs)
    assert (one.outcome, one.numbers) == ("undecided", f"{measure} of bad is not recorded for seeds 0, 1, 2")


def test_a_run_that_ended_with_a_metric_that_is_not_finite_failed():
    runs = {"bad": [measures(seed, math.nan) for seed in range(6)], "good": [measures(seed) for seed in range(6)]}
    assert outcome("bad", "failed", runs, above="good") == "met"
    assert outcome("bad", "top1", runs, below="good") == "met"


def test_measures_that_there_are_not_are_named_with_a_guess():
    named = [Expectation("a", name, above=0) for name in ("skiprate", "top5", "failed", "skiprate")]
    problems = unknown_measures(named, runs_of(a=GOOD))
    assert [(problem.what, problem.hint) for problem in problems] == [
        ("expect: no run has a measure 'skiprate'", "did you mean skip_rate?"),
        ("expect: no run has a measure 'top5'", "did you mean top1?"),
    ]
    assert unknown_measures(named, {}) == []


@each("measure", sorted(MEASURES))
def test_every_measure_can_be_asked_of_a_run(measure):
    value = MEASURES[measure](measures(0))
    assert value is None or math.isfinite(value)


def test_two_seeds_that_differ_by_the_same_whole_samples_decide_nothing():
    arms = {"a": (0.95, 0.96), "b": (0.9425, 0.9525)}  # three of 400 samples
    below = found("b", "top1", arms, below="a")
    assert below.outcome == "undecided"
    half = stats.t.ppf(0.975, 1) / 400 / math.sqrt(6) / math.sqrt(2)
    assert below.statistics["high"] == pytest.approx(half - 0.0075)
    same = found("a", "top1", arms, equals="b", within=0.008)
    assert same.outcome == "undecided"
    assert same.statistics["power"] < 0.9


def test_a_number_is_not_rounded_and_a_metric_compared_with_it_is():
    one = found("a", "top1", {"a": (0.95, 0.95, 0.95)}, below=0.96)
    half = stats.t.ppf(0.975, 2) / 400 / math.sqrt(12) / math.sqrt(3)
    assert (one.outcome, one.statistics["high"]) == ("met", pytest.approx(half - 0.01))


def test_equal_losses_are_compared_as_exactly_as_counts():
    one = found("a", "loss", {"a": (0.95, 0.96), "b": (0.95, 0.96)}, equals="b", within=0.001)
    assert one.outcome == "met"
    assert "bitwise equal" in one.numbers
