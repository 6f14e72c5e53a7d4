"""Judgement of a statement by numbers: met, not met by an amount, or undecided with too few seeds."""

from __future__ import annotations

import math

import pytest
from comparison.fake_runs import failed as failing
from comparison.fake_runs import measures
from loops import each
from scipy import stats

from mptrain.recipe.expectations import MEASURES, judge, unknown_measures
from mptrain.recipe.recipe import Expectation
from mptrain.recipe.statements import read_statement


def expectation(text):
    return Expectation(text, read_statement(text))


def runs_of(**arms):
    """Return the runs of arms with one top-1 value for each seed; None is a run that failed numerically."""
    return {
        name: [
            measures(seed, top1) if top1 is not None else failing(measures(seed, 0.1))
            for seed, top1 in enumerate(values)
        ]
        for name, values in arms.items()
    }


def found(text, arithmetic=None, **arms):
    return judge(expectation(text), runs_of(**arms), arithmetic or {})


GOOD, BAD = (0.96, 0.95, 0.97), (0.08, 0.09, 0.08)


def test_an_arm_that_is_far_below_another_is_below_it():
    one = found("bad.top1 < good.top1 by 0.5", good=GOOD, bad=BAD)
    assert one.outcome == "met"
    assert one.text == "bad.top1 < good.top1 by 0.5"


def test_the_interval_is_that_of_the_paired_t_test():
    values, others = (0.90, 0.93, 0.91, 0.95), (0.96, 0.95, 0.97, 0.96)
    one = found("a.loss < b.loss", a=[1 - value for value in values], b=[1 - value for value in others])
    interval = stats.ttest_rel(values, others).confidence_interval(0.95)
    assert one.statistics["low"] == pytest.approx(interval.low)
    assert one.statistics["high"] == pytest.approx(interval.high)
    assert one.statistics["n"] == 4


def test_the_wrong_side_is_not_met_and_says_by_how_much():
    one = found("good.top1 < bad.top1 by 0.5", good=GOOD, bad=BAD)
    assert one.outcome == "not met"
    assert one.statistics["off"] == pytest.approx(0.5 + 0.96 - 0.25 / 3)
    assert "not below -0.5: off by 1.377" in one.numbers


def test_an_interval_over_the_bound_decides_nothing():
    one = found("a.top1 < b.top1", a=(0.90, 0.97), b=(0.95, 0.96))
    assert one.outcome == "undecided"
    assert "does not decide whether it is below" in one.numbers


def test_above_is_the_mirror_of_below():
    below = found("bad.top1 < good.top1 by 0.5", good=GOOD, bad=BAD)
    above = found("good.top1 > bad.top1 by 0.5", good=GOOD, bad=BAD)
    assert above.outcome == below.outcome == "met"
    assert above.statistics["low"] == pytest.approx(-below.statistics["high"])


def test_one_seed_alone_decides_nothing():
    for text in ("a.top1 < b.top1", "a.top1 = b.top1 within 0.5", "a.skip_rate = 0 within 0"):
        one = found(text, a=(0.1,), b=(0.9,))
        assert one.outcome == "undecided"
        assert "at least two seeds are needed" in one.numbers


def test_arms_with_nearly_the_same_values_are_the_same():
    a, b = (0.950, 0.955, 0.960, 0.952), (0.951, 0.954, 0.961, 0.951)
    assert found("a.top1 = b.top1 within 0.03", a=a, b=b).outcome == "met"
    one = found("a.loss = b.loss within 0.03", a=a, b=b)
    assert one.outcome == "met"
    differences = [y - x for x, y in zip(a, b, strict=True)]
    half = stats.t.ppf(0.95, 3) * stats.tstd(differences) / 2
    assert one.statistics["high_90"] == pytest.approx(sum(differences) / 4 + half)


def test_too_few_seeds_leave_it_undecided_and_say_the_power_and_how_many_it_takes():
    one = found("a.top1 = b.top1 within 0.03", a=(0.95, 0.90, 0.97), b=(0.92, 0.96, 0.95))
    assert one.outcome == "undecided"
    assert f"{100 * one.statistics['power']:.0f} %" in one.numbers
    assert f"{one.statistics['seeds_for_80']} seeds would reach 80 %" in one.numbers


def test_a_difference_beyond_the_margin_is_not_the_same_by_what_is_over():
    one = found("bad.top1 = good.top1 within 0.03", good=GOOD, bad=BAD)
    assert one.outcome == "not met"
    assert one.statistics["off"] == pytest.approx(0.96 - 0.25 / 3 - 0.03)


