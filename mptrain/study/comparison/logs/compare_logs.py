"""Comparison of arms whose runs are known by their logs alone, and verdicts by one value of each run.

An arm is several runs of one setting, and each run gives one number: the values of a run are not independent, so no
verdict comes from the steps of one pair. Runs are compared unpaired unless the caller says which belong together. A
level of 5 % is divided by the number of arms and of looks (Bonferroni), so it holds for all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from scipy import special
from typing_extensions import override

from mptrain.runlog.run_state import lower_is_better
from mptrain.study.comparison.logs.runs import LoggedRun, Question, read_arms, read_curves
from mptrain.study.comparison.results import Equivalence, Form, Interval, Judged, JudgedArm, Word
from mptrain.study.comparison.sentences import OF_REFERENCE, Grounds, why
from mptrain.study.comparison.statistics import (
    bootstrap_p,
    difference_of_means,
    improved,
    looks_skewed,
    mean_and_spread,
    mean_interval,
    power_of_equivalence,
    rounding_spread,
    runs_for_power,
    unseen_share,
)
from mptrain.study.comparison.verdict import ArmFacts, fisher_test, sign_test, verdict_of
from mptrain.system.errors import UsageError
from mptrain.system.words import counted, listed


@dataclass(frozen=True, repr=False)
class LoggedArm(JudgedArm):
    """Arm of a comparison of logs, with its verdict.

    Attributes:
        mean: Mean over its finite runs, with its 95 % confidence interval; None without any.
        difference: Mean less that of the reference, or less the target, with a confidence interval of the level that
            the number of arms and looks asks for; None with fewer than two runs in an arm.
        power: Probability that equal arms would have been found equivalent with these runs; NaN if unknown.
        runs_needed: Runs of each arm for a power of 80 %; None if unknown, or more than 1,000.
        unseen: Largest share of runs that may do what none of these did, at 95 % confidence.
        overturned_at: Value that one more run of the arm would have to reach for another verdict; NaN if unknown.
        verdict: One word, and ``why`` one sentence.
    """

    name: str
    runs: tuple[LoggedRun, ...]
    mean: Interval | None
    difference: Interval | None
    power: float
    runs_needed: int | None
    unseen: float
    overturned_at: float
    verdict: Word
    why: str

    @property
    def word(self) -> Word:
        """The verdict, by the name that it has in a comparison of run directories too."""
        return self.verdict


def judge_arm(
    name: str, runs: Sequence[LoggedRun], reference: Sequence[LoggedRun] | None, question: Question, alpha: float
) -> LoggedArm:
    """Return an arm with its verdict.

    ``reference`` are the runs that a claim compares with; None for the reference itself, which is not judged.
    ``alpha`` is the level of each test.
    """
    values = _finite(runs)
    arm = LoggedArm(
        name=name,
        runs=tuple(runs),
        mean=mean_interval(values, rounding=_rounding(runs)) if values else None,
        difference=None,
        power=math.nan,
        runs_needed=None,
        unseen=_unseen(len(runs) - len(values), len(runs)),
        overturned_at=math.nan,
        verdict="reference",
        why=OF_REFERENCE,
    )
    if reference is None:
        return arm
    if question.form == "beats target":
        return _against_target(arm, values, question, alpha)
    judged = _against(arm, reference, question, alpha)
    return replace(judged, overturned_at=_overturned_at(judged, reference, question, alpha))


def _against(
    arm: LoggedArm, reference: Sequence[LoggedRun], question: Question, alpha: float, *, planned: bool = True
) -> LoggedArm:
    """Judge an arm against a reference; without ``planned``, power and the number of runs needed are left out."""
    failed = len(arm.runs) - len(_finite(arm.runs)), len(reference) - len(_finite(reference))
    of_runs = f"{failed[0]} of {len(arm.runs)} runs of it and {failed[1]} of {len(reference)} of the reference"
    not_finite = f"{of_runs} are not finite there" if any(failed) else ""
    samples = _samples(arm.runs, reference, paired=question.paired)
    failure_p = _failure_p(arm.runs, reference, paired=question.paired) if any(failed) else 1.0
    enough = min(len(samples.values), len(samples.others)) >= 2
    no_spread = enough and not question.paired and max(len({*samples.values}), len({*samples.others})) == 1
    tests = _tests(samples, question, alpha, planned=planned) if enough and not no_spread else None
    unlearned = not any(_have_learned(runs, question) for runs in (arm.runs, reference))
    word, reason = verdict_of(
        ArmFacts(
            tests.difference if tests else None,
            tests is not None and tests.holds,
            not question.lower_is_better,
            form=question.form,
            failed=bool(failed[0]),
            reference_failed=bool(failed[1]),
            failure_p=failure_p,
            paired=question.paired,
            unlearned=unlearned and not (no_spread and samples.values[0] != samples.others[0]),
            no_spread=no_spread,
            alpha=alpha,
        )
    )
    more_of_reference = any(failed) and _failure_p(reference, arm.runs, paired=question.paired) < alpha
    grounds = replace(
        _grounds(question, alpha),
        failed=f"{not_finite}, more of the reference than by chance" if more_of_reference else not_finite,
        failure_p=failure_p,
        few=_few(min(len(samples.values), len(samples.others)), paired=question.paired),
        unlearned="runs are no better than at their start, beyond chance",
    )
    if tests is None:
        needed = None if no_spread or any(failed) else _needed_as_other(samples, question, alpha)
        return replace(arm, verdict=word, why=why(reason, replace(grounds, needed_as_other=needed)))
    equivalence = tests.equivalence
    numbers = replace(grounds, difference=tests.difference, tests=equivalence, alike=tests.alike)
    judged = replace(arm, verdict=word, why=why(reason, numbers))
    if reason == "failures":
        return judged
    needed_runs = equivalence.pairs_for_80
    return replace(judged, difference=tests.difference, power=equivalence.power, runs_needed=needed_runs)


def _grounds(question: Question, alpha: float) -> Grounds:
    """Return what the sentence of each verdict names of a question, with numbers as precise as the table has them."""
    return Grounds(
        question.metric,
        not question.lower_is_better,
        form=question.form,
        alpha=alpha,
        paired=question.paired,
        number=None if math.isnan(question.target) else question.target,
        signed="{:+.4g}".format,
    )


def _failure_p(runs: Sequence[LoggedRun], reference: Sequence[LoggedRun], *, paired: bool) -> float:
    """Return the p value of an exact test that an arm fails more often; 1 if it does not (McNemar, or Fisher)."""
    own, others = ({run.seed for run in some if not math.isfinite(run.value)} for some in (runs, reference))
    if paired:
        return sign_test(len(own - others), len(others - own)) if len(own - others) > len(others - own) else 1.0
    bad, other_bad = len(runs) - len(_finite(runs)), len(reference) - len(_finite(reference))
    more = bad * len(reference) > other_bad * len(runs)
    return fisher_test(bad, len(runs), other_bad, len(reference)) if more else 1.0


def _have_learned(runs: Sequence[LoggedRun], question: Question) -> bool:
    """Return whether runs are better than at their start: beyond chance, or one by more than the margin."""
    if not question.lower_is_better and all(run.value == 0 for run in runs):
        return False
    gains = [run.start - run.value if question.lower_is_better else run.value - run.start for run in runs]
    return improved(gains) or any(gain > question.margin for gain in gains)


@dataclass(frozen=True)
class _Samples:
    """Finite values of an arm and of the reference, pair by pair where runs are paired.

    ``rounding`` are the standard deviations of the rounding error of a value of either.
    """

    values: list[float]
    others: list[float]
    rounding: tuple[float, float]
    paired: bool

    @property
    def differences(self) -> list[float]:
        return [value - other for value, other in zip(self.values, self.others, strict=True)]

    def interval(self, level: float) -> Interval:
        """Return the difference of the means with its confidence interval."""
        if self.paired:
            return mean_interval(self.differences, level, math.hypot(*self.rounding))
        return difference_of_means(self.values, self.others, level, self.rounding)

    def spreads(self) -> tuple[float, ...]:
        """Return the standard deviation of each independent sample: of the differences, or of both arms."""
        if self.paired:
            return (math.hypot(mean_and_spread(self.differences)[1], *self.rounding),)
        both = zip((self.values, self.others), self.rounding, strict=True)
        return tuple(math.hypot(mean_and_spread(some)[1], by) for some, by in both)


def _samples(runs: Sequence[LoggedRun], reference: Sequence[LoggedRun], *, paired: bool) -> _Samples:
    rounding = _rounding(runs), _rounding(reference)
    if not paired:
        return _Samples(_finite(runs), _finite(reference), rounding, paired)
    partners = {run.seed: run.value for run in reference if math.isfinite(run.value)}
    of_pairs = [run for run in runs if run.seed in partners and math.isfinite(run.value)]
    return _Samples([run.value for run in of_pairs], [partners[run.seed] for run in of_pairs], rounding, paired)


class _Tests(NamedTuple):
    """Tests of an arm against a reference.

    Attributes:
        difference: Difference of the means with the interval for "better" and "worse".
        equivalence: The one-sided tests, both or that of no inferiority: the ends of their interval, but no p value of
            the t tests. Unpaired, ``pairs_for_80`` is the number of runs of each arm.
        holds: The claim, equivalence or no inferiority, holds.
        alike: All pairs have the same difference.
    """

    difference: Interval
    equivalence: Equivalence
    holds: bool
    alike: bool


def _tests(samples: _Samples, question: Question, alpha: float, *, planned: bool) -> _Tests:
    inner = samples.interval(1 - 2 * alpha)
    margin, one_sided = question.margin, question.form == "not inferior"
    worst = inner.high if question.lower_is_better else -inner.low
    holds = worst < margin if one_sided else -margin < inner.low and inner.high < margin
    independent = [samples.differences] if samples.paired else [samples.values, samples.others]
    p_bootstrap, power, needed = None, math.nan, None
    if any(map(looks_skewed, independent)):
        side = (1 if question.lower_is_better else -1) if one_sided else 0
        own, other = (math.hypot(*samples.rounding), 0.0) if samples.paired else samples.rounding
        p_bootstrap = bootstrap_p(independent[0], margin, own, side, [] if samples.paired else samples.others, other)
        holds = holds and p_bootstrap < alpha
    if planned:
        spreads = samples.spreads()
        runs = (len(samples.values), len(samples.others))[: len(spreads)]
        power = power_of_equivalence(spreads, runs, margin, alpha, one_sided=one_sided)
        needed = runs_for_power(spreads, margin, alpha, one_sided=one_sided)
    alike = samples.paired and math.isclose(min(independent[0]), max(independent[0]), rel_tol=1e-9, abs_tol=1e-12)
    equivalence = Equivalence(margin, inner.low, inner.high, math.nan, power, needed, alpha, p_bootstrap)
    return _Tests(samples.interval(1 - alpha), equivalence, holds, alike)


def _against_target(arm: LoggedArm, values: list[float], question: Question, alpha: float) -> LoggedArm:
    """Judge an arm against a target, a number that has no spread."""
    failed, no_spread = len(arm.runs) - len(values), len(values) > 1 and len({*values}) == 1
    difference, p_bootstrap, rounding = None, None, _rounding(arm.runs)
    if len(values) > 1 and not no_spread:
        difference = difference_of_means(values, question.target, 1 - 2 * alpha, (rounding, 0.0))
        if looks_skewed(values):
            side = -1 if difference.mean > 0 else 1
            p_bootstrap = bootstrap_p([value - question.target for value in values], 0.0, rounding, side)
    excludes_target = difference is not None and (difference.high < 0 or difference.low > 0)
    word, reason = verdict_of(
        ArmFacts(
            difference,
            excludes_target and (p_bootstrap is None or p_bootstrap < alpha),
            not question.lower_is_better,
            form=question.form,
            failed=bool(failed),
            no_spread=no_spread,
            alpha=alpha,
        )
    )
    grounds = replace(
        _grounds(question, alpha),
        difference=difference,
        failed=f"{failed} of {len(arm.runs)} runs are not finite there" if failed else "",
        few=_few(len(values), paired=False),
        p_bootstrap=p_bootstrap,
    )
    return replace(arm, difference=None if failed else difference, verdict=word, why=why(reason, grounds))


def _overturned_at(arm: LoggedArm, reference: Sequence[LoggedRun], question: Question, alpha: float) -> float:
    """Return the value nearest to the mean with which one more run of an arm changes its verdict; NaN if unknown."""
    values = _finite(arm.runs)
    # One more run of a pair would need a partner.
    if arm.verdict == "undecided" or question.paired or len(values) < len(arm.runs):
        return math.nan
    worse = 1.0 if question.lower_is_better else -1.0
    mean, step = mean_and_spread(values)[0], _rounded_to(arm.runs)

    def changes(by: float) -> bool:
        value = round((mean + by) / step) * step if step else mean + by  # as the log would round it
        more = replace(arm, runs=(*arm.runs, replace(arm.runs[0], value=value)))
        return _against(more, reference, question, alpha, planned=False).verdict != arm.verdict

    def nearest(towards: float) -> float:
        low, high = 0.0, question.margin / 8
        while not changes(towards * high):
            low, high = high, 2 * high
            if high > 1e6 * question.margin:
                return math.inf
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if changes(towards * middle) else (middle, high)
        return high

    if changes(0.0):  # one more run alone does, as the rest is so close to the limit
        return math.nan
    sides = [worse, -worse] if arm.verdict == "equivalent" else [-worse if arm.verdict == "worse" else worse]
    by, towards = min((nearest(towards), towards) for towards in sides)
    return float(mean + towards * by) if math.isfinite(by) else math.nan


def _unseen(failed: int, runs: int) -> float:
    """Return the largest share of runs that may fail, or do what none did, at 95 % confidence (Clopper and Pearson)."""
    if failed == runs:
        return 1.0
    return float(special.betaincinv(failed + 1, runs - failed, 0.95)) if failed else unseen_share(runs)


def _finite(runs: Sequence[LoggedRun]) -> list[float]:
    return [run.value for run in runs if math.isfinite(run.value)]


def _rounding(runs: Sequence[LoggedRun]) -> float:
    """Return the standard deviation of the rounding error of a value of an arm, whose logs round alike."""
    return rounding_spread(_rounded_to(runs))


def _rounded_to(runs: Sequence[LoggedRun]) -> float:
    return min((run.rounded_to for run in runs), default=0.0)  # a coarser step is one by chance


def _few(count: int, *, paired: bool) -> str:
    """Return how many runs the smaller arm has, or how many pairs there are, as a sentence."""
    many = "only one" if count else "no"
    return f"{many} pair of runs is complete" if paired else f"an arm has {many} finite run"


def _needed_as_other(samples: _Samples, question: Question, alpha: float) -> tuple[float, int | None] | None:
    """Return the standard deviation of the arm that has several runs, and how many of each arm it asks for."""
    many, by = max(zip((samples.values, samples.others), samples.rounding, strict=True), key=lambda pair: len(pair[0]))
    if len(many) < 2 or question.paired:
        return None
    spread = math.hypot(mean_and_spread(many)[1], by)
    needed = runs_for_power((spread, spread), question.margin, alpha, one_sided=question.form == "not inferior")
    return spread, needed


#: Level of all tests together.
ALPHA = 0.05


@dataclass(frozen=True, repr=False)
class LogComparison(Judged):
    """Comparison of arms by their logs: the question, the arms with the reference first, and notes on the logs.

    ``alpha`` is the level of each test, after division by the numbers of arms and looks.
    """

    question: Question
    arms: tuple[LoggedArm, ...]
    alpha: float
    notes: tuple[str, ...] = ()

    _NUMBERS = ("power", "runs_needed", "unseen", "overturned_at")

    @override
    def _question(self) -> tuple[str, tuple[str, ...]]:
        return self.question.metric, self.notes


def compare(
    *,
    logs: Mapping[str, str | Path | Sequence[str | Path]],
    metric: str,
    margin: float | None = None,
    target: float | None = None,
    not_inferior: bool = False,
    at: str = "last",
    pair: bool = False,
    looks: int = 1,
    better: Literal["lower", "higher"] | None = None,
    reference: str | None = None,
    where: Mapping[str, str] | None = None,
    pattern: str = "",
) -> LogComparison:
    """Judge arms by the logs of their runs, as ``mptrain compare --logs`` does.

    Args:
        logs: Arms by name, and for each the paths of its logs, with ``*``, ``?`` and ``{seed}``.
        metric: Name of the metric in the logs.
        margin: Largest difference that counts as none, in the metric's unit, chosen before the results were seen.
        target: Number that the mean of each arm is to beat, in place of a reference and a margin.
        not_inferior: Ask only whether an arm is not worse by the margin or more.
        at: ``last``, ``step=N``, or ``last=N`` for the mean of the N last values.
        pair: Runs with the same ``{seed}`` belong together.
        looks: Number of times that the question is asked while runs come in.
        better: ``lower`` or ``higher``; None to take it from the name of the metric.
        reference: Name of the arm that the others are compared with; None for the first.
        where: Column to value, of the rows that count where columns tell rows of one name apart: ``{"split": "val"}``.
        pattern: Regular expression with named groups, of which one has the name of the metric: reads lines of any text.

    Raises:
        UsageError: The question cannot be asked so.
        DataError: A log is damaged, or the runs cannot be compared at the same point.
    """
    if not isinstance(logs, Mapping) or not logs or any(not paths for paths in logs.values()):
        raise UsageError("compare --logs needs arms", "name at least one log of each: {'bf16': 'logs/bf16-*.csv'}")
    if looks < 1 or better not in (None, "lower", "higher") or (target is not None and not math.isfinite(target)):
        what = f"looks={looks}, better={better}, target={target}"
        raise UsageError(what, "looks is 1 or more, better is lower or higher, and a target is finite")
    if target is None and not (margin and 0 < margin < math.inf):
        raise UsageError(
            "compare --logs needs --margin",
            "choose, before you see the results, the largest difference that counts as none: --margin 0.01",
        )
    if target is not None and (margin is not None or not_inferior or pair or reference is not None):
        excess = "leave out --margin, --not-inferior, --pair and --reference"
        raise UsageError("--target asks about one arm at a time", excess)
    form: Form = "beats target" if target is not None else "not inferior" if not_inferior else "equivalent"
    question = Question(
        metric=metric,
        form=form,
        margin=margin or 0.0,
        target=math.nan if target is None else target,
        at=str(at),
        paired=pair,
        looks=looks,
        lower_is_better=better != "higher",
        where={str(name): str(value) for name, value in (where or {}).items()},
        pattern=pattern,
    )
    arms = {
        name: [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        for name, paths in logs.items()
    }
    if better is None:
        try:
            question = replace(question, lower_is_better=lower_is_better(metric))
        except UsageError:
            read_curves(next(iter(arms.values())), question)  # a name that no log has is said first
            raise
    return compare_logs(arms, question, reference or "")


def compare_logs(arms: Mapping[str, Sequence[str]], question: Question, reference: str = "") -> LogComparison:
    """Read the logs of several arms and judge each against a reference, or against a target.

    Args:
        arms: Names of the arms, and for each the paths of its runs; ``*`` and ``?`` stand for any letters, and
            ``{seed}`` for those that name the pair of a run.
        question: The claim.
        reference: Name of the reference; empty for the first arm.

    Raises:
        UsageError: The question cannot be asked of these arms.
        DataError: A log is damaged, or the runs cannot be compared at the same point.
    """
    names = [*arms]
    reference = reference or names[0]
    if reference not in arms:
        raise UsageError(f"no arm is called {reference!r}", f"the arms are {', '.join(names)}")
    if question.form != "beats target" and len(arms) < 2:
        raise UsageError("one arm cannot be compared", "give a second ARM=LOGS, or a number with --target")
    runs, notes = read_arms(arms, question, reference)
    judged = [name for name in names if question.form == "beats target" or name != reference]
    alpha = ALPHA / (len(judged) * question.looks)
    ordered = [*([reference] if reference not in judged else []), *judged]
    results = tuple(
        judge_arm(name, runs[name], None if name not in judged else runs[reference], question, alpha)
        for name in ordered
    )
    many = [arm for arm in results if arm.mean and len(arm.runs) > 1]
    if alike := [arm.name for arm in many if len({run.value for run in arm.runs}) == 1]:
        notes.append(f"{listed(alike, 3)}: all runs end at one value, as copies or runs of one seed do")
    if len(judged) * question.looks > 1:
        tests = f"{counted(len(judged), 'arm')} and {counted(question.looks, 'look')}"
        notes.append(f"{tests}: each test has the level {alpha:.2g}, all together 5 %")
    return LogComparison(question, results, alpha, tuple(notes))
