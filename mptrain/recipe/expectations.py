"""Judgement of a recipe's expectations from the measures of its runs: met, not met or undecided.

An expectation is a statement about arms such as ``fp16.top1 = fp32.top1 within 0.5``; an arm is all runs of one
configuration, one per seed. The statistics are those of `mptrain.comparison.statistics`. A run that failed numerically
has no metric, but it still has a skip rate. Such a run is left out, and a statement about metrics is then undecided. If
all runs of an arm failed, the arm counts as worse than any other. Metrics that count samples are rounded, and intervals
include this rounding. ``within 0`` requires exact equality for every seed. Counts, scales and rates are used without
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mptrain.comparison.results import Interval, RunMeasures
from mptrain.comparison.run_measures import step_of
from mptrain.comparison.statistics import equivalence, mean_interval, rounding_spread
from mptrain.comparison.verdict import unseen_in_words
from mptrain.errors import EXIT_NUMERICS, Problem, did_you_mean
from mptrain.recipe.recipe import Expectation
from mptrain.recipe.statements import Quantity, Statement

Outcome = Literal["met", "not met", "undecided"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one expectation of a recipe, with the numbers behind it.

    Attributes:
        text: The expected statement as written in the recipe.
        outcome: ``met``, ``not met`` (the numbers contradict it) or ``undecided`` (the numbers do not decide it).
        numbers: The numbers and the distance from the bound, in one sentence.
        statistics: The available statistics as numbers: ``mean``, ``low``, ``high``, ``n``, ``power`` ...
    """

    text: str
    outcome: Outcome
    numbers: str
    statistics: dict[str, float] = field(default_factory=dict)


def judge(expectation: Expectation, runs: Runs, arithmetic: Arithmetic) -> Finding:
    """Judge whether one expectation of a recipe is met by the measures of its runs.

    Args:
        expectation: The expectation. Its arms and arithmetic entries must exist; see `unknown_measures`.
        runs: Full name of an arm, such as ``fp32`` or ``sgd/fp32``, to its runs. All arms have the same seeds.
        arithmetic: Name of an arithmetic entry (numbers computed without training) to measure to value.
    """
    statement = expectation.statement
    left = sample(statement.left, runs, arithmetic)
    right = sample(statement.right, runs, arithmetic)
    found = (
        _of_failures(statement, left, right, _direction(statement.left.measure, runs))
        or _of_gaps(left, right)
        or _of_numbers(statement, left, right)
    )
    if (left.failed or right.failed) and not (left.all_failed or right.all_failed):
        remark = f"{_failures(left, right)}; without these seeds: {found.numbers}"
        found = Finding("", "undecided", remark, found.statistics)
    return Finding(expectation.text, found.outcome, found.numbers, found.statistics)


def _direction(measure: str, runs: Runs) -> int:
    """Return 1 if a higher value is better, -1 if a lower value is better, 0 if unknown."""
    for run in (run for some in runs.values() for run in some):
        if run.metric_name == measure and run.higher_is_better is not None:
            return 1 if run.higher_is_better else -1
    return -1 if measure in ("loss", "perplexity") else 0


def _of_failures(statement: Statement, left: Sample, right: Sample, better: int) -> Finding | None:
    """Judge a statement if all runs of a side failed: that side counts as worse than any other."""
    if not (left.all_failed or right.all_failed):
        return None
    who, other = (left, right) if left.all_failed else (right, left)
    count = len(who.failed)
    says = f"{f'all {count} runs' if count > 1 else 'the only run'} of {who.arm} failed numerically"
    if other.failed:
        return Finding("", "undecided", f"{says}; {_failures(other)}")
    if other.missing:
        return Finding("", "undecided", f"{says}; {other.name} is not recorded for {_seeds(other.missing)}")
    if who.measure in OF_WHOLE_RUNS:
        return Finding("", "undecided", f"{says}, so there is no {who.measure} of a complete run")
    if better == 0:
        unknown = f"the records do not say whether a higher {statement.left.measure} is better"
        return Finding("", "undecided", f"{says}, and {unknown}")
    if statement.relation == "=":
        return Finding("", "not met", f"{says}, and those of {other.arm} did not" if other.values else says)
    left_is_lower = (better > 0) == left.all_failed
    return Finding("", "met" if left_is_lower == (statement.relation == "<") else "not met", says)


def _of_gaps(left: Sample, right: Sample) -> Finding | None:
    for side in (left, right):
        if side.missing:
            return Finding("", "undecided", f"{side.name} is not recorded for {_seeds(side.missing)}")
        if side.number is None and not side.values and not side.failed:
            return Finding("", "undecided", f"{side.name} has no runs")
    return None