def test_seeds_that_agree_are_compared_exactly():
    same = {"a": [measures(seed, skip_rate=1.0) for seed in range(3)]}
    assert judge(expectation("a.skip_rate > 0.95"), same, {}).outcome == "met"
    assert judge(expectation("a.skip_rate > 1"), same, {}).outcome == "not met"
    assert judge(expectation("a.skip_rate = 1 within 0"), same, {}).outcome == "met"
    beyond = judge(expectation("a.skip_rate = 0.9 within 0.05"), same, {})
    assert (beyond.outcome, beyond.statistics["off"]) == ("not met", pytest.approx(0.05))
    assert "the same for all 3 seeds" in beyond.numbers


def test_within_0_means_equal_at_every_seed():
    one = found("a.top1 = b.top1 within 0", a=(0.95, 0.96), b=(0.95, 0.97))
    assert one.outcome == "not met"
    assert "off by 0.01 at seed 1" in one.numbers
    assert found("a.top1 = b.top1 within 0", a=(0.95, 0.96), b=(0.95, 0.96)).outcome == "met"


def test_a_number_is_compared_with_the_mean_of_the_seeds():
    one = found("a.top1 > 0.9", a=(0.95, 0.96, 0.97))
    assert one.outcome == "met"
    interval = stats.ttest_1samp((0.95, 0.96, 0.97), 0.9).confidence_interval(0.95)
    loss = found("a.loss < 0.1", a=(0.95, 0.96, 0.97))
    assert f"{1 - interval.high:.4g} to {1 - interval.low:.4g}" in loss.numbers
    assert found("a.top1 < 0.9", a=(0.95, 0.96, 0.97)).outcome == "not met"
    assert found("a.top1 > 0.99 by 0.5", a=(0.95, 0.96, 0.97)).outcome == "not met"


def test_ratios_are_compared_on_a_logarithmic_scale():
    slow = [measures(seed, terms_per_second=value) for seed, value in enumerate((100.0, 110.0, 105.0))]
    fast = [measures(seed, terms_per_second=2 * run.terms_per_second) for seed, run in enumerate(slow)]
    runs = {"slow": slow, "fast": fast}
    assert judge(expectation("fast.terms_per_second > slow.terms_per_second by 1.9x"), runs, {}).outcome == "met"
    assert judge(expectation("slow.terms_per_second < fast.terms_per_second by 1.9x"), runs, {}).outcome == "met"
    assert judge(expectation("slow.terms_per_second = fast.terms_per_second within 2.1x"), runs, {}).outcome == "met"
    one = judge(expectation("fast.terms_per_second > slow.terms_per_second by 4x"), runs, {})
    assert one.outcome == "not met"
    assert "ratio 2x" in one.numbers
    assert "off by 2x" in one.numbers


def test_an_arm_all_of_whose_runs_failed_is_worse_than_anything():
    arms = {"good": GOOD, "bad": (None, None, None)}
    assert found("bad.top1 < good.top1 by 0.5", **arms).outcome == "met"
    assert found("good.top1 > bad.top1 by 0.5", **arms).outcome == "met"
    assert found("bad.loss > good.loss", **arms).outcome == "met"
    assert "all 3 runs of bad failed numerically" in found("bad.top1 < good.top1", **arms).numbers


def test_an_arm_all_of_whose_runs_failed_is_neither_better_nor_the_same():
    arms = {"good": GOOD, "bad": (None, None, None)}
    assert found("bad.top1 > good.top1", **arms).outcome == "not met"
    assert found("bad.top1 = good.top1 within 0.5", **arms).outcome == "not met"
    assert found("bad.loss < good.loss", **arms).outcome == "not met"
    assert found("bad.top1 > 0.5", **arms).outcome == "not met"


def test_where_both_arms_failed_nothing_is_decided():
    assert found("a.top1 < b.top1", a=(None, None), b=(None, None)).outcome == "undecided"


def test_one_failed_run_is_left_out_and_leaves_a_metric_undecided():
    one = found("bad.top1 < good.top1 by 0.5", good=(*GOOD, 0.95), bad=(*BAD, None))
    assert one.outcome == "undecided"
    assert one.numbers.startswith("seed 3 of bad failed numerically; without these seeds: ")
    assert one.statistics["n"] == 3


def test_a_failed_run_still_says_how_many_steps_were_skipped_and_that_it_failed():
    runs = {"bad": [failing(measures(seed, skip_rate=1.0)) for seed in range(3)]}
    assert judge(expectation("bad.skip_rate > 0.95"), runs, {}).outcome == "met"
    assert judge(expectation("bad.failed = 1 within 0"), runs, {}).outcome == "met"


def test_what_a_whole_run_takes_is_not_decided_by_runs_that_failed():
    runs = {
        "bad": [failing(measures(seed, energy=5.0)) for seed in range(3)],
        "good": [measures(seed, energy=9.0) for seed in range(3)],
    }
    for text in (
        "bad.train_seconds < 100",
        "bad.energy > good.energy",
        "good.energy < bad.energy",
        "bad.energy = good.energy",
    ):
        one = judge(expectation(text), runs, {})
        assert one.outcome == "undecided"
        assert "all 3 runs of bad failed numerically, so there is no" in one.numbers


