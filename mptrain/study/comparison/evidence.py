"""Evidence for a verdict on an arm: values of its runs and those of the reference, paired by seed, and their tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mptrain.study.comparison.results import Equivalence, Interval, RunMeasures
from mptrain.study.comparison.statistics import equivalence, mean_interval


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
