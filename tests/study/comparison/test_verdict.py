"""Verdicts: which word the numbers lead to, and what the sentence says."""

from __future__ import annotations

import pytest
from scipy import stats

from mptrain.study.comparison.statistics import equivalence, mean_interval, rounding_spread
from mptrain.study.comparison.verdict import PairedEvidence, Sample, decide, pair, sign_test
from tests.loops import each


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


ROUNDING = rounding_spread(1 / 397, 1 / 397)


@each(
    ("differences", "more", "word", "named"),
    [
        ([0.001, -0.002, 0.001, 0.0], {}, "equivalent", ["±0.01", "4 pairs"]),
        ([-0.0021, -0.0020, -0.0019, -0.0020], {}, "equivalent", ["excludes zero"]),
        ([0.05, 0.06, 0.055], {}, "better", ["+0.055"]),
        ([-0.05, -0.06, -0.055], {}, "worse", ["-0.055"]),
        ([0.05, 0.06, 0.055], {"higher_is_better": False}, "worse", ["+0.055"]),
        ([-0.004, -0.0125, -0.007, -0.009, -0.0115], {}, "worse", ["may be within the margin of ±0.01"]),
        ([0.5], {}, "undecided", ["two seeds"]),
        ([], {}, "undecided", ["no pair"]),
        ([0.8, -0.9, 0.7], {}, "undecided", ["even 1,000 pairs"]),
        ([0.0, 0.0], {}, "equivalent", ["bitwise equal"]),
        ([-0.02, -0.02], {}, "worse", ["true spread is unknown"]),
        ([-3 / 397, -3 / 397], {"rounding": ROUNDING}, "undecided", []),
        ([0.0] * 2, {"rounding": ROUNDING, "margin": 0.004}, "undecided", []),
        ([0.0] * 8, {"rounding": ROUNDING}, "equivalent", ["reflects the rounding of values"]),
    ],
)
def test_differences_decide_by_the_margin_and_the_direction(differences, more, word, named):
    found = verdict(differences, **more)
    assert found.word == word
    assert all(one in found.why for one in named)
    assert ("bitwise" in found.why) == (named == ["bitwise equal"])


def test_one_pair_is_too_few_also_with_tests_of_it():
    one = PairedEvidence("top1", True, mean_interval([0.5]), equivalence([0.5], 0.01))
    assert "two seeds" in decide(one).why


def test_what_is_undecided_says_the_power_and_the_pairs_it_would_take():
    values = [0.02, -0.015, 0.01]
    found = verdict(values)
    assert found.word == "undecided"
    assert f"equal arms equivalent is {round(100 * equivalence(values, 0.01).power)} %" in found.why
    assert f"{equivalence(values, 0.01).pairs_for_80} pairs would reach 80 %" in found.why


ALL, SAME, APART, LOWER = tuple(range(8)), [0.0, 0.001, 0.0], [0.1, 0.11, 0.1], [-0.1, -0.11, -0.1]
FIVE = {"reference_failed": (0, 1, 2, 3, 4), "shared": ALL, "seeds": ALL}
ONE_OF_THEM = {"reference_failed": (3,), "shared": (0, 1, 2, 3), "seeds": (0, 1, 2, 3)}


@each(
    ("differences", "ends", "word", "named"),
    [
        ([], {"failed": ALL, "shared": ALL}, "worse", ["8 of 8 runs failed numerically", f"p = {stats.binomtest(8, 8).pvalue:.2g}"]),
        ([], {"failed": ALL[:6], "shared": ALL[:6]}, "worse", []),
        ([], {"failed": ALL[:5], "shared": ALL[:5]}, "undecided", ["seeds 0, 1, 2, 3, 4 failed", "6 such pairs"]),
        *((values, {"failed": (3,), "shared": (0, 1, 2, 3)}, "undecided", ["seed 3 failed"]) for values in (SAME, APART)),
        ([0.0, 0.001], {"failed": (7,), "shared": (0, 1)}, "undecided", ["cannot be paired"]),
        (LOWER, {"failed": (3,), "shared": (0, 1, 2, 3)}, "worse", ["also, seed 3"]),
        ([], {"failed": ALL, "reference_failed": ALL, "shared": ALL}, "undecided", ["failed numerically in both arms"]),
        ([], {"reference_failed": ALL, "shared": ALL}, "undecided", ["of the reference failed numerically", "no pair of runs is complete"]),
        *((values, FIVE, "undecided", ["seeds 0, 1, 2, 3, 4 of the reference failed", "3 of 8 pairs are complete"]) for values in (SAME, APART)),
        ([0.0, 0.001], {"reference_failed": (7,), "shared": (0, 1), "seeds": (0, 1, 7)}, "undecided", ["seed 7 of the reference", "cannot be paired"]),
        (LOWER, ONE_OF_THEM, "worse", ["also, seed 3 of the reference failed", "3 of 4 pairs are complete"]),
    ],
)  # fmt: skip
def test_failed_runs_of_either_arm_decide_or_prevent_a_verdict(differences, ends, word, named):
    found = verdict(differences, **ends)
    assert found.word == word
    assert all(one in found.why for one in named)
    assert "did not end" not in found.why


def test_runs_that_did_not_end_are_named_whatever_the_word():
    for differences, word in (([0.0, 0.001, 0.0], "equivalent"), ([0.1, 0.11, 0.1], "better"), ([], "undecided")):
        shared = tuple(range(len(differences)))
        found = verdict(differences, shared=shared, seeds=(*shared, 5, 6))
        assert found.word == word
        assert "seeds 5, 6 did not finish with the metric in both arms" in found.why
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
