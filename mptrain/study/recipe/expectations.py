"""Judgement of a recipe's expectations from the measures of its runs: met, not met or undecided.

`mptrain.study.comparison.verdict` decides whether an arm (all runs of one configuration, one per seed) is better than,
worse than or equivalent to another arm, or a number. Numerical failures count as in a comparison; counts, scales and
rates are those of failed runs too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from mptrain.study.comparison.compare_arms import direction_of
from mptrain.study.comparison.results import ArmVerdict, RunMeasures
from mptrain.study.comparison.run_measures import step_of
from mptrain.study.comparison.statistics import rounding_spread
from mptrain.study.comparison.verdict import PairedEvidence, Sample, decide, pair, sample
from mptrain.study.recipe.recipe import Expectation
from mptrain.system.errors import EXIT_NUMERICS, Problem, suggest
from mptrain.system.words import of_seeds

Outcome = Literal["met", "not met", "undecided"]

#: Full name of an arm, such as ``fp32`` or ``sgd/fp32``, to its runs.
Runs = Mapping[str, Sequence[RunMeasures]]

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
    "train_seconds": lambda run: None if failed(run) else run.train_seconds,
    "peak_memory": lambda run: run.peak_memory or None,
    "energy": lambda run: None if failed(run) else run.energy,
    "zero_gradients": lambda run: run.zero_gradients,
    "lost_updates": lambda run: run.lost_updates,
    "failed": lambda run: float(failed(run)),
}


@dataclass(frozen=True)
class ExpectationResult:
    """Outcome of one expectation of a recipe, with the numbers behind it.

    Attributes:
        text: The expectation in the words of the recipe.
        outcome: ``met``, ``not met`` (the numbers contradict it) or ``undecided`` (the numbers do not decide it).
        numbers: The numbers, the reason and the distance from what is expected, in one sentence.
        statistics: The available statistics as numbers: ``mean``, ``low``, ``high``, ``n``, ``power``, ``off`` ...
    """

    text: str
    outcome: Outcome
    numbers: str
    statistics: dict[str, float] = field(default_factory=dict)


def judge_expectation(expectation: Expectation, runs: Runs) -> ExpectationResult:
    """Judge whether one expectation of a recipe is met by the measures of its runs.

    Args:
        expectation: The expectation, with full names of arms that have runs.
        runs: The runs of every arm. All arms have the same seeds.
    """
    measure, other, times = expectation.measure, expectation.other, expectation.times
    samples = {name: _sample(measure, runs[name]) for name in (expectation.arm, other) if isinstance(name, str)}
    for name, measured in samples.items():
        if measured.missing:
            why = f"{measure} of {name} is not recorded for {of_seeds(measured.missing)}"
            return ExpectationResult(expectation.text, "undecided", why)
    reference = _scaled(samples[other], times) if isinstance(other, str) else times * other
    step = 0.0 if measure in MEASURES else step_of(measure, [run for name in samples for run in runs[name]])
    question = _Question(
        measure,
        _is_higher_better(measure, runs),
        samples[expectation.arm],
        reference,
        rounding_spread(step, times * step if isinstance(other, str) else 0.0),
    )
    outcome, why, evidence = _ANSWERS[expectation.relation](expectation, question)
    statistics = _statistics(expectation, evidence)
    if outcome == "not met" and (off := statistics.get("off", 0.0)) > 0:
        why += f"; off by {in_digits(off)}"
    means = ", ".join(f"{name} {_mean(measured)}" for name, measured in samples.items())
    return ExpectationResult(expectation.text, outcome, f"{means}: {why}", statistics)


@dataclass(frozen=True)
class _Question:
    """Values of both sides of an expectation, as `pair` takes them."""

    measure: str
    higher_is_better: bool
    arm: Sample
    reference: Sample | float
    rounding: float

    def ask(self, *, margin: float | None = None, bound: float = 0.0) -> PairedEvidence:
        return pair(
            self.measure,
            self.higher_is_better,
            self.arm,
            self.reference,
            rounding=self.rounding,
            margin=margin,
            bound=bound,
        )


_Answer = tuple[Outcome, str, PairedEvidence]


def _order(expectation: Expectation, question: _Question) -> _Answer:
    """Judge ``above`` and ``below``: the arm has to be better or worse, by the direction of the measure."""
    bound = _bound(expectation)
    evidence = question.ask(bound=bound)
    verdict = decide(evidence)
    if isinstance(question.reference, Sample) and evidence.reference_failed and verdict.word == "undecided":
        # Failures of the reference make no arm better, but the other way round they can make it worse.
        mirrored = replace(question, arm=question.reference, reference=question.arm)
        turned = decide(mirrored.ask(bound=-bound))
        if turned.word == "worse":
            verdict = ArmVerdict("better", f"{expectation.other} against {expectation.arm}: {turned.why}")
    if verdict.word == "undecided":
        return "undecided", verdict.why, evidence
    expected = "better" if (expectation.relation == "above") == question.higher_is_better else "worse"
    return "met" if verdict.word == expected else "not met", verdict.why, evidence


def _equality(expectation: Expectation, question: _Question) -> _Answer:
    """Judge ``equals``: equivalent up to ``within``, or without it the same at every seed."""
    within = expectation.within
    if within is None:
        return _sameness(question)
    evidence = question.ask(margin=within)
    verdict = decide(evidence)
    if verdict.word == "equivalent":
        return "met", verdict.why, evidence
    # Only a difference beyond both ends of the margin contradicts that the values are equal.
    beyond = {decide(question.ask(bound=bound)).word for bound in (within, -within)}
    return "not met" if beyond in ({"better"}, {"worse"}) else "undecided", verdict.why, evidence


def _sameness(question: _Question) -> _Answer:
    evidence = question.ask()
    verdict, difference = decide(evidence), evidence.difference
    if difference is not None and (difference.mean or difference.spread > 0):
        return "not met", f"the values differ by {in_digits(difference.mean)} on average", evidence
    if difference is None or difference.n < 2 or evidence.failed or evidence.reference_failed:
        return "not met" if verdict.word == "worse" else "undecided", verdict.why, evidence
    return "met", f"the same at all {difference.n} seeds", evidence


_ANSWERS = {"equals": _equality, "below": _order, "above": _order}


def _bound(expectation: Expectation) -> float:
    return (expectation.by or 0.0) * (1 if expectation.relation == "above" else -1)


def _statistics(expectation: Expectation, evidence: PairedEvidence) -> dict[str, float]:
    """Return the finite statistics, with the distance of the mean from what is expected as ``off``."""
    difference, tests = evidence.difference, evidence.equivalence
    if difference is None:
        return {}
    statistics = {name: value for name, value in asdict(difference).items() if name != "level"}
    if expectation.relation == "equals":
        statistics |= {"bound": expectation.within or 0.0, "off": abs(difference.mean) - (expectation.within or 0.0)}
    else:
        off = _bound(expectation) - difference.mean
        statistics |= {"bound": _bound(expectation), "off": off if expectation.relation == "above" else -off}
    if tests is not None:
        statistics |= {"low_90": tests.low, "high_90": tests.high, "p": tests.p, "p_bootstrap": tests.p_bootstrap}
        statistics |= {"power": tests.power, "unseen": tests.unseen, "seeds_for_80": tests.pairs_for_80}
    return {name: value for name, value in statistics.items() if value is not None and math.isfinite(value)}


def _sample(measure: str, runs: Sequence[RunMeasures]) -> Sample:
    """Collect a measure of an arm's runs. Runs that failed numerically have no metric."""
    if of := MEASURES.get(measure):
        return sample(runs, of, lambda run: False)
    return sample(
        runs, lambda run: run.metrics.get(measure), lambda run: failed(run) or _is_nonfinite(run.metrics.get(measure))
    )


