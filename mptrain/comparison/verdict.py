"""Verdict on an arm against the reference, as one word and one sentence. *Undecided* is a valid verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from mptrain.comparison.results import Equivalence, Interval, Verdict
from mptrain.words import counted, of_seeds, percent

#: Level of every test.
ALPHA = 0.05


@dataclass(frozen=True)
class PairedEvidence:
    """Evidence for the verdict on an arm against the reference, from runs paired by seed.

    Attributes:
        margin: Equivalence margin, in the metric's unit.
        difference: Mean of arm minus reference over the complete pairs; None without complete pairs.
        equivalence: Equivalence test of the same differences; None with fewer than two.
        failed: Seeds whose run of the arm failed numerically.
        reference_failed: Seeds whose run of the reference failed numerically.
        shared: Seeds for which both runs finished or failed numerically.
        seeds: Seeds of either arm; for a seed that is not shared, a run is missing or did not finish.
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
    """Decide whether an arm is better than, equivalent to or worse than the reference of a comparison, or undecided.

    Numerical failures come first: an exact sign test (McNemar 1947) of the pairs in which exactly one run failed
    decides whether the arm fails more often than by chance. If any run failed, the remaining runs are a biased
    selection, so the arm is never better or equivalent. Then, with at least two complete pairs, two one-sided tests
    decide equivalence: t tests and, where the differences are skewed, bootstrap-t tests too. Otherwise the arms differ
    if the 95 % CI of the difference excludes zero. In all other cases the verdict is undecided. If some pairs are
    incomplete, the sentence says how many are complete.
    """
    found = _decide(evidence)
    return Verdict(found.word, found.why + _incomplete(evidence))


def _decide(evidence: PairedEvidence) -> Verdict:
    shared = set(evidence.shared)
    failed, others_failed = set(evidence.failed) & shared, set(evidence.reference_failed) & shared
    alone, others = failed - others_failed, others_failed - failed
    p = sign_test(len(alone), len(others)) if len(alone) > len(others) else 1.0
    if p < ALPHA:
        why = f"{len(alone)} of {len(shared)} runs failed numerically while the reference with the same seed did not"
        return Verdict("worse", f"{why} (exact sign test, {_p(p)})")
    failures = _failures(evidence, alone, others, failed & others_failed, p)
    difference, equivalence = evidence.difference, evidence.equivalence
    if difference is None or equivalence is None or difference.n < 2:
        return Verdict("undecided", "; ".join(filter(None, (failures, _too_few(evidence)))))
    excludes_zero = difference.low > 0 or difference.high < 0
    inside = equivalence.holds
    worse = excludes_zero and not inside and (difference.mean > 0) != evidence.higher_is_better
    if worse:
        return Verdict("worse", _different(evidence, difference) + (f"; also, {failures}" if failures else ""))
    if failures:
        return Verdict("undecided", f"{failures}; with failed runs in either arm, no arm is better or equivalent")
    if inside:
        return Verdict("equivalent", _equivalent(evidence, difference, equivalence, excludes_zero))
    if excludes_zero:
        return Verdict("better", f"{_different(evidence, difference)}; {unseen_in_words(equivalence)}")
    return Verdict("undecided", _undecided(difference, equivalence))


def sign_test(arm_only: int, reference_only: int) -> float:
    """Return the two-sided p value of an exact sign test of numerical failures of runs paired by seed (McNemar 1947).

    Only pairs in which exactly one run failed count, the arm's or the reference's; without any, the p value is 1.
    """
    return float(stats.binomtest(arm_only, arm_only + reference_only).pvalue) if arm_only + reference_only else 1.0


def _failures(evidence: PairedEvidence, alone: set[int], others: set[int], both: set[int], p: float) -> str:
    """Describe failed runs that decide no verdict; empty if there are none.

    ``alone``, ``others`` and ``both`` are shared seeds for which only the arm, only the reference, or both failed.
    ``p`` is that of the sign test; 1 if the arm does not fail more often than the reference.
    """
    shared, parts = set(evidence.shared), []
    if alone:
        enough = "; 6 such pairs would be significant)" if len(alone) == len(shared) else ")"
        parts.append(
            f"{of_seeds(alone)} failed numerically while the reference did not, which with "
            f"{counted(len(shared), 'pair')} may be chance (exact sign test, {_p(p)}{enough}"
        )
    if others:
        parts.append(f"{of_seeds(others)} of the reference failed numerically while the arm did not")
    if both:
        parts.append(f"{of_seeds(both)} failed numerically in both arms")
    if unpaired := set(evidence.failed) - shared:
        parts.append(f"{of_seeds(unpaired)} failed numerically and cannot be paired with a run of the reference")
    if unpaired := set(evidence.reference_failed) - shared:
        parts.append(
            f"{of_seeds(unpaired)} of the reference failed numerically and cannot be paired with a run of the arm"
        )
    return "; ".join(parts)


