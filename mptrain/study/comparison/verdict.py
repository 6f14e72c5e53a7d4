"""Decision on an arm against the reference of a comparison, and the evidence for it. *Undecided* is a valid verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from mptrain.study.comparison.results import ArmVerdict, Equivalence, Interval, RunMeasures, Word
from mptrain.study.comparison.statistics import equivalence, mean_interval
from mptrain.system.words import counted, of_seeds, percent


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
    measured = {run.seed: value(run) for run in runs if run.seed not in broken}
    values = {seed: float(number) for seed, number in measured.items() if number is not None and math.isfinite(number)}
    return Sample(values, broken, tuple(seed for seed in measured if seed not in values))


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
        unlearned: Why neither arm has learned, in words; empty if one has, or if that is unknown.
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
    unlearned: str = ""

    @property
    def arm_only(self) -> set[int]:
        """Shared seeds with which only the run of the arm failed."""
        return set(self.shared) & (set(self.failed) - set(self.reference_failed))

    @property
    def reference_only(self) -> set[int]:
        """Shared seeds with which only the run of the reference failed."""
        return set(self.shared) & (set(self.reference_failed) - set(self.failed))

    @property
    def failure_p(self) -> float:
        """The p value of the sign test of failures; 1 if the arm does not fail more often than the reference."""
        arm, reference = len(self.arm_only), len(self.reference_only)
        return sign_test(arm, reference) if arm > reference else 1.0


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


def sign_test(arm_only: int, reference_only: int) -> float:
    """Return the two-sided p value of an exact sign test of numerical failures of runs paired by seed (McNemar 1947).

    Only pairs in which exactly one run failed count, the arm's or the reference's; without any, the p value is 1.
    """
    return float(stats.binomtest(arm_only, arm_only + reference_only).pvalue) if arm_only + reference_only else 1.0


def fisher_test(failed: int, runs: int, other_failed: int, others: int) -> float:
    """Return the two-sided p value of Fisher's exact test (1922) of numbers of failures among unpaired runs."""
    return float(stats.fisher_exact(np.array([[failed, runs - failed], [other_failed, others - other_failed]])).pvalue)


#: Level of every test.
ALPHA = 0.05


@dataclass(frozen=True)
class ArmFacts:
    """Facts that decide about an arm, of runs that are paired or not, from run directories or logs.

    Attributes:
        difference: Mean of arm minus reference, with the interval for "better" and "worse"; None without values.
        inside: The tests of equivalence, or of no inferiority (``one_sided``), all hold.
        failed: Runs of the arm failed, and ``reference_failed`` those of the reference.
        failure_p: The p value of a test that the arm does not fail more often.
        paired: Failures of the reference leave out runs of both arms.
        unlearned: Neither arm has learned.
        no_spread: The runs of each arm all have one value, so that nothing is known of how much runs differ.
        bound: Difference that "better" and "worse" are relative to.
        alpha: Level of the test of failures.
    """

    difference: Interval | None
    inside: bool
    higher_is_better: bool
    failed: bool
    reference_failed: bool
    failure_p: float
    paired: bool = True
    one_sided: bool = False
    unlearned: bool = False
    no_spread: bool = False
    bound: float = 0.0
    alpha: float = ALPHA


def decide(evidence: PairedEvidence) -> ArmVerdict:
    """Decide whether an arm is better than, equivalent to or worse than the reference of a comparison, or undecided.

    The evidence may have a bound other than zero, and a number in place of a reference (`PairedEvidence`). Better and
    worse are then relative to the bound, and to the number. If some pairs are incomplete, the sentence says how many
    are complete.
    """
    word, reason = verdict_of(
        ArmFacts(
            evidence.difference,
            evidence.equivalence is not None and evidence.equivalence.holds,
            evidence.higher_is_better,
            bool(evidence.failed),
            bool(evidence.reference_failed),
            evidence.failure_p,
            unlearned=bool(evidence.unlearned),
            bound=evidence.bound,
        )
    )
    return ArmVerdict(word, why(reason, evidence) + incomplete(evidence))


