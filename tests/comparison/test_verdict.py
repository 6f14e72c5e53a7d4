"""Verdicts: which word the numbers lead to, and what the sentence says."""

from __future__ import annotations

import pytest
from scipy import stats

from mptrain.comparison.statistics import equivalence, mean_interval, rounding_spread
from mptrain.comparison.verdict import PairedEvidence, Sample, decide, pair, sign_test


def verdict(differences=(), higher_is_better=True, margin=0.01, rounding=0.0, **failures):
    return decide(
        PairedEvidence(
            metric="top1",
            higher_is_better=higher_is_better,
            difference=mean_interval(differences, rounding=rounding) if differences else None,
            equivalence=equivalence(differences, margin, rounding=rounding) if len(differences) > 1 else None,
            **failures,
        )
    )


def test_differences_well_inside_the_margin_are_equivalent():
    found = verdict([0.001, -0.002, 0.001, 0.0])
    assert found.word == "equivalent"
    assert "±0.01" in found.why
    assert "4 pairs" in found.why


def test_a_difference_that_is_not_zero_but_inside_the_margin_is_equivalent_and_said_not_to_be_zero():
    found = verdict([-0.0021, -0.0020, -0.0019, -0.0020])
    assert found.word == "equivalent"
    assert "excludes zero" in found.why


@pytest.mark.parametrize(("sign", "higher", "word"), [(1, True, "better"), (-1, True, "worse"), (1, False, "worse")])
def test_a_difference_beyond_the_margin_is_better_or_worse_by_the_metrics_direction(sign, higher, word):
    found = verdict([sign * 0.05, sign * 0.06, sign * 0.055], higher)
    assert found.word == word
    assert f"{sign * 0.055:+.3g}" in found.why


def test_a_difference_whose_size_against_the_margin_is_open_says_so():
    found = verdict([-0.004, -0.0125, -0.007, -0.009, -0.0115])
    assert found.word == "worse"
    assert "the true difference may be within the margin of ±0.01" in found.why


def test_what_is_undecided_says_the_power_and_the_pairs_it_would_take():
    found = verdict([0.02, -0.015, 0.01])
    assert found.word == "undecided"
    power = round(100 * equivalence([0.02, -0.015, 0.01], 0.01).power)
    assert f"equal arms equivalent is {power} %" in found.why
    assert f"{equivalence([0.02, -0.015, 0.01], 0.01).pairs_for_80} pairs would reach 80 %" in found.why
    assert "even 1,000 pairs" in verdict([0.8, -0.9, 0.7]).why


def test_no_verdict_comes_from_one_seed():
    assert verdict([0.5]).word == "undecided"
    assert "two seeds" in verdict([0.5]).why
    assert verdict().word == "undecided"
    assert "no pair" in verdict().why


def test_one_pair_is_too_few_also_with_tests_of_it():
    one = PairedEvidence("top1", True, mean_interval([0.5]), equivalence([0.5], 0.01))
    assert "two seeds" in decide(one).why


def test_exact_values_without_spread_are_said_to_be_of_the_same_computation():
    found = verdict([0.0, 0.0])
    assert found.word == "equivalent"
    assert "bitwise equal, so both arms probably ran the same computation" in found.why
    apart = verdict([-0.02, -0.02])
    assert apart.word == "worse"
    assert "true spread is unknown" in apart.why


def test_two_equal_differences_of_rounded_values_decide_nothing():
    rounding = rounding_spread(1 / 397, 1 / 397)
    assert verdict([-3 / 397, -3 / 397], rounding=rounding).word == "undecided"
    assert verdict([0.0] * 2, margin=0.004, rounding=rounding).word == "undecided"
    found = verdict([0.0] * 8, rounding=rounding)
    assert found.word == "equivalent"
    assert "the CI reflects rounding to whole samples" in found.why
    assert "bitwise" not in found.why


def test_eight_of_eight_failed_runs_are_worse():
    found = verdict(failed=tuple(range(8)), shared=tuple(range(8)))
    assert found.word == "worse"
    assert "8 of 8 runs failed numerically" in found.why
    assert f"p = {stats.binomtest(8, 8).pvalue:.2g}" in found.why


def test_five_of_five_failed_runs_are_not_enough_and_six_are():
    five = verdict(failed=tuple(range(5)), shared=tuple(range(5)))
    assert five.word == "undecided"
    assert "seeds 0, 1, 2, 3, 4 failed" in five.why
    assert "6 such pairs" in five.why
    assert verdict(failed=tuple(range(6)), shared=tuple(range(6))).word == "worse"


