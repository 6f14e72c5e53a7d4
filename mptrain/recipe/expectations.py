"""The judge of what a recipe expects, by the numbers of its runs: met, not met, or undecided.

Statistics are those of `mptrain.comparison.statistics`. A run that failed numerically has no metric, but still a skip rate:
it is left out, which leaves a statement about metrics undecided, unless all runs of the arm failed; then the arm is worse
than anything. Metrics that count samples are rounded, which intervals take into account; what is ``within 0`` is asked of
every seed as it is, and so are counts, scales and rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mptrain.comparison.results import Interval, RunMeasures
from mptrain.comparison.run_measures import step_of
from mptrain.comparison.statistics import equivalence, mean_interval, rounding_spread
from mptrain.errors import EXIT_NUMERICS, Problem, did_you_mean
from mptrain.recipe.recipe import Expectation
from mptrain.recipe.statements import Quantity, Statement

Outcome = Literal["met", "not met", "undecided"]


@dataclass(frozen=True)
class Finding:
    """An expectation and what the numbers say to it.

    Attributes:
        text: The statement.
        outcome: ``met``; ``not met``: the numbers contradict it; ``undecided``: they do not settle it.
        numbers: Which numbers, and how far they are off, in one sentence.
        statistics: The same as numbers: ``mean``, ``low``, ``high``, ``n``, ``power`` ...; what there is.
    """

    text: str
    outcome: Outcome
    numbers: str
    statistics: dict[str, float] = field(default_factory=dict)


def judge(expectation: Expectation, runs: Runs, arithmetic: Arithmetic) -> Finding:
    """Return whether one expectation is met.

    Args:
        expectation: About arms and entries that are there; see `unknown_measures`.
        runs: Full name of an arm to its runs, of the same seeds.
        arithmetic: Entry to measure to value.
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
        remark = f"{_failures(left, right)}; without that: {found.numbers}"
        found = Finding("", "undecided", remark, found.statistics)
    return Finding(expectation.text, found.outcome, found.numbers, found.statistics)


def _direction(measure: str, runs: Runs) -> int:
    """1 where higher is better, -1 where lower is, 0 where that is not known."""
    for run in (run for some in runs.values() for run in some):
        if run.metric_name == measure and run.higher_is_better is not None:
            return 1 if run.higher_is_better else -1
    return -1 if measure in ("loss", "perplexity") else 0


def _of_failures(statement: Statement, left: Sample, right: Sample, better: int) -> Finding | None:
    """Return what follows where all runs of a side failed: nothing is worse than that."""
    if not (left.all_failed or right.all_failed):
        return None
    who, other = (left, right) if left.all_failed else (right, left)
    count = len(who.failed)
    says = f"{f'all {count} runs' if count > 1 else 'the only run'} of {who.arm} failed numerically"
    if other.failed:
        return Finding("", "undecided", f"{says}; {_failures(other)}")
    if other.missing:
        return Finding("", "undecided", f"{says}; {other.name} is not on record for {_seeds(other.missing)}")
    if who.measure in OF_WHOLE_RUNS:
        return Finding("", "undecided", f"{says}, so what a whole run takes is not on record")
    if better == 0:
        unknown = f"whether a higher {statement.left.measure} is better is not on record"
        return Finding("", "undecided", f"{says}, and {unknown}")
    if statement.relation == "=":
        return Finding("", "not met", f"{says}, those of {other.arm} did not" if other.values else says)
    left_is_lower = (better > 0) == left.all_failed
    return Finding("", "met" if left_is_lower == (statement.relation == "<") else "not met", says)


def _of_gaps(left: Sample, right: Sample) -> Finding | None:
    for side in (left, right):
        if side.missing:
            return Finding("", "undecided", f"{side.name} is not on record for {_seeds(side.missing)}")
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
        return Finding("", "undecided", f"{left.name} has no ratio to {right.name}: not all values are positive")
    differences = [math.log(a) - math.log(b) if statement.is_ratio else a - b for a, b in pairs]
    sides = [
        f"{side.name} {side.shown}" for side in (left, right) if not isinstance(statement.right, float) or side is left
    ]
    steps = [side.step / side.mean if statement.is_ratio else side.step for side in (left, right)]
    of = _Differences(statement, differences, tuple(seeds), ", ".join(sides), rounding_spread(*steps))
    return _same(of) if statement.relation == "=" else _beyond(of)


@dataclass(frozen=True)
class _Differences:
    """Left minus right, seed by seed; of logarithms where ratios are compared.

    Attributes:
        statement: What is claimed of them.
        values: One for each seed.
        seeds: In the same order.
        sides: The means of both sides, for the sentence.
        rounding: Standard deviation of the rounding of a value; of a logarithm, in proportion to the mean.
    """

    statement: Statement
    values: list[float]
    seeds: tuple[int, ...]
    sides: str
    rounding: float = 0.0

    @property
    def bound(self) -> float:
        """The amount of the statement, on the scale of the values."""
        amount = self.statement.amount
        if self.statement.is_ratio:
            return math.log(amount or 1.0)
        return amount or 0.0

    def show(self, value: float) -> str:
        """A difference, a ratio, or, where a number is compared with, the value itself."""
        if self.statement.is_ratio:
            return f"{in_digits(math.exp(value))}x"
        if isinstance(self.statement.right, float):
            return in_digits(value + self.statement.right)
        return f"{round(value, 12):+.4g}"  # what is left of equal decimals is no difference

    def sentence(self, interval: Interval) -> str:
        """Sides, what is compared, and its interval."""
        what = "mean" if isinstance(self.statement.right, float) and not self.statement.is_ratio else "difference"
        what = "ratio" if self.statement.is_ratio else what
        head = f"{self.sides}: {what} {self.show(interval.mean)}" if what != "mean" else self.sides
        if interval.n == 1:
            return f"{head}, one seed"
        if interval.low == interval.high:
            return f"{head}, the same for all {interval.n} seeds"
        low, high = self.show(interval.low), self.show(interval.high)
        return f"{head}, {100 * interval.level:.0f} % interval {low} to {high}, {interval.n} seeds"

    def statistics(self, interval: Interval) -> dict[str, float]:
        """Of the values, on their own scale."""
        found = {"mean": interval.mean, "low": interval.low, "high": interval.high, "spread": interval.spread}
        return {"n": interval.n, "bound": self.bound, **{k: v for k, v in found.items() if math.isfinite(v)}}


