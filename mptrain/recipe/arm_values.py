"""The values that a statement is about: what each run of an arm says, seed by seed.

Judges nothing (`mptrain.recipe.expectations` does). A run that failed numerically has no metric, but still a skip rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mptrain.comparison.resolution import step_of
from mptrain.comparison.results import RunMeasures
from mptrain.errors import EXIT_NUMERICS, Problem, did_you_mean
from mptrain.recipe.recipe import Expectation
from mptrain.recipe.statements import Quantity

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
    """Whether a run ended in numerical failure, or with a metric that is not finite."""
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
