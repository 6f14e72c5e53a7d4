"""Verdicts on arms whose runs are known by their logs alone: equivalent, not inferior, better, worse, or undecided.

An arm is several runs of one setting, and each run gives one number: the values of a run are not independent, so no
verdict comes from the steps of one pair. Runs are compared unpaired unless the caller says which belong together. A
level of 5 % is divided by the number of arms and of looks (Bonferroni), so it holds for all of them together.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from mptrain.comparison.logs.curves import Curve, read_curve
from mptrain.comparison.logs.means import (
    difference_of_means,
    power_of_equivalence,
    rounding_step,
    runs_for_power,
)
from mptrain.comparison.results import Interval
from mptrain.comparison.statistics import equivalence, mean_interval, rounding_spread, unseen_share
from mptrain.numerics.words import counted, listed
from mptrain.system.errors import DataError, UsageError

Form = Literal["equivalent", "not inferior", "beats target"]
Word = Literal[
    "reference", "equivalent", "better", "worse", "not inferior", "beats target", "misses target", "undecided"
]

_ALIKE = "all runs end at the same value, as copies or runs of one seed do"

#: Fewer values may be equal in two runs by chance.
_FEW = 10

#: Number of values at the end of a log by which its rounding is told.
_LOOKED_AT = 200

#: Level of all tests together.
ALPHA = 0.05

#: Words in names of metrics, by which a direction is known.
_LOWER = re.compile(
    r"loss|losses|nll|ce|entropy|xent|mse|rmse|mae|mape|errors?|err|perplexity|ppl|nats|bits|bp[bcd]|[wct]er|eer|fid"
)
_HIGHER = re.compile(
    r"acc|accuracy|top\d+|f1|precision|recall|auc|auroc|map|ap|m?iou|dice|psnr|ssim|bleu|rouge|chrf|score|reward|return"
)

_ALIKE = "all runs end at the same value, as copies or runs of one seed do"


@dataclass(frozen=True)
class Question:
    """Claim that a comparison of logs is asked about.

    Attributes:
        metric: Name of the metric in the logs.
        form: ``equivalent`` (to the reference, within the margin), ``not inferior`` (not worse by the margin or more),
            or ``beats target``.
        margin: Equivalence or non-inferiority margin, in the metric's unit, chosen before the runs; 0 for a target.
        target: Number to beat; NaN without.
        at: ``last``, ``step=N``, or ``last=N`` for the mean of the N last values.
        paired: Runs with the same ``{seed}`` in their paths belong together.
        looks: Number of times that the question is asked while runs come in, this one included.
        lower_is_better: Direction of the metric.
    """

    metric: str
    form: Form
    margin: float
    target: float
    at: str
    paired: bool
    looks: int
    lower_is_better: bool


@dataclass(frozen=True)
class LoggedRun:
    """Run of an arm: its log, and the value at which it is compared; NaN or infinite if it failed there.

    ``rounded_to`` is the step, a power of ten, to which its log rounds values; 0 if it does not.
    """

    path: str
    form: str
    digest: str
    step: int
    value: float
    seed: str = ""
    rounded_to: float = 0.0


@dataclass(frozen=True)
class LoggedArm:
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


@dataclass(frozen=True)
class LogComparison:
    """Comparison of arms by their logs: the question, the arms with the reference first, and notes on the logs.

    ``alpha`` is the level of each test, after division by the numbers of arms and looks.
    """

    question: Question
    arms: tuple[LoggedArm, ...]
    alpha: float
    notes: tuple[str, ...] = ()


def lower_is_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, as a word of its name says; raise UsageError if none does."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    lower, higher = any(map(_LOWER.fullmatch, words)), any(map(_HIGHER.fullmatch, words))
    if lower == higher:
        raise UsageError(f"is a lower or a higher {metric} better?", "say it: --better lower, or --better higher")
    return lower


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
    )
    arms = {
        name: [str(one) for one in ([paths] if isinstance(paths, str | Path) else paths)]
        for name, paths in logs.items()
    }
    if better is None:
        try:
            question = replace(question, lower_is_better=lower_is_better(metric))
        except UsageError:
            _curves(next(iter(arms.values())), question)  # a name that no log has is said first
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
    curves = {name: _curves(paths, question) for name, paths in arms.items()}
    _refuse_copies(curves)
    if question.paired:
        _require_pairs(curves, reference)
    at = _point(question, [one for some in curves.values() for _, one in some])
    runs = {name: tuple(_run(curve, seed, at) for seed, curve in some) for name, some in curves.items()}
    judged = [name for name in names if question.form == "beats target" or name != reference]
    alpha = ALPHA / (len(judged) * question.looks)
    ordered = [*([reference] if reference not in judged else []), *judged]
    results = tuple(
        _judge(name, runs[name], None if name not in judged else runs[reference], question, alpha) for name in ordered
    )
    return LogComparison(question, results, alpha, tuple(_notes(curves, question, at, judged)))


def _curves(paths: Sequence[str], question: Question) -> list[tuple[str, Curve]]:
    """Return the curves of an arm's runs with the names of their pairs."""
    found: list[tuple[str, Curve]] = []
    for pattern in paths:
        before, placeholder, after = pattern.partition("{seed}")
        if question.paired and not placeholder:
            raise UsageError(
                f"{pattern} does not say which runs belong together", "write {seed} where their names differ"
            )
        found_there = glob.glob(f"{before}*{after}" if placeholder else pattern)  # noqa: PTH207 - absolute ones too
        if "*{seed}" in pattern or "{seed}*" in pattern:
            raise UsageError(f"{pattern}: where does a seed end?", "{seed} cannot stand beside *")
        places = sorted(found_there) or [pattern]
        if places == [pattern] and not Path(pattern).exists() and not Path(pattern).parent.is_file():
            hint = "check the path; in a pattern [ is written [[]"
            raise DataError(f"there is no log {pattern}", hint)
        as_regex = fnmatch.translate(pattern.replace("{seed}", "SEED0"))
        seed = re.compile(as_regex.replace("SEED0", "(?P<seed>.+?)")) if placeholder else None
        for place in places:
            named = seed.fullmatch(place) if seed else None
            found.append((named["seed"] if named else "", read_curve(Path(place), question.metric)))
    if question.paired and (twice := [name for name, n in Counter(name for name, _ in found).items() if n > 1]):
        raise UsageError(f"two runs of an arm have the seed {twice[0]}", "an arm has one run for each")
    return found


