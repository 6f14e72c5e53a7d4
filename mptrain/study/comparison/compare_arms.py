"""Comparison of arms with a reference: the measures of each arm, its verdict, and objections to the comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mptrain.study.comparison.arms import choose_reference, pair_by_seed
from mptrain.study.comparison.fairness import check_fairness, differing_keys, max_concurrent_runs, remarks
from mptrain.study.comparison.results import Arm, ArmResult, ArmVerdict, Comparison, Interval, Objection, RunMeasures
from mptrain.study.comparison.run_measures import (
    align,
    align_reference,
    convergence_warnings,
    is_share,
    neither_learned,
    step_of,
)
from mptrain.study.comparison.sentences import OF_REFERENCE, unfair
from mptrain.study.comparison.statistics import mean_interval, ratio_interval, rounding_spread
from mptrain.study.comparison.verdict import ALPHA, Sample, decide, pair, sample
from mptrain.system.errors import EXIT_NUMERICS, UsageError, suggest
from mptrain.system.words import percent

#: Default equivalence margin, in the metric's unit: a percentage point of accuracy, a hundredth of a nat.
MARGIN = 0.01

_LOWER = re.compile(r"loss|perplexity|error|nats")

Pair = tuple[RunMeasures, RunMeasures]


@dataclass(frozen=True)
class _Metric:
    """The compared metric: its name, its direction, whether the direction is known, and its split."""

    name: str
    higher_is_better: bool
    known: bool
    split: str

    def of(self, run: RunMeasures) -> float | None:
        """Return the metric of a finished run; None for other runs and for runs measured on another split."""
        return run.metrics.get(self.name) if run.status == "done" and run.split == self.split else None

    def failed(self, run: RunMeasures) -> bool:
        value = self.of(run)
        return run.exit_code == EXIT_NUMERICS or (value is not None and not math.isfinite(value))

    def finite(self, run: RunMeasures) -> bool:
        return self.of(run) is not None and not self.failed(run)

    def sample(self, arm: Arm) -> Sample:
        return sample(arm.runs, self.of, self.failed)


def compare(
    arms: Sequence[Arm],
    *,
    reference: str | None = None,
    margin: float = MARGIN,
    metric: str | None = None,
    claimed: Sequence[str] = (),
    notes: Sequence[str] = (),
    anyway: bool = False,
) -> Comparison:
    """Compare arms (at least two, each with a run) with a reference, pairing runs with the same seed.

    ``reference`` is the name of the reference arm; None for that of `mptrain.study.comparison.arms.choose_reference`.
    ``margin`` is the equivalence margin, in the metric's unit. ``metric`` is the name of a recorded metric; None for
    the task's own metric, or the loss if it has none. ``claimed`` are configuration keys or sections in which arms may
    differ, in addition to precision and scaler. ``notes`` are for the reader and not derived from the records. If the
    comparison has fatal objections, all verdicts are undecided unless ``anyway`` is set.

    Raises:
        UsageError: Too few arms, no such reference or metric, or a margin that is not positive.
    """
    if len(arms) < 2:
        name = arms[0].name if arms else "none"
        raise UsageError(
            f"there is nothing to compare: all runs belong to one arm, {name}",
            "name several runs that differ in a setting, such as precision; runs that differ only in seed are one arm",
        )
    if empty := [arm.name for arm in arms if not arm.runs]:
        raise UsageError(f"there is no run of {', '.join(empty)}", "train it first, or leave it out")
    if not (margin > 0 and math.isfinite(margin)):
        raise UsageError(f"a margin of {margin:g} is not positive", f"the default is {MARGIN:g}, in the metric's unit")
    chosen = choose_reference(arms, reference)
    measured = _metric(arms, chosen, metric)
    objections, checks = check_fairness(arms, chosen, claimed)
    objections = (*_other_splits(arms, measured), *objections)
    together = max_concurrent_runs(run for arm in arms for run in arm.runs)
    ordered = [chosen, *(arm for arm in arms if arm is not chosen)]
    results = _with_twins([_result(arm, chosen, measured, margin, together) for arm in ordered])
    if (fatal := [objection for objection in objections if objection.fatal]) and not anyway:
        undecided = ArmVerdict("undecided", unfair(fatal[0].what))
        results = [results[0], *(replace(result, verdict=undecided) for result in results[1:])]
    return Comparison(
        metric=measured.name,
        higher_is_better=measured.higher_is_better,
        split=measured.split,
        margin=margin,
        reference=chosen.name,
        arms=tuple(results),
        objections=objections,
        checks=checks,
        notes=(*notes, *_notes(arms, chosen, measured, margin, together)),
    )


def _metric(arms: Sequence[Arm], reference: Arm, wanted: str | None) -> _Metric:
    """Return the metric to compare; raise UsageError if the runs have different ones, or none of that name."""
    runs = [run for arm in (reference, *arms) for run in arm.runs]
    done = [run for run in runs if run.status == "done" and run.metrics] or [run for run in runs if run.metrics]
    own = list(dict.fromkeys(run.metric_name for run in done if run.metric_name))
    if wanted is None and len(own) > 1:
        raise UsageError(f"the runs have different metrics: {', '.join(own)}", "choose one with --metric NAME")
    name = wanted or (own[0] if own else "loss")
    names = list(dict.fromkeys(known for run in done for known in run.metrics))
    if name not in names:
        hint = suggest(name, names, f"recorded metrics: {', '.join(names) or 'none'}")
        raise UsageError(f"no run has a metric {name!r}", hint)
    first = next(run for run in done if name in run.metrics)
    direction = direction_of(name, first)
    return _Metric(name, direction if direction is not None else True, direction is not None, first.split)


def direction_of(metric: str, run: RunMeasures) -> bool | None:
    """Return whether a higher value of a metric is better, from its name and a run that has it; None if unknown."""
    own = run.metric_name == metric and run.higher_is_better is not None
    if not own and (_LOWER.search(metric) or is_share(metric)):
        return not _LOWER.search(metric)
    return run.higher_is_better


def _result(arm: Arm, reference: Arm, metric: _Metric, margin: float, together: int) -> ArmResult:
    finite = [run for run in arm.runs if metric.finite(run)]
    step = step_of(metric.name, [run for some in (arm, reference) for run in some.runs if metric.finite(run)])
    done = [run for run in arm.runs if run.status == "done"]
    own = metric.sample(arm)
    alone = ArmResult(
        arm=arm,
        metric=_mean([metric.of(run) for run in finite], rounding_spread(step)),
        difference=None,
        equivalence=None,
        verdict=ArmVerdict("reference", OF_REFERENCE),
        failed=len(own.failed),
        missing=len(own.missing),
        throughput=_positive(_mean([run.terms_per_second for run in done])),
        speed=None,
        time=None,
        memory=None,
        peak=_positive(_mean([run.peak_memory or None for run in done])),
        energy=None,
        skip_rate=sum(run.skip_rate for run in arm.runs) / len(arm.runs),
    )
    if arm is reference:
        return replace(alone, aligned=align_reference(finite, metric.name), remarks=remarks(arm, arm, None, None))
    shared = pair_by_seed(arm, reference)
    complete = [(run, other) for run, other in shared if metric.finite(run) and metric.finite(other)]
    both_done = [(run, other) for run, other in shared if run.status == "done" and other.status == "done"]
    evidence = pair(
        metric.name,
        metric.higher_is_better,
        own,
        metric.sample(reference),
        rounding=rounding_spread(step, step),
        margin=margin,
    )
    higher = metric.higher_is_better
    alike = neither_learned(
        [a for a, _ in complete], [b for _, b in complete], metric.name, margin, higher_is_better=higher
    )
    speed = _ratio(both_done, lambda run: run.terms_per_second)
    memory = _ratio(both_done, lambda run: run.peak_memory)
    return replace(
        alone,
        difference=evidence.difference,
        equivalence=evidence.equivalence,
        verdict=decide(replace(evidence, unlearned=alike)),
        speed=speed,
        time=_ratio(both_done, lambda run: run.train_seconds),
        memory=memory,
        energy=_ratio(both_done, lambda run: run.energy),
        aligned=align(complete, metric.name),
        differs=differing_keys(arm, reference),
        remarks=remarks(arm, reference, speed, memory, together),
    )


def _with_twins(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Add a remark to each arm whose runs equal those of an earlier arm bit for bit."""
    remarked: list[ArmResult] = []
    for result in results:
        twin = next((other.arm.name for other in remarked if _are_twins(result.arm, other.arm)), None)
        remark = f"bitwise identical to {twin}: metrics and losses are equal for every seed"
        remarked.append(replace(result, remarks=(*result.remarks, remark)) if twin is not None else result)
    return remarked