def test_a_run_that_ended_with_a_metric_that_is_not_finite_failed():
    runs = {"bad": [measures(seed, math.nan) for seed in range(2)], "good": [measures(seed) for seed in range(2)]}
    assert judge(expectation("bad.failed > good.failed"), runs, {}).outcome == "met"
    assert judge(expectation("bad.top1 < good.top1"), runs, {}).outcome == "met"


def test_what_is_not_on_record_is_undecided():
    one = found("a.energy < b.energy", a=(0.9, 0.9), b=(0.9, 0.9))
    assert one.outcome == "undecided"
    assert "a.energy is not recorded for seeds 0, 1" in one.numbers


def test_arithmetic_is_compared_exactly_and_needs_no_seeds():
    numbers = {"sum": {"value": 2048.0, "truth": 5002.7, "overflow": math.inf, "lost": math.nan}}

    def says(text):
        return judge(expectation(text), {}, numbers)

    assert says("sum.value = 2048 within 0").outcome == "met"
    assert says("sum.overflow = inf within 0").outcome == "met"
    assert says("sum.value < sum.truth by 2000").outcome == "met"
    assert says("sum.truth > sum.value by 2x").outcome == "met"
    assert says("sum.value = sum.truth within 3x").outcome == "met"
    off = says("sum.value = 2049 within 0.5")
    assert (off.outcome, off.statistics["off"]) == ("not met", 0.5)
    assert says("sum.truth < sum.value").outcome == "not met"
    assert says("sum.value = inf within 0").outcome == "not met"
    assert says("sum.lost = 0 within 5").outcome == "not met"
    assert says("sum.lost < 5").outcome == "not met"
    assert says("sum.overflow > sum.value by 2x").outcome == "not met"


def test_an_arm_is_compared_with_arithmetic_as_with_a_number():
    assert found("a.top1 < sum.value", {"sum": {"value": 1.5}}, a=GOOD).outcome == "met"


def test_measures_that_there_are_not_are_named_with_a_guess():
    runs = runs_of(a=GOOD, b=BAD)
    lines = ["a.skiprate > 0", "a.top1 < b.top5", "sum.valu = 1 within 0", "a.failed = 0 within 0"]
    problems = unknown_measures([expectation(line) for line in lines], runs, {"sum": {"value": 1.0}})
    assert [problem.what for problem in problems] == [
        "expect: a has no measure 'skiprate'",
        "expect: b has no measure 'top5'",
        "expect: sum has no measure 'valu'",
    ]
    assert [problem.hint for problem in problems] == [
        "did you mean a.skip_rate?",
        "did you mean b.top1?",
        "did you mean sum.value?",
    ]


@each("measure", sorted(MEASURES))
def test_every_measure_can_be_asked_of_a_run(measure):
    value = MEASURES[measure](measures(0))
    assert value is None or math.isfinite(value)


def test_equal_decimals_leave_no_difference_to_show():
    one = found("a.top1 = b.top1 within 0.05", a=(0.3, 0.1, 0.2), b=(0.1, 0.2, 0.3))
    assert "difference +0," in one.numbers


def test_two_seeds_that_differ_by_the_same_whole_samples_decide_nothing():
    a, b = (0.95, 0.96), (0.9425, 0.9525)  # three of 400 samples
    below = found("b.top1 < a.top1", a=a, b=b)
    assert below.outcome == "undecided"
    half = stats.t.ppf(0.975, 1) / 400 / math.sqrt(6) / math.sqrt(2)
    assert below.statistics["high"] == pytest.approx(half - 0.0075)
    same = found("a.top1 = b.top1 within 0.008", a=a, b=b)
    assert same.outcome == "undecided"
    assert same.statistics["power"] < 0.9
    ratio = found("a.top1 = b.top1 within 1.01x", a=(0.95, 0.95), b=(0.95, 0.95))
    assert ratio.statistics["high"] == pytest.approx(half / 0.95)


def test_a_number_is_not_rounded_and_a_metric_compared_with_it_is():
    one = found("a.top1 < 0.96", a=(0.95, 0.95, 0.95))
    half = stats.t.ppf(0.975, 2) / 400 / math.sqrt(12) / math.sqrt(3)
    assert (one.outcome, one.statistics["high"]) == ("met", pytest.approx(half - 0.01))


def test_equal_losses_are_compared_as_exactly_as_counts():
    one = found("a.loss = b.loss within 0.001", a=(0.95, 0.96), b=(0.95, 0.96))
    assert one.outcome == "met"
    assert "the same for all 2 seeds" in one.numbers