def verdict_of(facts: ArmFacts) -> tuple[Word, Reason]:
    """Return the verdict on an arm, and what decided: the rule of all comparisons with a reference.

    Numerical failures come first: if the arm fails more often than by chance, it is worse (of pairs, by a sign test of
    those in which exactly one run failed, McNemar 1947). If any run failed, the remaining runs are a biased selection,
    so the arm is never better or equivalent. Runs without any spread, as copies have, decide nothing. Then, with at
    least two values, two one-sided tests decide equivalence: t tests and, where a sample is skewed, bootstrap-t tests
    too. Arms of which neither has learned are not equivalent: they agree whatever differs. Otherwise the arms differ if
    the interval of the difference excludes zero. In all other cases the verdict is undecided.
    """
    difference, bound = facts.difference, facts.bound
    if facts.failure_p < facts.alpha:
        return "worse", "failures"
    if facts.no_spread:
        return ("neither has learned" if facts.unlearned else "undecided"), "no spread"
    if difference is None or difference.n < 2:
        return "undecided", "few pairs"
    excludes_bound = difference.low > bound or difference.high < bound
    is_worse = excludes_bound and (difference.mean > bound) != facts.higher_is_better
    if is_worse and not facts.inside and (facts.paired or not facts.reference_failed):
        return "worse", "worse difference"
    if facts.failed or facts.reference_failed:
        return "undecided", "biased selection"
    if facts.inside:
        if facts.unlearned:
            return "neither has learned", "unlearned"
        return ("not inferior" if facts.one_sided else "equivalent"), "equivalence"
    if excludes_bound and not facts.one_sided:
        return "better", "better difference"
    return "undecided", "wide interval"


#: What decided, in the order in which it is asked about.
Reason = Literal[
    "failures", "no spread", "few pairs", "worse difference", "biased selection", "unlearned", "equivalence",
    "better difference", "wide interval",
]  # fmt: skip


def why(reason: Reason, evidence: PairedEvidence) -> str:
    """Return the reason of a decision as a sentence."""
    failed, difference, equivalence = _failed(evidence), evidence.difference, evidence.equivalence
    if reason == "failures":
        share = f"{len(evidence.arm_only)} of {len(evidence.shared)} runs failed numerically"
        return f"{share} while the reference with the same seed did not (exact sign test, {_p(evidence.failure_p)})"
    if reason == "biased selection":
        return f"{failed}; with failed runs in either arm, no arm is better or equivalent"
    if reason == "few pairs" or difference is None:
        return "; ".join(filter(None, (failed, _too_few(evidence))))
    if reason == "unlearned":
        return f"{evidence.unlearned}, and untrained arms agree whatever differs"
    if reason == "worse difference":
        return _different(evidence, difference) + (f"; also, {failed}" if failed else "")
    if reason == "better difference":
        return _different(evidence, difference) + (_unseen(equivalence) if equivalence else "")
    if reason == "equivalence" and equivalence is not None:
        return _equivalent(evidence, difference, equivalence) + _unseen(equivalence)
    return _undecided(evidence, difference, equivalence)


def _failed(evidence: PairedEvidence) -> str:
    """Describe the failed runs; empty if there are none."""
    arm, reference, shared = set(evidence.failed), set(evidence.reference_failed), set(evidence.shared)
    enough = "; 6 such pairs would be significant" if len(evidence.arm_only) == len(shared) else ""
    chance = f"with {counted(len(shared), 'pair')} may be chance (exact sign test, {_p(evidence.failure_p)}{enough})"
    unpaired = "failed numerically and cannot be paired with a run of the"
    failures = (
        (evidence.arm_only, f"failed numerically while the reference did not, which {chance}"),
        (evidence.reference_only, "of the reference failed numerically while the arm did not"),
        (shared & arm & reference, "failed numerically in both arms"),
        (arm - shared, f"{unpaired} reference"),
        (reference - shared, f"of the reference {unpaired} arm"),
    )
    return "; ".join(f"{of_seeds(seeds)} {what}" for seeds, what in failures if seeds)


def incomplete(evidence: PairedEvidence) -> str:
    """Describe how many pairs are complete, and which seeds did not finish; empty if all pairs are complete."""
    every = set(evidence.seeds) | set(evidence.shared)
    complete = evidence.difference.n if evidence.difference else 0
    if complete == len(every) or not evidence.seeds:
        return ""
    text = f"; {complete} of {counted(len(every), 'pair')} {'is' if complete == 1 else 'are'} complete"
    gone = every - set(evidence.shared)
    return text + (f", {of_seeds(gone)} did not finish with the metric in both arms" if gone else "")