def _scaled(measured: Sample, times: float) -> Sample:
    return replace(measured, values={seed: times * value for seed, value in measured.values.items()})


def _mean(measured: Sample) -> str:
    return in_digits(math.fsum(measured.values.values()) / len(measured.values)) if measured.values else "has no value"


def _is_higher_better(measure: str, runs: Runs) -> bool:
    """Return the direction of a measure; up is better where it is unknown or does not matter."""
    having = (run for some in runs.values() for run in some if measure in run.metrics)
    directions = (direction_of(measure, run) for run in having)
    return measure in MEASURES or next((known for known in directions if known is not None), True)


def failed(run: RunMeasures) -> bool:
    """Return whether a run failed numerically or ended with a non-finite final metric."""
    return run.exit_code == EXIT_NUMERICS or _is_nonfinite(run.metrics.get(run.metric_name or "loss"))


def _is_nonfinite(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def unknown_measures(expectations: Sequence[Expectation], runs: Runs) -> list[Problem]:
    """Return a problem for each measure in a recipe's expectations that no run has.

    Args:
        expectations: The expectations to check.
        runs: Full name of an arm to its runs. If no run has a metric, nothing is checked.
    """
    metrics = {name for some in runs.values() for run in some for name in run.metrics}
    known = [*sorted(metrics), *MEASURES]
    problems = []
    for measure in dict.fromkeys(
        expectation.measure for expectation in expectations if metrics and expectation.measure not in known
    ):
        hint = suggest(measure, known, f"known measures: {', '.join(known)}")
        problems.append(Problem(f"expect: no run has a measure '{measure}'", hint))
    return problems


def in_digits(value: float) -> str:
    """Format a number as text: with four significant digits, or exactly if it is whole and below 1e15."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
