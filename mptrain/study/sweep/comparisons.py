"""Comparisons between arms (all runs of one configuration) that are formed from overrides or from existing runs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mptrain.config.compose import command_with, packages_of
from mptrain.config.config_diff import config_differences, flat_settings, is_below
from mptrain.config.overrides import parse
from mptrain.runlog import last_run, read_run
from mptrain.runlog.run_paths import RUN_JSON
from mptrain.runlog.sweeps import SWEEP_JSON, Sweep, SweepJob, is_sweep, read_sweep
from mptrain.study.comparison.arms import group_into_arms as group_runs
from mptrain.study.comparison.arms import precision_of
from mptrain.study.comparison.compare_arms import MARGIN, compare, direction_of
from mptrain.study.comparison.results import BEST, Arm, Comparison, Objection, RunMeasures, write_comparisons
from mptrain.study.comparison.run_measures import measure
from mptrain.study.sweep.points import Point
from mptrain.system.errors import ConfigError, Problem, StorageError, UsageError, did_you_mean, suggest
from mptrain.system.fields import PositiveFloat
from mptrain.system.validation import build

#: Configuration groups in which arms may differ without being claimed (see `mptrain.study.comparison.fairness`).
_PRECISION_GROUPS = ("precision", "scaler")


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of a comparison between arms (an arm: all runs of one configuration).

    Attributes:
        reference: Name of the arm that all others are compared with; None for the
            choice of `mptrain.study.comparison.arms.choose_reference`.
        margin: Equivalence margin in the metric's unit: smaller differences count as none.
        metric: Name of the compared metric; None for the task's own metric.
        claimed: Configuration keys or sections in which arms may differ, in addition to precision and scaler. Any other
            difference makes a comparison unfair.
        best: Also compare the arms in the groups that are best for them, as a group `BEST`.
    """

    reference: str | None = None
    margin: PositiveFloat = MARGIN
    metric: str | None = None
    claimed: tuple[str, ...] = ()
    best: bool = False

    def as_plan(self) -> dict[str, Any]:
        """Return the options as JSON values for the field ``plan`` of a comparison's ``sweep.json``."""
        return {**asdict(self), "claimed": list(self.claimed)}

    @classmethod
    def of(cls, plan: Mapping[str, Any], where: Path | str = SWEEP_JSON) -> ComparisonOptions:
        """Read the options from the field ``plan`` of a comparison's ``sweep.json``; missing ones get their defaults.

        Other entries are ignored. Raise StorageError, which names the file ``where``, for a wrong type or range.
        """
        try:
            return build(cls, {**plan}, lenient=True)
        except ValueError as error:
            hint = "restore the file from a copy, or start the sweep again"
            raise StorageError(f"{where} is damaged: plan.{error}", hint) from error


def name_arms(points: Sequence[Point]) -> list[Point]:
    """Return the points of a comparison with the names of their arms; points that differ only in the seed form one arm.

    A name consists of the values that differ between arms, such as ``fp32`` for ``precision=fp32``, or of the whole
    overrides if these values are ambiguous. Raise ConfigError if there is only one arm.
    """
    named: list[Point] = []
    arms: dict[str, tuple[str, ...]] = {}
    for point in points:
        words = tuple(word for word in point.varied if _key(word) != "seed")
        name = (_short(words) or "all").replace("/", "_")  # a slash separates group and arm
        if arms.setdefault(name, words) != words:
            name = " ".join(words).replace("/", "_")
            arms[name] = words
        named.append(replace(point, arm=name))
    if len(arms) < 2:
        raise ConfigError(
            "there is only one arm: seed= repeats arms and does not form new ones",
            "give another key several values, for example precision=fp32,amp_dynamic",
        )
    return named


