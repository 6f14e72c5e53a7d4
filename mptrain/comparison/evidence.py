"""Evidence for a verdict: values of a measure in the runs of two arms, paired by seed, and their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mptrain.comparison.results import Equivalence, Interval
from mptrain.comparison.statistics import equivalence, mean_interval


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