_ONE_SEED = "; how much seeds differ is unknown: it takes two at least"


def _beyond(of: _Differences) -> Finding:
    """``<`` and ``>``: the interval of the mean lies wholly beyond the bound."""
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
    return Finding("", "undecided", f"{says}, which does not settle whether it is {side} {of.show(bound)}", numbers)


def _same(of: _Differences) -> Finding:
    """``=``: two one-sided tests against the amount; where the seeds agree, or nothing is allowed, exactly."""
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
    numbers |= {"p": tests.p, "power": tests.power, "low_90": tests.low, "high_90": tests.high}
    if tests.p < tests.alpha:
        ends = f"90 % interval {of.show(tests.low)} to {of.show(tests.high)}"
        return Finding("", "met", f"{says}; {ends} lies within {margin}", numbers)
    if tests.pairs_for_80 is not None:
        numbers["seeds_for_80"] = tests.pairs_for_80
    more = "not even 1,000 seeds" if tests.pairs_for_80 is None else f"{tests.pairs_for_80} seeds"
    power = f"the power with {interval.n} seeds is {100 * tests.power:.0f} %, {more} would reach 80 %"
    return Finding("", "undecided", f"{says}, not shown to be within {margin}; {power}", numbers)


def _exactly(statement: Statement, left: Sample, right: Sample) -> Finding:
    """Two numbers without any chance in them."""
    a, b = left.number or 0.0, right.number or 0.0
    named = f"{left.name} is {in_digits(a)}" + (
        f", {right.name} {in_digits(b)}" if isinstance(statement.right, Quantity) else ""
    )
    amount = statement.amount or 0.0
    if statement.is_ratio and not (a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)):
        return Finding("", "not met", f"{named}: there is no ratio")
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


#: Measures that a run has besides its metrics. None where it is not on record.
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

#: Those of them that say little about a run that ended early.
OF_WHOLE_RUNS = ("train_seconds", "energy")

#: Full name of an arm to its runs, and arithmetic entry to measure to value.
Runs = Mapping[str, Sequence[RunMeasures]]
Arithmetic = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Sample:
    """The values of one side.

    Attributes:
        name: As in the statement.
        values: Seed to value; empty for a number.
        number: The value that holds for every seed; None for an arm.
        failed: Seeds whose runs failed numerically, where that takes their value away.
        missing: Seeds whose runs do not say.
        step: The smallest amount by which a value can change, where rounding to whole samples makes a metric coarse; 0 of
            what is counted or measured as it is.
    """

    name: str
    values: Mapping[int, float] = field(default_factory=dict)
    number: float | None = None
    failed: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    step: float = 0.0

    @property
    def all_failed(self) -> bool:
        """Every run failed numerically, so that nothing is left to compare."""
        return bool(self.failed) and not self.values and not self.missing

    @property
    def arm(self) -> str:
        """The arm alone."""
        return self.name.rpartition(".")[0]

    @property
    def measure(self) -> str:
        """The measure alone."""
        return self.name.rpartition(".")[2]

    @property
    def mean(self) -> float:
        """Of its values; the number where it is one. There must be one."""
        return math.fsum(self.values.values()) / len(self.values) if self.number is None else self.number

    @property
    def shown(self) -> str:
        """Its mean."""
        return in_digits(self.mean) if self.values or self.number is not None else "nothing"


def sample(side: Quantity | float, runs: Runs, arithmetic: Arithmetic) -> Sample:
    """The values of one side of a statement.

    Args:
        side: A measure of an arm or of an arithmetic entry that is there, or a number.
        runs: Full name of an arm to its runs.
        arithmetic: Entry to measure to value.
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
    """Return whether a run ended in numerical failure, or with a metric that is not finite."""
    value = run.metrics.get(run.metric_name or "loss")
    return run.exit_code == EXIT_NUMERICS or (value is not None and not math.isfinite(value))


def unknown_measures(expectations: Sequence[Expectation], runs: Runs, arithmetic: Arithmetic) -> list[Problem]:
    """The measures that are named and that no run, or no arithmetic entry, has.

    Args:
        expectations: About them.
        runs: Full name of an arm to its runs; where none has any metric, names of metrics are not known.
        arithmetic: Entry to measure to value.
    """
    metrics = {name for some in runs.values() for run in some for name in run.metrics}
    problems = []
    for quantity in dict.fromkeys(q for one in expectations for q in one.statement.quantities):
        known = list(arithmetic[quantity.arm]) if quantity.arm in arithmetic else [*sorted(metrics), *MEASURES]
        if quantity.measure not in known and (quantity.arm in arithmetic or metrics):
            guess = did_you_mean(quantity.measure, known)
            hint = f"did you mean {quantity.arm}.{guess}?" if guess else f"there is {', '.join(known)}"
            problems.append(Problem(f"expect: {quantity.arm} has no measure '{quantity.measure}'", hint))
    return problems


def in_digits(value: float) -> str:
    """Four significant digits; whole numbers as they are."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