def _refuse_copies(curves: Mapping[str, Sequence[tuple[str, Curve]]]) -> None:
    """Raise DataError for a log that is there twice, in another format too; a few values may be equal by chance."""
    seen: dict[str, str] = {}
    for some in curves.values():
        for _, curve in some:
            content = hashlib.sha256(curve.steps.tobytes() + curve.values.tobytes()).hexdigest()
            for same in (str(Path(curve.path).resolve()), *([content] if len(curve.values) >= _FEW else [])):
                if other := seen.get(same):
                    raise DataError(f"{other} and {curve.path} are the same log", "give each run once")
                seen[same] = curve.path


def _require_pairs(curves: Mapping[str, Sequence[tuple[str, Curve]]], reference: str) -> None:
    """Raise UsageError if a run has no partner."""
    seeds = {name: {seed for seed, _ in some} for name, some in curves.items()}
    for name, own in seeds.items():
        if alone := sorted(own ^ seeds[reference]):
            there, other = (name, reference) if alone[0] in own else (reference, name)
            why = f"{there} has a run with seed {alone[0]}, and {other} has none"
            raise UsageError(why, "leave it out, or compare without --pair")


@dataclass(frozen=True)
class _Point:
    """Place at which runs are compared: a step, and the number of values up to it whose mean counts."""

    step: int
    values: int = 1