def claimed_by(points: Sequence[Point]) -> tuple[str, ...]:
    """Return the sorted configuration keys in which the arms of a comparison may differ, by the varied overrides.

    Overrides of precision and scaler, whose keys may always differ, claim no further keys. Any other override claims
    every key that differs, because it may choose further parts: a model chooses its optimizer and task. Arms called
    ``GROUP/ARM`` are considered group by group. The points must have configurations and arms.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.arm.rpartition("/")[0], []).append(point)
    return tuple(sorted(set().union(*(_claimed_within(group) for group in groups.values()))))


def _claimed_within(points: Sequence[Point]) -> set[str]:
    common = set.intersection(*(set(point.varied) for point in points))
    swept = {_key(word) for point in points for word in point.varied if word not in common} - {"seed"}
    if all(key.split(".")[0] in _PRECISION_GROUPS for key in swept):
        return set()
    keys: set[str] = set()
    first = points[0].config
    for point in points:
        if first is not None and point.config is not None:
            keys |= config_differences(first.yaml, point.config.yaml).keys()
    return {key for key in keys if key.split(".")[0] not in _PRECISION_GROUPS}


def reference_of(points: Sequence[Point]) -> str:
    """Return the name of the arm that a comparison's other arms are compared with by default.

    This is the only arm in FP32, else the first arm. It is chosen before any run starts, so that a reference whose runs
    fail is not silently replaced.
    """
    full = {point.arm for point in points if point.config is not None and point.config.precision.name == "fp32"}
    return full.pop() if len(full) == 1 else points[0].arm


def judge_sweep(sweep: Sweep) -> dict[str, Comparison]:
    """Compare the arms of a finished sweep group by group, and write the result to its ``comparison.json``.

    Arms called ``GROUP/ARM`` are compared within their group; the key of the others is ``""``. Jobs without a run
    directory become objections in the result.

    Raises:
        UsageError: There is nothing to compare.
        StorageError: The records of a run are damaged, or the result cannot be written.
    """
    options = ComparisonOptions.of(sweep.plan, sweep.paths.json)
    members: dict[str, list[tuple[str, RunMeasures]]] = {}
    lost: dict[str, list[SweepJob]] = {}
    for job in sweep.jobs:
        group, _, arm = job.arm.rpartition("/")
        runs = members.setdefault(group, [])
        if (sweep.folder / job.name / RUN_JSON).exists():
            runs.append((arm, measure(read_run(sweep.folder / job.name))))
        else:
            lost.setdefault(group, []).append(job)
    groups = {}
    for group, runs in members.items():
        without = lost.get(group, [])
        _require_reference(options, [arm for arm, _ in runs], without, sweep)
        arms = group_runs([run for _, run in runs], [arm for arm, _ in runs])
        comparison = with_relative_paths(_compare(arms, options, _notes(sweep)), sweep.folder)
        groups[group] = replace(comparison, objections=(*_lost_arms(without), *comparison.objections))
    if options.best:
        arms, remark, varied, doubts = _at_best(members, options.metric)
        options = replace(options, claimed=(*options.claimed, *varied))
        best = with_relative_paths(_compare(arms, options, [*_notes(sweep), remark]), sweep.folder)
        groups[BEST] = replace(best, objections=(*doubts, *best.objections))
    write_comparisons(sweep.paths.comparison, groups)
    return groups


def _at_best(
    groups: Mapping[str, Sequence[tuple[str, RunMeasures]]], metric: str | None
) -> tuple[tuple[Arm, ...], str, set[str], list[Objection]]:
    """Return each arm with the runs of one group, which these are, the keys in which groups of all differ, and doubts.

    Of each arm it is the group with the best mean metric in the last validation, so that nothing is chosen on the data
    of the comparison. A group with a run that is not done, or has none, is not chosen if another has all.
    """
    by_arm: dict[str, dict[str, list[RunMeasures]]] = {}
    for group, runs in groups.items():
        for arm, run in runs:
            by_arm.setdefault(arm, {}).setdefault(group, []).append(run)
    every = [run for runs in groups.values() for _, run in runs]
    name = metric or next((run.metric_name for run in every if run.metric_name), "loss")
    known = (direction_of(name, run) for run in every if name in run.metrics)
    sign = -1 if next((up for up in known if up is not None), False) else 1
    chosen: dict[str, str] = {}
    varied: list[set[str]] = []
    doubts: list[Objection] = []
    for arm, choices in by_arm.items():
        first, *others = (runs[0] for runs in choices.values())
        varied.append({key for other in others for key in config_differences(first.config, other.config)})
        values = {group: _validated(runs, name, sign) for group, runs in choices.items()}
        chosen[arm] = min(values, key=lambda group: values[group])
        if math.isinf(values[chosen[arm]]):
            what = f"no group of {arm} has a validation of {name} in all of its runs, so none is known to be the best"
            doubts.append(Objection(what, True, "set dataset.val_share above 0, and see why runs have failed"))
    if any(run.split == "val" for run in every):
        what = "groups are chosen by the validation data on which the arms are compared, as there are no test data"
        doubts.append(Objection(what, True, "set dataset.test_share above 0"))
    runs = [(arm, run) for arm, group in chosen.items() for run in by_arm[arm][group]]
    where = ", ".join(f"{arm} {group}" for arm, group in chosen.items())
    arms = group_runs([run for _, run in runs], [arm for arm, _ in runs])
    remark = f"each arm is in the group whose mean metric in the last validation is best: {where}"
    return arms, remark, set.intersection(*varied), doubts


def _validated(runs: Sequence[RunMeasures], metric: str, sign: int) -> float:
    last = []
    for run in runs:
        seen = [value for point in run.course if (value := point.values.get(f"val_{metric}")) is not None]
        last.append(seen[-1] if seen and run.status == "done" else math.nan)
    mean = fmean(last)
    return sign * mean if math.isfinite(mean) else math.inf


def _require_reference(options: ComparisonOptions, arms: Sequence[str], lost: Sequence[SweepJob], sweep: Sweep) -> None:
    """Raise UsageError, with the reason, if no run of the reference arm that the options name has started."""
    gone = [job for job in lost if job.arm.rpartition("/")[2] == options.reference]
    if options.reference not in arms and gone:
        raise UsageError(
            f"the reference {options.reference} has no run to compare with: {gone[0].reason or gone[0].status}",
            f"see {sweep.paths.log(gone[0].name)}; "
            f"to run the missing jobs: {command_with(f'mptrain resume {sweep.folder}', packages_of(sweep))}",
        )


def _lost_arms(lost: Sequence[SweepJob]) -> list[Objection]:
    arms: dict[str, list[SweepJob]] = {}
    for job in lost:
        arms.setdefault(job.arm, []).append(job)
    return [
        Objection(
            f"{len(jobs)} run{'s' if len(jobs) > 1 else ''} of {arm} did not start: {jobs[0].reason or jobs[0].status}",
            False,
            "the numbers do not include them",
        )
        for arm, jobs in arms.items()
    ]


def judge_runs(selectors: Sequence[str], options: ComparisonOptions, *, anyway: bool) -> Comparison:
    """Compare existing runs, grouped into arms whose runs differ only in seed and machine.

    The selectors are run directories, names of runs below ``outputs``, ``last`` for the newest run, or folders of runs
    or of sweeps, which stand for all their runs. ``anyway`` compares the runs even if the comparison is unfair.

    Raises:
        UsageError: There is nothing to compare, or a claimed key does not exist.
        ConfigError: The runs differ in more than the claimed keys.
        StorageError: A path is not a run, or a run is damaged.
    """
    selector_by_path: dict[Path, str] = {}
    for selector in selectors:
        for path in _runs_of(selector):
            selector_by_path.setdefault(path.resolve(), selector)
    runs = [measure(read_run(path)) for path in selector_by_path]
    _require_keys(options.claimed, runs)
    comparison = _compare(group_runs(runs, paths=list(selector_by_path.values())), options, (), anyway=anyway)
    fatal = [objection for objection in comparison.objections if objection.fatal]
    if fatal and not anyway:
        problems = [Problem(objection.what, objection.hint) for objection in fatal]
        keys = "name the keys in which arms may differ with --by KEY,KEY, or compare anyway with --anyway"
        raise ConfigError([*problems, Problem("these runs cannot be compared fairly", keys)])
    return comparison


def single_runs(selectors: Sequence[str]) -> list[RunMeasures]:
    """Return the measures of runs that are compared as they are; empty if a selector, or each arm, has several runs.

    The selectors are run directories, names of runs below ``outputs``, or ``last``.
    """
    path_lists = [_runs_of(selector) for selector in selectors]
    runs = [measure(read_run(paths[0])) for paths in path_lists if len(paths) == 1]
    differ = [[bool(config_differences(run.config, other.config)) for other in runs] for run in runs]
    several = all(row.count(False) > 1 for row in differ) and any(map(any, differ))  # arms, each with several runs
    return [] if len(runs) < len(path_lists) or several else runs


def _compare(
    arms: tuple[Arm, ...], options: ComparisonOptions, notes: Sequence[str], *, anyway: bool = False
) -> Comparison:
    return compare(
        arms,
        reference=_reference(arms, options.reference),
        margin=options.margin,
        metric=options.metric,
        claimed=options.claimed,
        notes=notes,
        anyway=anyway,
    )


def _require_keys(claimed: Sequence[str], runs: Sequence[RunMeasures]) -> None:
    """Raise UsageError, which names the most similar key, if no run has a claimed key or section."""
    keys = {key for run in runs for key in flat_settings(run.config)}
    for claim in claimed:
        if not any(is_below(key, (claim,)) for key in keys):
            hint = suggest(claim, keys, "the config.yaml of a run lists its keys")
            raise UsageError(f"--by {claim}: no run has this key", hint)


def with_relative_paths(comparison: Comparison, folder: Path) -> Comparison:
    """Return a comparison with run paths relative to a folder, so that the folder can be moved with its runs."""

    def moved(arm: Arm) -> Arm:
        return replace(arm, runs=tuple(replace(run, path=os.path.relpath(run.path, folder)) for run in arm.runs))

    return replace(comparison, arms=tuple(replace(result, arm=moved(result.arm)) for result in comparison.arms))


def _reference(arms: Sequence[Arm], wanted: str | None) -> str | None:
    """Return the name of the arm that the user means by ``wanted``; unchanged if none fits.

    ``wanted`` is the name itself, the name after a key (``precision=fp32``), or a precision mode that only one arm has.
    """
    names = [arm.name for arm in arms]
    if wanted is None or wanted in names:
        return wanted
    bare = wanted.removeprefix("precision=")
    of_precision = [arm.name for arm in arms if precision_of(arm.runs[0]) == bare]
    if len(of_precision) == 1:
        return of_precision[0]
    value = wanted.partition("=")[2]
    return value if value in names else wanted


def _notes(sweep: Sweep) -> list[str]:
    unfinished = [job for job in sweep.jobs if job.status not in ("done", "failed")]
    if unfinished:
        line = command_with(f"mptrain resume {sweep.folder}", packages_of(sweep))
        return [f"{len(unfinished)} of {len(sweep.jobs)} runs are unfinished; to run them: {line}"]
    return []


def _runs_of(selector: str) -> list[Path]:
    if selector == "last":
        return [last_run(Path("outputs")).root]
    path = Path(selector)
    if not path.exists() and (named := Path("outputs") / selector).is_dir():
        path = named
    if is_sweep(path):
        return [folder for job in read_sweep(path).jobs if ((folder := path / job.name) / RUN_JSON).exists()]
    if not path.is_dir():
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else [])
        raise UsageError(
            f"there is no run {selector}", f"did you mean {path.parent / near}?" if near else "give a run directory"
        )
    if not (path / RUN_JSON).exists():
        below = sorted(file.parent for file in path.rglob(RUN_JSON))
        if below:
            return below
    return [path]


def _key(word: str) -> str:
    override, _ = parse(word)
    return override.key_or_group if override is not None else word.partition("=")[0]


def _short(words: Sequence[str]) -> str:
    """Return a short arm name: only the option of a group override, other overrides in full."""
    return " ".join(word.partition("=")[2] if "." not in word.partition("=")[0] else word for word in words)