def _are_twins(arm: Arm, other: Arm) -> bool:
    """Return whether all runs of two arms have the same final metrics, loss included, and the same course."""
    both = pair_by_seed(arm, other)
    return len(both) == len(arm.runs) == len(other.runs) and all(
        "done" == run.status == twin.status
        and "loss" in run.metrics
        and run.metrics == twin.metrics
        and run.course == twin.course
        for run, twin in both
    )


def _mean(values: Sequence[float | None], rounding: float = 0.0) -> Interval | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return mean_interval(known, rounding=rounding) if known else None


def _ratio(some: Sequence[Pair], of: Callable[[RunMeasures], float | None]) -> Interval | None:
    """Return the ratio of the arm to the reference over the pairs in which both have a positive value."""
    known = [(a, b) for run, other in some if (a := of(run) or 0.0) > 0 and (b := of(other) or 0.0) > 0]
    return _positive(ratio_interval([a for a, _ in known], [b for _, b in known])) if known else None


def _positive(interval: Interval | None) -> Interval | None:
    """Return an interval of a speed, size or ratio, not below zero; without ends for fewer than three values."""
    if interval is None or interval.n < 3:
        return interval and replace(interval, low=math.nan, high=math.nan)
    return replace(interval, low=max(interval.low, 0.0))