def _point(question: Question, curves: Sequence[Curve]) -> _Point:
    """Return the point that all runs have reached; raise DataError if they end at several and none is chosen."""
    kind, _, number = question.at.partition("=")
    if not re.fullmatch(r"last(=[1-9]\d*)?|step=\d+", question.at, re.ASCII):
        raise UsageError(f"--at {question.at}: not a point of a curve", "write last, last=N or step=N")
    ends = {curve.path: int(curve.steps[-1]) for curve in curves}
    if kind == "last":
        if len({*ends.values()}) > 1:
            first, last = min(ends, key=lambda one: ends[one]), max(ends, key=lambda one: ends[one])
            raise DataError(
                f"the runs end at different steps: {first} at {ends[first]:,}, {last} at {ends[last]:,}",
                f"compare them where all are, with --at step={_common(curves)}, or leave the shorter ones out",
            )
        count = int(number or 1)
        begins = {int(curve.steps[-count]) for curve in curves if len(curve.steps) >= count}
        if len(begins) > 1:
            raise DataError(
                f"the last {count:,} values begin at steps from {min(begins):,} to {max(begins):,}",
                "the runs are logged at different steps: compare them at one, --at step=N",
            )
        return _Point(min(ends.values()), count)
    wanted = int(number)
    for curve in curves:
        if wanted not in curve.steps:
            near = curve.steps[np.argmin(np.abs(curve.steps - wanted))]
            raise DataError(
                f"{curve.path} has no value at step {wanted:,}; the nearest is at {near:,}",
                f"choose a step that all have, such as --at step={_common(curves)}",
            )
    return _Point(wanted)


def _common(curves: Sequence[Curve]) -> int | str:
    """Return the last step at which all runs have a value; ``N`` if there is none."""
    shared = set(curves[0].steps.tolist()).intersection(*(curve.steps.tolist() for curve in curves[1:]))
    return max(shared) if shared else "N"


def _run(curve: Curve, seed: str, at: _Point) -> LoggedRun:
    until = int(np.searchsorted(curve.steps, at.step, side="right"))
    if until < at.values:
        raise DataError(
            f"{curve.path} has {counted(until, 'value')}, not {at.values:,}", "choose a smaller --at last=N"
        )
    value = float(np.mean(curve.values[until - at.values : until]))
    step = rounding_step(curve.values[-_LOOKED_AT:].tolist())
    return LoggedRun(curve.path, curve.form, curve.digest, at.step, value, seed, step)


def _judge(
    name: str, runs: Sequence[LoggedRun], reference: Sequence[LoggedRun] | None, question: Question, alpha: float
) -> LoggedArm:
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
        why="the other arms are compared with it",
    )
    if reference is None:
        return arm
    if question.form == "beats target":
        return _against_target(arm, values, question, alpha)
    judged = _against(arm, values, reference, question, alpha)
    return replace(judged, overturned_at=_overturned_at(judged, values, reference, question, alpha))


def _overturned_at(
    arm: LoggedArm, values: list[float], reference: Sequence[LoggedRun], question: Question, alpha: float
) -> float:
    """Return the value nearest to the mean with which one more run of an arm changes its verdict; NaN if unknown."""
    if arm.verdict == "undecided" or question.paired or len(values) < len(arm.runs):
        return math.nan
    worse = 1.0 if question.lower_is_better else -1.0
    mean, step = statistics.mean(values), _rounded_to(arm.runs)

    def changes(by: float) -> bool:
        value = round((mean + by) / step) * step if step else mean + by  # as the log would round it
        more = replace(arm, runs=(*arm.runs, replace(arm.runs[0], value=value)))
        return _against(more, [*values, value], reference, question, alpha, planned=False).verdict != arm.verdict

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


class _Tests(NamedTuple):
    """Tests of an arm against a reference.

    Attributes:
        outer: Interval of the difference for "better" and "worse".
        inner: That of the one-sided tests.
        inside: Equivalence holds.
        power: Of finding equal arms equivalent (not inferior), and ``needed``: the runs or pairs for 80 % of it.
        note: Further test that has to agree, in words; empty for none.
    """

    outer: Interval
    inner: Interval
    inside: bool
    power: float = math.nan
    needed: int | None = None
    note: str = ""


