"""Verdict on an arm against the reference, as one word and one sentence, from values of its runs paired by seed.

*Undecided* is a valid verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from mptrain.comparison.results import ArmVerdict, Equivalence, Interval, RunMeasures
from mptrain.comparison.statistics import equivalence, mean_interval
from mptrain.numerics.words import counted, of_seeds, percent


@dataclass(frozen=True)
class Sample:
    """Values of a measure in the runs of an arm, one for each seed.

    Attributes:
        values: Seed to value, for each run that has a finite one.
        failed: Seeds whose run failed numerically.
        missing: Seeds without a value for another reason: the run did not finish, or did not record it.
    """

    values: Mapping[int, float]
    failed: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def ended(self) -> set[int]:
        """Seeds whose run has a value or failed numerically."""
        return {*self.values, *self.failed}


def sample(
    runs: Sequence[RunMeasures],
    value: Callable[[RunMeasures], float | None],
    failed: Callable[[RunMeasures], bool],
) -> Sample:
    """Collect the finite values of a measure in the runs of an arm; a run that failed has none."""
    broken = tuple(sorted(run.seed for run in runs if failed(run)))
    found = {run.seed: value(run) for run in runs if run.seed not in broken}
    values = {seed: float(one) for seed, one in found.items() if one is not None and math.isfinite(one)}
    return Sample(values, broken, tuple(seed for seed in found if seed not in values))


@dataclass(frozen=True)
class PairedEvidence:
    """Evidence for the verdict on an arm against the reference, from runs paired by seed.

    Attributes:
        metric: Name of the metric, or of another measure of the runs.
        difference: Mean of arm minus reference over the complete pairs; None without complete pairs.
        equivalence: Equivalence test of the same differences; None with fewer than two, or if equivalence is no answer.
        failed: Seeds whose run of the arm failed numerically.
        reference_failed: Seeds whose run of the reference failed numerically.
        shared: Seeds for which both runs finished or failed numerically.
        seeds: Seeds of either arm; for a seed that is not shared, a run is missing or did not finish.
        bound: Difference below which the arm is worse, and above which it is better, or the other way round.
        number: Number that takes the place of the reference; None for a reference.
    """

    metric: str
    higher_is_better: bool
    difference: Interval | None
    equivalence: Equivalence | None
    failed: tuple[int, ...] = ()
    reference_failed: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    bound: float = 0.0
    number: float | None = None


def pair(
    metric: str,
    higher_is_better: bool,
    arm: Sample,
    reference: Sample | float,
    *,
    rounding: float = 0.0,
    margin: float | None = None,
    bound: float = 0.0,
) -> PairedEvidence:
    """Pair the runs of an arm and of a reference (or one number for all seeds), and test their differences.

    ``rounding`` is the standard deviation of the rounding error of a difference. ``margin`` is the equivalence margin;
    None if equivalence is no answer. ``bound`` is the difference that the verdict asks about in place of zero.
    """
    number = None if isinstance(reference, Sample) else reference
    other = reference if isinstance(reference, Sample) else Sample(dict.fromkeys(arm.ended, reference))
    differences = [arm.values[seed] - other.values[seed] for seed in sorted(arm.values.keys() & other.values.keys())]
    return PairedEvidence(
        metric=metric,
        higher_is_better=higher_is_better,
        difference=mean_interval(differences, rounding=rounding) if differences else None,
        equivalence=equivalence(differences, margin, rounding=rounding) if margin and len(differences) > 1 else None,
        failed=arm.failed,
        reference_failed=other.failed,
        shared=tuple(sorted(arm.ended & other.ended)),
        seeds=tuple(sorted(arm.ended | other.ended | {*arm.missing, *other.missing})),
        bound=bound,
        number=number,
    )


#: Level of every test.
ALPHA = 0.05


def decide(evidence: PairedEvidence) -> ArmVerdict:
    """Decide whether an arm is better than, equivalent to or worse than the reference of a comparison, or undecided.

    Numerical failures come first: an exact sign test (McNemar 1947) of the pairs in which exactly one run failed
    decides whether the arm fails more often than by chance. If any run failed, the remaining runs are a biased
    selection, so the arm is never better or equivalent. Then, with at least two complete pairs, two one-sided tests
    decide equivalence: t tests and, where the differences are skewed, bootstrap-t tests too. Otherwise the arms differ
    if the 95 % CI of the difference excludes zero. In all other cases the verdict is undecided. If some pairs are
    incomplete, the sentence says how many are complete.

    The evidence may have a bound other than zero, and a number in place of a reference (`PairedEvidence`). Better and
    worse are then relative to the bound, and to the number.
    """
    found = _decide(evidence)
    return ArmVerdict(found.word, found.why + _incomplete(evidence))


def _decide(evidence: PairedEvidence) -> ArmVerdict:
    shared = set(evidence.shared)
    failed, others_failed = set(evidence.failed) & shared, set(evidence.reference_failed) & shared
    alone, others = failed - others_failed, others_failed - failed
    p = sign_test(len(alone), len(others)) if len(alone) > len(others) else 1.0
    if p < ALPHA:
        why = f"{len(alone)} of {len(shared)} runs failed numerically while the reference with the same seed did not"
        return ArmVerdict("worse", f"{why} (exact sign test, {_p(p)})")
    failures = _failures(evidence, alone, others, failed & others_failed, p)
    difference, equivalence = evidence.difference, evidence.equivalence
    if difference is None or difference.n < 2:
        return ArmVerdict("undecided", "; ".join(filter(None, (failures, _too_few(evidence)))))
    excludes_bound = difference.low > evidence.bound or difference.high < evidence.bound
    inside = equivalence is not None and equivalence.holds
    worse = excludes_bound and not inside and (difference.mean > evidence.bound) != evidence.higher_is_better
    if worse:
        return ArmVerdict("worse", _different(evidence, difference) + (f"; also, {failures}" if failures else ""))
    if failures:
        return ArmVerdict("undecided", f"{failures}; with failed runs in either arm, no arm is better or equivalent")
    if equivalence is not None and inside:
        return ArmVerdict("equivalent", _equivalent(evidence, difference, equivalence, excludes_bound))
    if excludes_bound:
        unseen = f"; {unseen_in_words(equivalence)}" if equivalence is not None else ""
        return ArmVerdict("better", _different(evidence, difference) + unseen)
    return ArmVerdict("undecided", _undecided(evidence, difference, equivalence))


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
        f"{_quantity(evidence)} is {signed(difference.mean)} ({percent(1 - 2 * found.alpha)} CI "
        f"{signed(found.low)} to {signed(found.high)}), within the margin of ±{found.margin:.3g} (two one-sided "
        f"{percent(found.alpha)} tests, {_p(found.p)}, {_size(evidence, difference)}{_bootstrap(found)})"
        f"{_no_spread(evidence, difference)}"
    )
    if excludes_zero and difference.low < difference.high:
        why += f"; its 95 % CI ({_from_to(difference)}) excludes zero, but the difference is below the margin"
    return f"{why}; {unseen_in_words(found)}"


def _bootstrap(found: Equivalence) -> str:
    return "" if found.p_bootstrap is None else f"; skewed differences, bootstrap-t {_p(found.p_bootstrap)}"


def _different(evidence: PairedEvidence, difference: Interval) -> str:
    why = (
        f"{_quantity(evidence)} is {signed(difference.mean)}, and its 95 % CI ({_from_to(difference)}) excludes "
        f"{_bound(evidence)} ({_size(evidence, difference)}){_no_spread(evidence, difference)}"
    )
    found = evidence.equivalence
    if found is not None and found.p_bootstrap is not None:
        why += "; the differences are skewed, and with a long tail such a CI excludes a true zero in far more than 5 %"
    if found is not None and abs(difference.mean) < found.margin:
        why += f"; the true difference may be within the margin of ±{found.margin:.3g}"
    return why


def _quantity(evidence: PairedEvidence) -> str:
    if evidence.number is not None:
        return f"the difference of {evidence.metric} from {evidence.number:g}"
    return f"the paired difference in {evidence.metric}"


def _bound(evidence: PairedEvidence) -> str:
    return signed(evidence.bound) if evidence.bound else "zero"


def _size(evidence: PairedEvidence, difference: Interval) -> str:
    return counted(difference.n, "pair") if evidence.number is None else f"{difference.n} runs"


def _no_spread(evidence: PairedEvidence, difference: Interval) -> str:
    if difference.spread != 0:
        return ""
    if difference.low < difference.high:
        return "; all pairs have the same difference, and the CI reflects rounding to whole samples"
    if evidence.number is not None:
        return "; all runs have the same value"
    if difference.mean == 0:
        return "; all pairs are bitwise equal, so both arms probably ran the same computation"
    return "; all pairs have exactly the same difference, so the true spread is unknown"


def _undecided(evidence: PairedEvidence, difference: Interval, found: Equivalence | None) -> str:
    mean, interval, size = signed(difference.mean), _from_to(difference), _size(evidence, difference)
    if found is None:
        return f"{_quantity(evidence)} is {mean}, and its 95 % CI ({interval}) includes {_bound(evidence)} ({size})"
    what = "the paired difference" if evidence.number is None else _quantity(evidence)
    if found.p < found.alpha:
        return (
            f"{what} is {mean}, and t tests put it within the margin of "
            f"±{found.margin:.3g} ({_p(found.p)}), but the differences are skewed, and a test that follows their shape "
            f"does not (bootstrap-t, {_p(found.p_bootstrap or math.nan)}, {size})"
        )
    power = f"the power to find equal arms equivalent is {percent(found.power)}"
    if found.pairs_for_80 is None:
        more = "and even 1,000 pairs would not reach 80 %"
    elif found.pairs_for_80 > difference.n:
        more = f"and {found.pairs_for_80} pairs would reach 80 %"
    else:
        more = "so the number of pairs is sufficient"
    return (
        f"{what} is {mean} (95 % CI {interval}): the true difference may be zero or exceed the margin "
        f"of ±{found.margin:.3g}; with {counted(difference.n, 'pair')} of this spread, {power}, {more}"
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
