"""Decision on an arm against the reference of a comparison, and the evidence for it. *Undecided* is a valid verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mptrain.study.comparison.results import ArmVerdict, Equivalence, Form, Interval, Reason, RunMeasures, Word
from mptrain.study.comparison.sentences import Grounds, p_value, why
from mptrain.study.comparison.statistics import equivalence, mean_interval
from mptrain.system.words import counted, of_seeds


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
        difference: Mean of arm minus reference, with the interval for "better" and "worse", or minus the target; None
            without values.
        holds: The tests of the claim all hold: equivalence, no inferiority, or of a target that the mean is not it.
        form: The claim.
        failed: Runs of the arm failed, and ``reference_failed`` those of the reference.
        failure_p: The p value of a test that the arm does not fail more often.
        paired: Failures of the reference leave out runs of both arms.
        unlearned: Neither arm has learned.
        no_spread: The runs of each of two unpaired arms, or of one beside a target, all have one value, so that nothing
            is known of how much runs differ. Of pairs with one difference the sentence says so.
        bound: Difference that "better" and "worse" are relative to.
        alpha: Level of the test of failures.
    """

    difference: Interval | None
    holds: bool
    higher_is_better: bool
    form: Form = "equivalent"
    failed: bool = False
    reference_failed: bool = False
    failure_p: float = 1.0
    paired: bool = True
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
            failed=bool(evidence.failed),
            reference_failed=bool(evidence.reference_failed),
            failure_p=evidence.failure_p,
            unlearned=bool(evidence.unlearned),
            bound=evidence.bound,
        )
    )
    return ArmVerdict(word, why(reason, _grounds(evidence, reason)) + incomplete(evidence))


def verdict_of(facts: ArmFacts) -> tuple[Word, Reason]:
    """Return the verdict on an arm, and what decided: the rule of all comparisons with a reference, number or target.

    Numerical failures come first: if the arm fails more often than by chance, it is worse (of pairs, by a sign test of
    those in which exactly one run failed, McNemar 1947; else by Fisher's exact test, 1922). If any run failed, the
    remaining runs are a biased selection, so the arm is never better or equivalent, and beats or misses no target.
    Unpaired runs without any spread, as copies have, decide nothing. Then, with at least two values:

    - A target is beaten or missed if the one-sided interval of the mean excludes it (one-sample t test, Student 1908),
      and where the sample is skewed a bootstrap-t test (Efron 1979) agrees.
    - Two one-sided tests decide equivalence (Schuirmann 1987), and the one of them against "worse by the margin" no
      inferiority: t tests and, where a sample is skewed, bootstrap-t tests too. Arms of which neither has learned are
      not equivalent: they agree whatever differs.
    - Otherwise the arms differ if the interval of the difference excludes zero (a t test).

    In all other cases the verdict is undecided.
    """
    difference, bound = facts.difference, facts.bound
    if facts.failure_p < facts.alpha:
        return "worse", "failures"
    if facts.no_spread:
        return ("neither has learned" if facts.unlearned else "undecided"), "no spread"
    if difference is None or difference.n < 2:
        return "undecided", "few pairs"
    excludes_bound = difference.low > bound or difference.high < bound
    is_better_side = (difference.mean > bound) == facts.higher_is_better
    # Failures of the arm do not speak against worse. Those of an unpaired reference do: its other runs are a selection.
    is_worse = excludes_bound and not is_better_side and facts.form != "beats target"
    if is_worse and not facts.holds and (facts.paired or not facts.reference_failed):
        return "worse", "worse difference"
    if facts.failed or facts.reference_failed:
        return "undecided", "biased selection"
    if facts.form == "beats target":
        if not facts.holds:
            return "undecided", "wide interval"
        return ("beats target" if is_better_side else "misses target"), "distance from target"
    if facts.holds:
        if facts.unlearned:
            return "neither has learned", "unlearned"
        return ("not inferior" if facts.form == "not inferior" else "equivalent"), "equivalence"
    if excludes_bound and facts.form == "equivalent":
        return "better", "better difference"
    return "undecided", "wide interval"


def _grounds(evidence: PairedEvidence, reason: Reason) -> Grounds:
    """Return the facts and numbers that the sentence of a verdict on pairs names."""
    complete = "only one pair of runs is complete" if evidence.difference else "no pair of runs is complete"
    more = f"{len(evidence.arm_only)} of {len(evidence.shared)} runs failed numerically"
    return Grounds(
        evidence.metric,
        evidence.higher_is_better,
        evidence.difference,
        evidence.equivalence,
        number=evidence.number,
        bound=evidence.bound,
        failed=f"{more} while the reference with the same seed did not" if reason == "failures" else _failed(evidence),
        failure_p=evidence.failure_p,
        few=complete,
        unlearned=evidence.unlearned,
        alike=evidence.difference is not None and evidence.difference.spread == 0,
    )


def _failed(evidence: PairedEvidence) -> str:
    """Describe the failed runs; empty if there are none."""
    arm, reference, shared = set(evidence.failed), set(evidence.reference_failed), set(evidence.shared)
    enough = "; 6 such pairs would be significant" if len(evidence.arm_only) == len(shared) else ""
    test = f"exact sign test, {p_value(evidence.failure_p)}{enough}"
    chance = f"with {counted(len(shared), 'pair')} may be chance ({test})"
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
