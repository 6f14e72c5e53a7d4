"""Decides what the numbers of an arm say against the reference, in one word and one sentence.

Decides only: the numbers come from `mptrain.compare.statistics`. *Undecided* is an honest outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy import stats

from mptrain.compare.results import Equivalence, Interval, Verdict

#: Level of every test.
ALPHA = 0.05


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on.

    Attributes:
        metric: What is compared.
        higher_is_better: Its direction.
        margin: Of equivalence, in the metric's unit.
        difference: Arm minus reference over the complete pairs; None where there is none.
        equivalence: Of the same differences; None with fewer than two.
        failed: Seeds at which the arm failed numerically.
        reference_failed: Seeds at which the reference did.
        shared: Seeds at which both ended, in order or in numerical failure.
    """

    metric: str
    higher_is_better: bool
    margin: float
    difference: Interval | None
    equivalence: Equivalence | None
    failed: tuple[int, ...] = ()
    reference_failed: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


def decide(evidence: Evidence) -> Verdict:
    """The verdict on an arm that is not the reference.

    Numerical failures come first: where the reference's run of the same seed did not fail, an exact sign test (McNemar
    1947) of the pairs that ended differently says whether that is more than chance; an arm with failures is never better
    or equivalent. Then, from two complete pairs on, equivalence by two one-sided tests; then a difference, where
    its 95 % interval excludes zero; else nothing is decided.
    """
    if (p := _chance_of_failures(evidence)) < ALPHA:
        return Verdict("worse", _mostly_failed(evidence, p))
    failures = _failures(evidence, p)
    difference, equivalence = evidence.difference, evidence.equivalence
    if difference is None or equivalence is None or difference.n < 2:
        return Verdict("undecided", failures or _too_few(evidence))
    excludes_zero = difference.low > 0 or difference.high < 0
    inside = equivalence.p < equivalence.alpha
    worse = excludes_zero and not inside and (difference.mean > 0) != evidence.higher_is_better
    if worse:
        return Verdict("worse", _different(evidence, difference) + (f"; besides, {failures}" if failures else ""))
    if failures:
        return Verdict("undecided", f"{failures}; an arm with failed runs is not called better or equivalent")
    if inside:
        return Verdict("equivalent", _equivalent(evidence, difference, equivalence, excludes_zero))
    if excludes_zero:
        return Verdict("better", _different(evidence, difference))
    return Verdict("undecided", _undecided(difference, equivalence))


def sign_test(arm_only: int, reference_only: int) -> float:
    """Two-sided p value of an exact sign test of the pairs in which exactly one of the two failed (McNemar 1947)."""
    return float(stats.binomtest(arm_only, arm_only + reference_only).pvalue) if arm_only + reference_only else 1.0


def _split(evidence: Evidence) -> tuple[set[int], set[int], set[int]]:
    """Of the shared seeds: those at which the arm alone failed, the reference alone, and both."""
    shared = set(evidence.shared)
    failed, others = set(evidence.failed) & shared, set(evidence.reference_failed) & shared
    return failed - others, others - failed, failed & others


def _chance_of_failures(evidence: Evidence) -> float:
    """The p value of failing more often than the reference; 1 where the arm does not."""
    alone, others, _ = _split(evidence)
    return sign_test(len(alone), len(others)) if len(alone) > len(others) else 1.0


def _mostly_failed(evidence: Evidence, p: float) -> str:
    alone, _, _ = _split(evidence)
    return (
        f"{len(alone)} of {len(evidence.shared)} runs failed numerically where the reference's run of the same seed did "
        f"not (exact sign test, {_p(p)})"
    )


def _failures(evidence: Evidence, p: float) -> str:
    """What is to be said of failed runs that decide nothing; empty where there are none."""
    alone, _, both = _split(evidence)
    parts = []
    if alone:
        parts.append(
            f"{_seeds(alone)} failed numerically where the reference did not, which with {_pairs(len(evidence.shared))} "
            f"may be chance (exact sign test, {_p(p)}"
            + ("; 6 such pairs would decide it)" if len(alone) == len(evidence.shared) else ")")
        )
    if both:
        parts.append(f"{_seeds(both)} failed numerically in both arms")
    if unpaired := set(evidence.failed) - set(evidence.shared):
        parts.append(f"{_seeds(unpaired)} failed numerically and cannot be paired with a run of the reference")
    return "; ".join(parts)


def _too_few(evidence: Evidence) -> str:
    if evidence.reference_failed and evidence.difference is None:
        return (
            f"the reference itself failed numerically ({_seeds(set(evidence.reference_failed))}): there is nothing to "
            "compare with"
        )
    have = "no pair of runs is complete" if evidence.difference is None else "one pair of runs alone is complete"
    return f"{have}, and a verdict needs two seeds at least: how much seeds differ is unknown"


def _equivalent(evidence: Evidence, difference: Interval, found: Equivalence, excludes_zero: bool) -> str:
    why = (
        f"the difference in {evidence.metric}, {signed(difference.mean)} with a {percent(1 - 2 * found.alpha)} interval "
        f"from {signed(found.low)} to {signed(found.high)}, lies within the margin of ±{found.margin:.3g} (two one-sided "
        f"tests, {_p(found.p)}, {_pairs(difference.n)})"
    )
    if difference.spread == 0:
        return f"{why}; all pairs differ by exactly the same, so their true spread is not known"
    if excludes_zero:
        why += f"; it is not zero (95 % interval {_from_to(difference)}), but smaller than what counts"
    return why


def _different(evidence: Evidence, difference: Interval) -> str:
    why = (
        f"the difference in {evidence.metric}, {signed(difference.mean)} with a 95 % interval {_from_to(difference)}, is "
        f"not zero ({_pairs(difference.n)})"
    )
    if abs(difference.mean) < evidence.margin:
        why += f"; whether it is smaller than the margin of ±{evidence.margin:.3g} is not settled"
    return why


def _undecided(difference: Interval, found: Equivalence) -> str:
    power = f"arms without any difference are found equivalent with a probability (power) of {percent(found.power)}"
    if found.pairs_for_80 is None:
        more = "and even 1,000 pairs would not reach 80 %"
    elif found.pairs_for_80 > difference.n:
        more = f"and {found.pairs_for_80} pairs would reach 80 %"
    else:
        more = "so it is not for a lack of pairs"
    return (
        f"the difference, {signed(difference.mean)} with a 95 % interval {_from_to(difference)}, may be zero and may be "
        f"larger than the margin of ±{found.margin:.3g}; with {_pairs(difference.n)} of this spread, {power}, {more}"
    )


def signed(value: float) -> str:
    """A difference with its sign and three digits; what rounding made of zero is zero."""
    return f"{round(value, 12) + 0.0:+.3g}"


def percent(share: float) -> str:
    """A share from 0 to 1 in whole per cent."""
    return f"{100 * share:.0f} %"


def _from_to(interval: Interval) -> str:
    return f"from {signed(interval.low)} to {signed(interval.high)}"


def _p(value: float) -> str:
    return f"p = {value:.2g}" if value >= 1e-4 else "p < 0.0001"


def _seeds(seeds: set[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"