def _of_numbers(statement: Statement, left: Sample, right: Sample) -> Finding:
    if left.number is not None and right.number is not None:
        return _exactly(statement, left, right)
    seeds = [seed for seed in (left.values or right.values) if _has(left, seed) and _has(right, seed)]
    if not seeds:
        return Finding("", "undecided", f"no seed has both {left.name} and {right.name}")
    pairs = [(_at(left, seed), _at(right, seed)) for seed in seeds]
    if statement.is_ratio and any(value <= 0 for pair in pairs for value in pair):
        what = f"the ratio of {left.name} to {right.name} is not defined: not all values are positive"
        return Finding("", "undecided", what)
    differences = [math.log(a) - math.log(b) if statement.is_ratio else a - b for a, b in pairs]
    sides = [
        f"{side.name} {side.shown}" for side in (left, right) if not isinstance(statement.right, float) or side is left
    ]
    steps = [side.step / side.mean if statement.is_ratio else side.step for side in (left, right)]
    of = _Differences(statement, differences, tuple(seeds), ", ".join(sides), rounding_spread(*steps))
    return _same(of) if statement.relation == "=" else _beyond(of)


@dataclass(frozen=True)
class _Differences:
    """Differences left minus right of a statement's sides for each seed; of their logarithms if ratios are compared.

    Attributes:
        statement: The statement about the differences.
        values: One difference for each seed.
        seeds: The seeds in the same order.
        sides: The means of both sides, for the sentence.
        rounding: Standard deviation of the rounding error of a value; for logarithms, relative to the mean.
    """

    statement: Statement
    values: list[float]
    seeds: tuple[int, ...]
    sides: str
    rounding: float = 0.0

    @property
    def bound(self) -> float:
        """Amount of the statement (after ``by`` or ``within``) in the unit of the values: its logarithm for a ratio."""
        amount = self.statement.amount
        if self.statement.is_ratio:
            return math.log(amount or 1.0)
        return amount or 0.0

    def show(self, value: float) -> str:
        """Format a difference or a ratio, or the value itself if the right side is a number."""
        if self.statement.is_ratio:
            return f"{in_digits(math.exp(value))}x"
        if isinstance(self.statement.right, float):
            return in_digits(value + self.statement.right)
        return f"{round(value, 12):+.4g}"  # drops float error between equal decimals

    def sentence(self, interval: Interval) -> str:
        """Describe both sides, the compared quantity and its interval."""
        what = "mean" if isinstance(self.statement.right, float) and not self.statement.is_ratio else "difference"
        what = "ratio" if self.statement.is_ratio else what
        head = f"{self.sides}: {what} {self.show(interval.mean)}" if what != "mean" else self.sides
        if interval.n == 1:
            return f"{head}, one seed"
        if interval.low == interval.high:
            return f"{head}, the same for all {interval.n} seeds"
        if self.statement.is_ratio and interval.n < 3:  # the interval of two ratios spans orders of magnitude
            return f"{head}, {interval.n} seeds"
        low, high = self.show(interval.low), self.show(interval.high)
        return f"{head}, {100 * interval.level:.0f} % CI {low} to {high}, {interval.n} seeds"

    def statistics(self, interval: Interval) -> dict[str, float]:
        """Return the statistics of the values in their own unit."""
        found = {"mean": interval.mean, "low": interval.low, "high": interval.high, "spread": interval.spread}
        return {"n": interval.n, "bound": self.bound, **{k: v for k, v in found.items() if math.isfinite(v)}}


_ONE_SEED = "; the variation between seeds is unknown: at least two seeds are needed"


def _beyond(of: _Differences) -> Finding:
    """Judge ``<`` and ``>``: met if the whole interval of the mean lies beyond the bound."""
    sign = -1 if of.statement.relation == "<" else 1
    interval, bound = mean_interval(of.values, rounding=of.rounding), sign * of.bound
    says, numbers = of.sentence(interval), of.statistics(interval)
    side = "below" if sign < 0 else "above"
    if interval.n == 1:
        return Finding("", "undecided", says + _ONE_SEED, numbers)
    near, far = sorted((sign * interval.low, sign * interval.high))
    if near > of.bound:
        return Finding("", "met", f"{says}, {side} {of.show(bound)}", numbers)
    short = of.bound - sign * interval.mean
    if far <= of.bound:
        numbers["off"] = short
        return Finding("", "not met", f"{says}, not {side} {of.show(bound)}: off by {_off(of, short)}", numbers)
    return Finding("", "undecided", f"{says}, which does not decide whether it is {side} {of.show(bound)}", numbers)