def _other_splits(arms: Sequence[Arm], metric: _Metric) -> list[Objection]:
    splits = {
        arm.name: run.split for arm in arms for run in arm.runs if run.status == "done" and run.split != metric.split
    }
    return [
        Objection(
            f"{name} was evaluated on {split or 'no split'}, others on {metric.split}: its runs are left out",
            True,
            "evaluate all arms on the same split",
        )
        for name, split in splits.items()
    ]


def _notes(arms: Sequence[Arm], reference: Arm, metric: _Metric, margin: float, together: int) -> list[str]:
    notes = [*_resolution(reference, metric, margin), *convergence_warnings(reference, metric.name, margin)]
    others = len(arms) - 1
    if others > 1:
        notes.append(
            f"verdicts are per arm: {others} arms are compared with the reference at 95 % each, without correction for "
            "multiple comparisons, so the probability of at least one false difference, or of at least one false "
            f"equivalence, is up to {percent(min(ALPHA * others, 1))}"
        )
    if together > 1:
        notes.append(
            f"up to {together} of these runs ran on one machine at the same time, so speeds are those of a busy machine"
        )
    if not metric.known:
        notes.append(f"the direction of {metric.name} is not recorded: higher is assumed to be better")
    return notes


def _resolution(reference: Arm, metric: _Metric, margin: float) -> list[str]:
    runs = [run for run in reference.runs if metric.finite(run) and run.samples and run.term == "samples"]
    if not is_share(metric.name) or not runs:
        return []
    samples = runs[0].samples
    mean = sum(metric.of(run) or 0.0 for run in runs) / len(runs)
    if not 0 <= mean <= 1:
        return []
    error = math.sqrt(mean * (1 - mean) / samples)
    notes = [
        f"the {metric.split} split has {samples:,} samples: one sample is {1 / samples:.2g} of {metric.name}, and "
        f"the binomial standard error of {mean:.3g} is {error:.2g}; CIs are over seeds, on this split"
    ]
    if margin < 1 / samples:
        notes.append(f"the margin of {margin:g} is less than one sample of that split")
    return notes