def test_an_arm_with_a_failed_run_is_neither_better_nor_equivalent():
    for differences in ([0.0, 0.001, 0.0], [0.1, 0.11, 0.1]):
        found = verdict(differences, failed=(3,), shared=(0, 1, 2, 3))
        assert found.word == "undecided"
        assert "seed 3 failed" in found.why
    unpaired = verdict([0.0, 0.001], failed=(7,), shared=(0, 1))
    assert unpaired.word == "undecided"
    assert "cannot be paired" in unpaired.why


def test_an_arm_with_a_failed_run_can_be_worse_by_the_others():
    found = verdict([-0.1, -0.11, -0.1], failed=(3,), shared=(0, 1, 2, 3))
    assert found.word == "worse"
    assert "also, seed 3" in found.why


def test_failures_of_both_arms_do_not_count_against_one():
    seeds = tuple(range(8))
    found = verdict(failed=seeds, reference_failed=seeds, shared=seeds)
    assert found.word == "undecided"
    assert "failed numerically in both arms" in found.why


def test_failures_of_the_reference_alone_are_named():
    seeds = tuple(range(8))
    found = verdict(reference_failed=seeds, shared=seeds)
    assert found.word == "undecided"
    assert "of the reference failed numerically while the arm did not" in found.why
    assert "no pair of runs is complete" in found.why


def test_failures_of_the_reference_prevent_better_and_equivalent():
    seeds = tuple(range(8))
    for differences in ([0.0, 0.001, 0.0], [0.1, 0.11, 0.1]):
        found = verdict(differences, reference_failed=(0, 1, 2, 3, 4), shared=seeds, seeds=seeds)
        assert found.word == "undecided"
        assert "seeds 0, 1, 2, 3, 4 of the reference failed numerically" in found.why
        assert "3 of 8 pairs are complete" in found.why
    assert "did not end" not in found.why


def test_a_failure_of_the_reference_without_a_partner_counts_too():
    found = verdict([0.0, 0.001], reference_failed=(7,), shared=(0, 1), seeds=(0, 1, 7))
    assert found.word == "undecided"
    assert "seed 7 of the reference failed numerically and cannot be paired with a run of the arm" in found.why


def test_worse_by_the_mean_says_which_runs_of_the_reference_failed():
    found = verdict([-0.1, -0.11, -0.1], reference_failed=(3,), shared=(0, 1, 2, 3), seeds=(0, 1, 2, 3))
    assert found.word == "worse"
    assert "also, seed 3 of the reference failed" in found.why
    assert "3 of 4 pairs are complete" in found.why


def test_runs_that_did_not_end_are_named_whatever_the_word():
    for differences, word in (([0.0, 0.001, 0.0], "equivalent"), ([0.1, 0.11, 0.1], "better"), ([], "undecided")):
        shared = tuple(range(len(differences)))
        found = verdict(differences, shared=shared, seeds=(*shared, 5, 6))
        assert found.word == word
        assert "seeds 5, 6 did not finish in both arms" in found.why
    assert "0 of 2 pairs are complete" in found.why
    assert "complete" not in verdict([0.0, 0.001], shared=(0, 1), seeds=(0, 1)).why


def test_the_sign_test_counts_only_pairs_that_ended_differently():
    assert sign_test(0, 0) == 1.0
    assert sign_test(6, 0) == pytest.approx(2 / 64)
    assert sign_test(7, 2) == pytest.approx(stats.binomtest(7, 9).pvalue)


def sample(*values, **ends):
    return Sample(dict(enumerate(values)), **ends)


def test_a_bound_takes_the_place_of_zero():
    arm, reference = sample(0.1, 0.11, 0.1), sample(0.9, 0.92, 0.9)
    found = decide(pair("top1", True, arm, reference, bound=-0.5))
    assert (found.word, "excludes -0.5 (3 pairs)" in found.why) == ("worse", True)
    assert decide(pair("top1", True, arm, reference, bound=-0.9)).word == "better"
    assert decide(pair("loss", False, arm, reference, bound=-0.9)).word == "worse"
    between = decide(pair("top1", True, arm, reference, bound=-0.805))
    assert (between.word, "includes -0.805" in between.why) == ("undecided", True)


def test_a_number_takes_the_place_of_the_reference():
    found = decide(pair("skip_rate", True, sample(0.98, 0.98), 0.95))
    assert found.word == "better"
    assert "the difference of skip_rate from 0.95 is +0.03" in found.why
    assert found.why.endswith("excludes zero (2 runs); all runs have the same value")
    assert decide(pair("skip_rate", True, sample(0.0, 0.0), 0.0, margin=0.01)).word == "equivalent"


def test_seeds_without_a_partner_are_not_paired():
    arm, reference = sample(0.5, 0.6, failed=(3,), missing=(2,)), sample(0.4, 0.5, 0.6, failed=(4,))
    found = pair("top1", True, arm, reference)
    assert (found.difference.n, found.shared, found.seeds) == (2, (0, 1), (0, 1, 2, 3, 4))