def _same(of: _Differences) -> Finding:
    """Judge ``=`` by two one-sided tests against the amount, or exactly if the seeds agree or the amount is 0."""
    interval, bound = mean_interval(of.values, rounding=of.rounding), of.bound
    says, numbers = of.sentence(interval), of.statistics(interval)
    margin = f"{in_digits(math.exp(bound))}x" if of.statement.is_ratio else in_digits(bound)
    excess = abs(interval.mean) - bound
    if interval.n == 1:
        return Finding("", "undecided", says + _ONE_SEED, numbers)
    if bound == 0 and any(of.values):
        seed = max(zip(of.values, of.seeds, strict=True), key=lambda pair: abs(pair[0]))
        numbers["off"] = abs(seed[0])
        return Finding("", "not met", f"{says}: off by {_off(of, abs(seed[0]))} at seed {seed[1]}", numbers)
    exact = interval.low == interval.high or bound == 0
    if exact and excess <= 0:
        return Finding("", "met", f"{says}, within {margin}", numbers)
    if interval.low > bound or interval.high < -bound or exact:
        numbers["off"] = excess
        return Finding("", "not met", f"{says}, beyond {margin}: off by {_off(of, excess)}", numbers)
    tests = equivalence(of.values, bound, rounding=of.rounding)
    numbers |= {"unseen": tests.unseen} | ({} if tests.p_bootstrap is None else {"p_bootstrap": tests.p_bootstrap})
    numbers |= {"p": tests.p, "power": tests.power, "low_90": tests.low, "high_90": tests.high}
    if tests.holds:
        ends = f"90 % CI {of.show(tests.low)} to {of.show(tests.high)}"
        return Finding("", "met", f"{says}; {ends} lies within {margin}; {unseen_in_words(tests)}", numbers)
    if tests.pairs_for_80 is not None:
        numbers["seeds_for_80"] = tests.pairs_for_80
    more = "not even 1,000 seeds" if tests.pairs_for_80 is None else f"{tests.pairs_for_80} seeds"
    power = f"the power with {interval.n} seeds is {100 * tests.power:.0f} %; {more} would reach 80 %"
    return Finding("", "undecided", f"{says}, not shown to be within {margin}; {power}", numbers)


def _exactly(statement: Statement, left: Sample, right: Sample) -> Finding:
    """Compare two deterministic numbers."""
    a, b = left.number or 0.0, right.number or 0.0
    named = f"{left.name} is {in_digits(a)}" + (
        f", {right.name} {in_digits(b)}" if isinstance(statement.right, Quantity) else ""
    )
    amount = statement.amount or 0.0
    if statement.is_ratio and not (a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)):
        return Finding("", "not met", f"{named}: the ratio is not defined")
    if statement.is_ratio:
        difference, amount = math.log(a) - math.log(b), math.log(statement.amount or 1.0)
    else:
        difference = 0.0 if a == b else a - b
    distance = {"=": abs(difference) - amount, "<": difference + amount, ">": amount - difference}[statement.relation]
    numbers = {"n": 1, "mean": difference, "bound": amount, "value": a}
    if distance <= 0 if statement.relation == "=" else distance < 0:
        return Finding("", "met", named, numbers)
    off = f"{in_digits(math.exp(distance))}x" if statement.is_ratio else in_digits(distance)
    return Finding(
        "", "not met", f"{named}: off by {off}" if math.isfinite(distance) else named, numbers | {"off": distance}
    )


def _has(side: Sample, seed: int) -> bool:
    return side.number is not None or seed in side.values


def _at(side: Sample, seed: int) -> float:
    return side.values[seed] if side.number is None else side.number


def _off(of: _Differences, amount: float) -> str:
    return f"{in_digits(math.exp(amount))}x" if of.statement.is_ratio else in_digits(amount)


def _failures(*sides: Sample) -> str:
    return " and ".join(f"{_seeds(side.failed)} of {side.arm} failed numerically" for side in sides if side.failed)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


#: Measures of a run besides its metrics. None if a measure is not recorded.
MEASURES: dict[str, Callable[[RunMeasures], float | None]] = {
    "skip_rate": lambda run: run.skip_rate,
    "skipped": lambda run: run.skipped,
    "updates": lambda run: run.updates,
    "steps": lambda run: run.steps,
    "scale_first": lambda run: run.scale.get("first"),
    "scale_min": lambda run: run.scale.get("min"),
    "scale_max": lambda run: run.scale.get("max"),
    "scale_last": lambda run: run.scale.get("last"),
    "terms_per_second": lambda run: run.terms_per_second,
    "train_seconds": lambda run: run.train_seconds,
    "peak_memory": lambda run: run.peak_memory or None,
    "energy": lambda run: run.energy,
    "zero_gradients": lambda run: run.zero_gradients,
    "failed": lambda run: float(failed(run)),
}