def _against(
    arm: LoggedArm,
    values: list[float],
    reference: Sequence[LoggedRun],
    question: Question,
    alpha: float,
    *,
    planned: bool = True,
) -> LoggedArm:
    """Judge an arm against a reference; without ``planned``, power and the number of runs needed are left out."""
    others = _finite(reference)
    failed = len(arm.runs) - len(values), len(reference) - len(others)
    if question.paired:
        seeds = {run.seed: run.value for run in reference if math.isfinite(run.value)}
        pairs = [(run.value, seeds[run.seed]) for run in arm.runs if run.seed in seeds and math.isfinite(run.value)]
        values, others = [one for one, _ in pairs], [other for _, other in pairs]
    of_runs = f"{failed[0]} of {len(arm.runs)} runs of it and {failed[1]} of {len(reference)} of the reference"
    not_finite = f"{of_runs} are not finite there" if any(failed) else ""
    if min(len(values), len(others)) < 2:
        few = _too_few(arm, reference, values, others, question, alpha)
        why = f"{not_finite}, and fewer than two of one arm are left" if not_finite else few
        return replace(arm, verdict="undecided", why=why)
    if max(len({*values}), len({*others})) == 1:
        return replace(arm, verdict="undecided", why=_ALIKE)
    rounding = _rounding(arm.runs), _rounding(reference)
    make = _paired_tests if question.paired else _unpaired_tests
    tests = make(values, others, rounding, question, alpha, planned=planned)
    is_worse = (tests.outer.low > 0) if question.lower_is_better else (tests.outer.high < 0)
    if not not_finite:
        word, why = _decide(tests, question, alpha, is_worse=is_worse)
    elif is_worse and not failed[1]:
        word, why = "worse", f"{_in_words(tests.outer, 1 - alpha)}; also, {not_finite}"
    else:
        word, why = "undecided", f"{not_finite}: those that are left are a biased selection"
    return replace(arm, difference=tests.outer, power=tests.power, runs_needed=tests.needed, verdict=word, why=why)


def _paired_tests(
    values: list[float],
    others: list[float],
    rounding: tuple[float, float],
    question: Question,
    alpha: float,
    *,
    planned: bool,
) -> _Tests:
    differences = [one - other for one, other in zip(values, others, strict=True)]
    both = math.hypot(*rounding)
    outer, inner = (mean_interval(differences, level, both) for level in (1 - alpha, 1 - 2 * alpha))
    found = equivalence(differences, question.margin, alpha, both)
    if question.form != "equivalent":
        return _Tests(outer, inner, found.holds)
    skewed = found.p_bootstrap is not None
    note = f"; the differences are skewed, bootstrap-t p = {found.p_bootstrap:.2g}" if skewed else ""
    return _Tests(outer, inner, found.holds, found.power, found.pairs_for_80, note)


def _unpaired_tests(
    values: list[float],
    others: list[float],
    rounding: tuple[float, float],
    question: Question,
    alpha: float,
    *,
    planned: bool,
) -> _Tests:
    outer, inner = (difference_of_means(values, others, level, rounding) for level in (1 - alpha, 1 - 2 * alpha))
    tests = _Tests(outer, inner, _is_within(inner, question.margin))
    if not planned:
        return tests
    one, other = (math.hypot(statistics.stdev(some), by) for some, by in zip((values, others), rounding, strict=True))
    runs, one_sided = (len(values), len(others)), question.form == "not inferior"
    return tests._replace(
        power=power_of_equivalence((one, other), runs, question.margin, alpha, one_sided=one_sided),
        needed=runs_for_power((one, other), question.margin, alpha, one_sided=one_sided),
    )


def _is_within(found: Interval, margin: float) -> bool:
    return -margin < found.low and found.high < margin


def _decide(tests: _Tests, question: Question, alpha: float, *, is_worse: bool) -> tuple[Word, str]:
    """Return the verdict on an arm whose runs are all finite, and its reason."""
    outer, inner, margin = tests.outer, tests.inner, question.margin
    wide, narrow = _in_words(outer, 1 - alpha), _in_words(inner, 1 - 2 * alpha)
    if question.form == "not inferior":
        worst = inner.high if question.lower_is_better else -inner.low
        why = f"{wide}; at most {worst:.4g} worse ({1 - alpha:.3g} one-sided), margin {margin:g}"
        if worst < margin:
            return "not inferior", why
    elif tests.inside:
        return "equivalent", f"{narrow}, within ±{margin:g}{tests.note}"
    elif is_worse or outer.low > 0 or outer.high < 0:
        return "worse" if is_worse else "better", wide + tests.note
    else:
        why = f"{narrow}, {'' if _is_within(inner, margin) else 'not '}within ±{margin:g}{tests.note}"
    if question.form == "not inferior" and is_worse:
        return "worse", why
    if tests.note or math.isnan(tests.power):
        return "undecided", why
    what = "pairs" if question.paired else "runs of each arm"
    return "undecided", f"{why}; {_runs_in_words(tests.needed, what)}"