def _incomplete(evidence: PairedEvidence) -> str:
    """Describe how many pairs are complete, and which seeds did not finish; empty if all pairs are complete."""
    every = set(evidence.seeds) | set(evidence.shared)
    complete = evidence.difference.n if evidence.difference else 0
    if complete == len(every) or not evidence.seeds:
        return ""
    said = f"; {complete} of {counted(len(every), 'pair')} {'is' if complete == 1 else 'are'} complete"
    gone = every - set(evidence.shared)
    return said + (f", {of_seeds(gone)} did not finish in both arms" if gone else "")


def _too_few(evidence: PairedEvidence) -> str:
    have = "no pair of runs is complete" if evidence.difference is None else "only one pair of runs is complete"
    return f"{have}, and a verdict needs at least two seeds to estimate the spread over seeds"


def _equivalent(evidence: PairedEvidence, difference: Interval, found: Equivalence, excludes_zero: bool) -> str:
    why = (
        f"the paired difference in {evidence.metric} is {signed(difference.mean)} ({percent(1 - 2 * found.alpha)} CI "
        f"{signed(found.low)} to {signed(found.high)}), within the margin of ±{found.margin:.3g} (two one-sided "
        f"{percent(found.alpha)} tests, {_p(found.p)}, {counted(difference.n, 'pair')}{_bootstrap(found)})"
        f"{_no_spread(difference)}"
    )
    if excludes_zero and difference.low < difference.high:
        why += f"; its 95 % CI ({_from_to(difference)}) excludes zero, but the difference is below the margin"
    return f"{why}; {unseen_in_words(found)}"


def _bootstrap(found: Equivalence) -> str:
    return "" if found.p_bootstrap is None else f"; skewed differences, bootstrap-t {_p(found.p_bootstrap)}"


def _different(evidence: PairedEvidence, difference: Interval) -> str:
    why = (
        f"the paired difference in {evidence.metric} is {signed(difference.mean)}, and its 95 % CI "
        f"({_from_to(difference)}) excludes zero ({counted(difference.n, 'pair')}){_no_spread(difference)}"
    )
    if evidence.equivalence is not None and evidence.equivalence.p_bootstrap is not None:
        why += "; the differences are skewed, and with a long tail such a CI excludes a true zero in far more than 5 %"
    if abs(difference.mean) < evidence.margin:
        why += f"; the true difference may be within the margin of ±{evidence.margin:.3g}"
    return why


def _no_spread(difference: Interval) -> str:
    if difference.spread != 0:
        return ""
    if difference.low < difference.high:
        return "; all pairs have the same difference, and the CI reflects rounding to whole samples"
    if difference.mean == 0:
        return "; all pairs are bitwise equal, so both arms probably ran the same computation"
    return "; all pairs have exactly the same difference, so the true spread is unknown"


def _undecided(difference: Interval, found: Equivalence) -> str:
    if found.p < found.alpha:
        return (
            f"the paired difference is {signed(difference.mean)}, and t tests put it within the margin of "
            f"±{found.margin:.3g} ({_p(found.p)}), but the differences are skewed, and a test that follows their shape "
            f"does not (bootstrap-t, {_p(found.p_bootstrap or math.nan)}, {counted(difference.n, 'pair')})"
        )
    power = f"the power to find equal arms equivalent is {percent(found.power)}"
    if found.pairs_for_80 is None:
        more = "and even 1,000 pairs would not reach 80 %"
    elif found.pairs_for_80 > difference.n:
        more = f"and {found.pairs_for_80} pairs would reach 80 %"
    else:
        more = "so the number of pairs is sufficient"
    return (
        f"the paired difference is {signed(difference.mean)} (95 % CI {_from_to(difference)}): the true difference may "
        f"be zero or exceed the margin of ±{found.margin:.3g}; with {counted(difference.n, 'pair')} of this "
        f"spread, {power}, {more}"
    )


def unseen_in_words(found: Equivalence) -> str:
    """Describe what runs none of which failed cannot exclude, with 95 % confidence."""
    return (
        f"no run failed; a failure, or a difference larger than any of these, in up to {percent(found.unseen)} of runs "
        "cannot be excluded"
    )


def signed(value: float) -> str:
    """Format a difference of a metric with its sign and three digits; a rounding error around zero becomes +0."""
    return f"{round(value, 12) + 0.0:+.3g}"


def _from_to(interval: Interval) -> str:
    return f"{signed(interval.low)} to {signed(interval.high)}"


def _p(value: float) -> str:
    return f"p = {value:.2g}" if value >= 1e-4 else "p < 0.0001"