#: Measures that are only meaningful for complete runs.
OF_WHOLE_RUNS = ("train_seconds", "energy")

#: Full name of an arm to its runs, and arithmetic entry to measure to value.
Runs = Mapping[str, Sequence[RunMeasures]]
Arithmetic = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Sample:
    """Values of one side of an expected statement: a measure of an arm's runs for each seed, or one number.

    Attributes:
        name: The side as written: ``ARM.MEASURE``, or a number.
        values: Seed to value; empty for a number.
        number: The value for every seed, of a number or of an arithmetic entry; None for an arm.
        failed: Seeds without a value because their runs failed numerically.
        missing: Seeds whose runs have no record of the value.
        step: Resolution of a metric that counts whole samples; 0 for measures without such rounding.
    """

    name: str
    values: Mapping[int, float] = field(default_factory=dict)
    number: float | None = None
    failed: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    step: float = 0.0

    @property
    def all_failed(self) -> bool:
        """True if every run of the arm failed numerically, so that there is no value to compare."""
        return bool(self.failed) and not self.values and not self.missing

    @property
    def arm(self) -> str:
        """Name of the arm in ``ARM.MEASURE``, with its group if it has one."""
        return self.name.rpartition(".")[0]

    @property
    def measure(self) -> str:
        """Name of the measure in ``ARM.MEASURE``, such as ``top1``."""
        return self.name.rpartition(".")[2]

    @property
    def mean(self) -> float:
        """Mean of the values over the seeds, or the number. There must be at least one value."""
        return math.fsum(self.values.values()) / len(self.values) if self.number is None else self.number

    @property
    def shown(self) -> str:
        """The mean over the seeds as text; ``nothing`` if there is no value."""
        return in_digits(self.mean) if self.values or self.number is not None else "nothing"


def sample(side: Quantity | float, runs: Runs, arithmetic: Arithmetic) -> Sample:
    """Collect the values of one side of an expected statement, seed by seed.

    Args:
        side: A measure of an existing arm or arithmetic entry, or a number.
        runs: Full name of an arm to its runs.
        arithmetic: Name of an arithmetic entry to measure to value.
    """
    if not isinstance(side, Quantity):
        return Sample(in_digits(side), number=side)
    if side.arm in arithmetic:
        return Sample(str(side), number=arithmetic[side.arm][side.measure])
    of = MEASURES.get(side.measure)
    needs_its_end = of is None or side.measure in OF_WHOLE_RUNS
    values, broken, missing = {}, [], []
    for run in runs.get(side.arm, ()):
        value = run.metrics.get(side.measure) if of is None else of(run)
        if needs_its_end and (failed(run) or (of is None and value is not None and not math.isfinite(value))):
            broken.append(run.seed)
        elif value is None or not math.isfinite(value):
            missing.append(run.seed)
        else:
            values[run.seed] = float(value)
    step = step_of(side.measure, runs.get(side.arm, ())) if of is None else 0.0
    return Sample(str(side), values, None, tuple(broken), tuple(missing), step)


def failed(run: RunMeasures) -> bool:
    """Return whether a run failed numerically or ended with a non-finite final metric."""
    value = run.metrics.get(run.metric_name or "loss")
    return run.exit_code == EXIT_NUMERICS or (value is not None and not math.isfinite(value))


def unknown_measures(expectations: Sequence[Expectation], runs: Runs, arithmetic: Arithmetic) -> list[Problem]:
    """Return a problem for each measure in a recipe's expectations that no run, or no arithmetic entry, has.

    Args:
        expectations: The expectations to check.
        runs: Full name of an arm to its runs. If no run has a metric, measures of arms are not checked.
        arithmetic: Name of an arithmetic entry (numbers computed without training) to measure to value.
    """
    metrics = {name for some in runs.values() for run in some for name in run.metrics}
    problems = []
    for quantity in dict.fromkeys(q for one in expectations for q in one.statement.quantities):
        known = list(arithmetic[quantity.arm]) if quantity.arm in arithmetic else [*sorted(metrics), *MEASURES]
        if quantity.measure not in known and (quantity.arm in arithmetic or metrics):
            guess = did_you_mean(quantity.measure, known)
            hint = f"did you mean {quantity.arm}.{guess}?" if guess else f"known measures: {', '.join(known)}"
            problems.append(Problem(f"expect: {quantity.arm} has no measure '{quantity.measure}'", hint))
    return problems


def in_digits(value: float) -> str:
    """Format a number as text: with four significant digits, or exactly if it is whole and below 1e15."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
