"""Decides what the numbers of an arm say against the reference, in one word and one sentence.

Decides only: the numbers come from `mptrain.comparison.statistics`. *Undecided* is an honest outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy import stats

from mptrain.comparison.results import Equivalence, Interval, Verdict

#: Level of every test.
ALPHA = 0.05


@dataclass(frozen=True)
class PairedEvidence:
    """The numbers that a verdict rests on.

    Attributes:
        metric: What is compared.
        higher_is_better: Its direction.
        margin: Of equivalence, in the metric's unit.
        difference: Arm minus reference over the complete pairs; None where there is none.
        equivalence: Of the same differences; None with fewer than two.
        failed: Seeds at which the arm failed numerically.
        reference_failed: Seeds at which the reference did.
        shared: Seeds at which both ended, in order or in numerical failure.
        seeds: Seeds of either; those that are not shared had no run of one of them, or one that did not end.
    """

    metric: str
    higher_is_better: bool
    margin: float
    difference: Interval | None
    equivalence: Equivalence | None
    failed: tuple[int, ...] = ()
    reference_failed: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


def decide(evidence: PairedEvidence) -> Verdict:
    """The verdict on an arm that is not the reference.

    Numerical failures come first: where the reference's run of the same seed did not fail, an exact sign test (McNemar
    1947) of the pairs that ended differently says whether that is more than chance. Where runs of either failed, the others
    are a selection, and an arm is never better or equivalent. Then, from two complete pairs on, equivalence by two one-sided
    tests; then a difference, where its 95 % interval excludes zero; else nothing is decided. Whatever the word, the sentence
    says how many pairs are complete where not all of them are.
    """
    found = _decide(evidence)
    return Verdict(found.word, found.why + _incomplete(evidence))


def _decide(evidence: PairedEvidence) -> Verdict:
    shared = set(evidence.shared)
    failed, others_failed = set(evidence.failed) & shared, set(evidence.reference_failed) & shared
    alone, others = failed - others_failed, others_failed - failed
    p = sign_test(len(alone), len(others)) if len(alone) > len(others) else 1.0
    if p < ALPHA:
        why = (
            f"{len(alone)} of {len(shared)} runs failed numerically where the reference's run of the same seed did not"
        )
        return Verdict("worse", f"{why} (exact sign test, {_p(p)})")
    failures = _failures(evidence, alone, others, failed & others_failed, p)
    difference, equivalence = evidence.difference, evidence.equivalence
    if difference is None or equivalence is None or difference.n < 2:
        return Verdict("undecided", "; ".join(filter(None, (failures, _too_few(evidence)))))
    excludes_zero = difference.low > 0 or difference.high < 0
    inside = equivalence.p < equivalence.alpha
    worse = excludes_zero and not inside and (difference.mean > 0) != evidence.higher_is_better
    if worse:
        return Verdict("worse", _different(evidence, difference) + (f"; besides, {failures}" if failures else ""))
    if failures:
        return Verdict(
            "undecided", f"{failures}; where runs of either failed, an arm is not called better or equivalent"
        )
    if inside:
        return Verdict("equivalent", _equivalent(evidence, difference, equivalence, excludes_zero))
    if excludes_zero:
        return Verdict("better", _different(evidence, difference))
    return Verdict("undecided", _undecided(difference, equivalence))


def sign_test(arm_only: int, reference_only: int) -> float:
    """Two-sided p value of an exact sign test of the pairs in which exactly one of the two failed (McNemar 1947)."""
    return float(stats.binomtest(arm_only, arm_only + reference_only).pvalue) if arm_only + reference_only else 1.0


def _failures(evidence: PairedEvidence, alone: set[int], others: set[int], both: set[int], p: float) -> str:
    """Return what is to be said of failed runs that decide nothing; empty where there are none.

    Args:
        evidence: All of it.
        alone: Shared seeds at which only the arm failed.
        others: Those at which only the reference did.
        both: Those at which both did.
        p: Of failing more often than the reference; 1 where the arm does not.
    """
    shared, parts = set(evidence.shared), []
    if alone:
        enough = "; 6 such pairs would decide it)" if len(alone) == len(shared) else ")"
        parts.append(
            f"{_seeds(alone)} failed numerically where the reference did not, which with {_pairs(len(shared))} "
            f"may be chance (exact sign test, {_p(p)}{enough}"
        )
    if others:
        parts.append(f"{_seeds(others)} of the reference itself failed numerically where the arm did not")
    if both:
        parts.append(f"{_seeds(both)} failed numerically in both arms")
    if unpaired := set(evidence.failed) - shared:
        parts.append(f"{_seeds(unpaired)} failed numerically and cannot be paired with a run of the reference")
    if unpaired := set(evidence.reference_failed) - shared:
        parts.append(
            f"{_seeds(unpaired)} of the reference failed numerically and cannot be paired with a run of the arm"
        )
    return "; ".join(parts)


def _incomplete(evidence: PairedEvidence) -> str:
    """Return how many pairs are complete, and what the others lack besides what failed; empty where all are."""
    every = set(evidence.seeds) | set(evidence.shared)
    complete = evidence.difference.n if evidence.difference else 0
    if complete == len(every) or not evidence.seeds:
        return ""
    said = f"; {complete} of {_pairs(len(every))} {'is' if complete == 1 else 'are'} complete"
    gone = every - set(evidence.shared)
    return said + (f", {_seeds(gone)} did not end in both arms" if gone else "")


def _too_few(evidence: PairedEvidence) -> str:
    have = "no pair of runs is complete" if evidence.difference is None else "one pair of runs alone is complete"
    return f"{have}, and a verdict needs two seeds at least: how much seeds differ is unknown"


def _equivalent(evidence: PairedEvidence, difference: Interval, found: Equivalence, excludes_zero: bool) -> str:
    why = (
        f"the difference in {evidence.metric}, {signed(difference.mean)} with a {percent(1 - 2 * found.alpha)} interval "
        f"from {signed(found.low)} to {signed(found.high)}, lies within the margin of ±{found.margin:.3g} (two one-sided "
        f"tests, {_p(found.p)}, {_pairs(difference.n)}){_no_spread(difference)}"
    )
    if excludes_zero and difference.low < difference.high:
        why += f"; it is not zero (95 % interval {_from_to(difference)}), but smaller than what counts"
    return why


def _different(evidence: PairedEvidence, difference: Interval) -> str:
    why = (
        f"the difference in {evidence.metric}, {signed(difference.mean)} with a 95 % interval {_from_to(difference)}, is "
        f"not zero ({_pairs(difference.n)}){_no_spread(difference)}"
    )
    if abs(difference.mean) < evidence.margin:
        why += f"; whether it is smaller than the margin of ±{evidence.margin:.3g} is not settled"
    return why


def _no_spread(difference: Interval) -> str:
    """Return what is to be said of pairs that all differ by the same."""
    if difference.spread != 0:
        return ""
    if difference.low < difference.high:
        return "; all pairs differ by the same, and the interval is that of the rounding to whole samples"
    if difference.mean == 0:
        return "; all pairs are equal to the last bit, as only the same computation is"
    return "; all pairs differ by exactly the same, so their true spread is not known"


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