def _against_target(arm: LoggedArm, values: list[float], question: Question, alpha: float) -> LoggedArm:
    if len(values) < len(arm.runs):
        return replace(
            arm, verdict="undecided", why=f"{len(arm.runs) - len(values)} of {len(arm.runs)} runs are not finite there"
        )
    if len(values) < 2:
        return replace(arm, verdict="undecided", why="one run says nothing of how much runs differ: give two or more")
    if len({*values}) == 1:
        return replace(arm, verdict="undecided", why=_ALIKE)
    found = difference_of_means(values, question.target, 1 - 2 * alpha, (_rounding(arm.runs), 0.0))
    bad = 1 if question.lower_is_better else -1
    beats, misses = (found.high < 0, found.low > 0) if bad > 0 else (found.low > 0, found.high < 0)
    word: Word = "beats target" if beats else "misses target" if misses else "undecided"
    why = f"mean less target {found.mean:+.4g}, one-sided {1 - alpha:.3g} bounds {found.low:+.4g} and {found.high:+.4g}"
    return replace(arm, difference=found, verdict=word, why=why)


def _too_few(
    arm: LoggedArm,
    reference: Sequence[LoggedRun],
    values: list[float],
    others: list[float],
    question: Question,
    alpha: float,
) -> str:
    """Return why one run of an arm decides nothing, and how many would, by the spread of the other arm."""
    why = "one run of an arm says nothing of how much its runs differ"
    many, runs = (values, arm.runs) if len(values) > len(others) else (others, reference)
    if len(many) < 2 or question.paired:
        return f"{why}: give two or more of each"
    spread = math.hypot(statistics.stdev(many), _rounding(runs))
    needed = runs_for_power((spread, spread), question.margin, alpha, one_sided=question.form == "not inferior")
    as_others = f"if they differ as those of the other arm (standard deviation {spread:.3g})"
    return f"{why}; {as_others}, {_runs_in_words(needed, 'runs of each arm')}"


def _runs_in_words(needed: int | None, what: str) -> str:
    if needed is None:
        return f"more than 1,000 {what} would be needed for this margin"
    return f"{needed:,} {what} would find equal arms so with a probability of 80 %"


def _in_words(found: Interval, level: float) -> str:
    return f"difference {found.mean:+.4g}, {100 * level:.6g} % CI {found.low:+.4g} to {found.high:+.4g}"


def _notes(
    curves: Mapping[str, Sequence[tuple[str, Curve]]], question: Question, at: _Point, judged: Sequence[str]
) -> list[str]:
    every = [curve for some in curves.values() for _, curve in some]
    mean = f", by the mean of the last {at.values:,} values" if at.values > 1 else ""
    better = "lower" if question.lower_is_better else "higher"
    notes = [f"compared at step {at.step:,}{mean}; {better} is better"]
    if repeated := [curve for curve in every if curve.repeated]:
        twice = "steps are there twice, as after a resume; the later values count"
        notes.append(f"{listed([one.path for one in repeated], 3)}: {twice}")
    if uncounted := [curve.path for curve in every if curve.counted]:
        notes.append(f"{listed(uncounted, 3)}: without steps, so that values are counted")
    if len(forms := {curve.form for curve in every}) > 1:
        notes.append(f"formats: {', '.join(sorted(forms))}")
    if len(judged) * question.looks > 1:
        each = ALPHA / (len(judged) * question.looks)
        what = f"{counted(len(judged), 'arm')} and {counted(question.looks, 'look')}"
        notes.append(f"{what}: each test has the level {each:.2g}, all together 5 %")
    return notes