def _too_few(evidence: PairedEvidence) -> str:
    have = "no pair of runs is complete" if evidence.difference is None else "only one pair of runs is complete"
    return f"{have}, and a verdict needs at least two seeds to estimate the spread over seeds"


def _equivalent(evidence: PairedEvidence, difference: Interval, tests: Equivalence) -> str:
    text = (
        f"{_quantity(evidence)} is {_signed(difference.mean)} ({percent(1 - 2 * tests.alpha)} CI "
        f"{_signed(tests.low)} to {_signed(tests.high)}), within the margin of ±{tests.margin:.3g} (two one-sided "
        f"{percent(tests.alpha)} tests, {_p(tests.p)}, {_size(evidence, difference)}{_bootstrap(tests)})"
        f"{_no_spread(evidence, difference)}"
    )
    if difference.low < difference.high and not difference.low <= evidence.bound <= difference.high:
        text += f"; its 95 % CI ({_from_to(difference)}) excludes zero, but the difference is below the margin"
    return text


def _bootstrap(tests: Equivalence) -> str:
    return "" if tests.p_bootstrap is None else f"; skewed differences, bootstrap-t {_p(tests.p_bootstrap)}"


def _different(evidence: PairedEvidence, difference: Interval) -> str:
    text = (
        f"{_quantity(evidence)} is {_signed(difference.mean)}, and its 95 % CI ({_from_to(difference)}) excludes "
        f"{_bound(evidence)} ({_size(evidence, difference)}){_no_spread(evidence, difference)}"
    )
    tests = evidence.equivalence
    if tests is not None and tests.p_bootstrap is not None:
        text += "; the differences are skewed, and with a long tail such a CI excludes a true zero in far more than 5 %"
    if tests is not None and abs(difference.mean) < tests.margin:
        text += f"; the true difference may be within the margin of ±{tests.margin:.3g}"
    return text


def _quantity(evidence: PairedEvidence) -> str:
    if evidence.number is not None:
        return f"the difference of {evidence.metric} from {evidence.number:g}"
    return f"the paired difference in {evidence.metric}"


def _bound(evidence: PairedEvidence) -> str:
    return _signed(evidence.bound) if evidence.bound else "zero"


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


def _undecided(evidence: PairedEvidence, difference: Interval, tests: Equivalence | None) -> str:
    mean, interval, size = _signed(difference.mean), _from_to(difference), _size(evidence, difference)
    if tests is None:
        return f"{_quantity(evidence)} is {mean}, and its 95 % CI ({interval}) includes {_bound(evidence)} ({size})"
    what = "the paired difference" if evidence.number is None else _quantity(evidence)
    if tests.p < tests.alpha:
        return (
            f"{what} is {mean}, and t tests put it within the margin of "
            f"±{tests.margin:.3g} ({_p(tests.p)}), but the differences are skewed, and a test that follows their shape "
            f"does not (bootstrap-t, {_p(tests.p_bootstrap or math.nan)}, {size})"
        )
    power = f"the power to find equal arms equivalent is {percent(tests.power)}"
    if tests.pairs_for_80 is None:
        more = "and even 1,000 pairs would not reach 80 %"
    elif tests.pairs_for_80 > difference.n:
        more = f"and {tests.pairs_for_80} pairs would reach 80 %"
    else:
        more = "so the number of pairs is sufficient"
    return (
        f"{what} is {mean} (95 % CI {interval}): the true difference may be zero or exceed the margin "
        f"of ±{tests.margin:.3g}; with {counted(difference.n, 'pair')} of this spread, {power}, {more}"
    )


def _unseen(tests: Equivalence) -> str:
    """Describe what runs none of which failed cannot exclude, with 95 % confidence."""
    return (
        "; no run failed; a failure, or a difference larger than any of these, in up to "
        f"{percent(tests.unseen)} of runs cannot be excluded"
    )


def _signed(value: float) -> str:
    """Format a difference of a metric with its sign and three digits; a rounding error around zero becomes +0."""
    return f"{round(value, 12) + 0.0:+.3g}"


def _from_to(interval: Interval) -> str:
    return f"{_signed(interval.low)} to {_signed(interval.high)}"


def _p(value: float) -> str:
    return f"p = {value:.2g}" if value >= 1e-4 else "p < 0.0001"
