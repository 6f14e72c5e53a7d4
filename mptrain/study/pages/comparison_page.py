"""Report page of a comparison or a recipe: the arms' differences from the reference, their fairness, and expectations.

A recipe is a published claim with the runs and the expected results that test it. The blocks show the content of
``verdict.json`` in a recipe's folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from mptrain.config.value_checks import show
from mptrain.report.loss_scale_blocks import Panel, loss_scale_plot
from mptrain.report.page import (
    Block,
    Bullets,
    Cell,
    Code,
    Fold,
    Page,
    Plots,
    Section,
    Table,
    Text,
    Tone,
    facts,
    plots,
    section,
    table,
)
from mptrain.report.plotting import BLACK, dashed_series, ordered_series
from mptrain.report.run_blocks import OpenedRun, exhibits, open_or_reason, shared_parts
from mptrain.report.run_history import BUCKETS, Curve, LearnerHistory, Overflows
from mptrain.runlog.strict_json import read_object, restore_nonfinite
from mptrain.runlog.sweeps import SCHEMA, Sweep, SweepPaths
from mptrain.study.comparison.results import ArmResult, Comparison, read_comparisons
from mptrain.study.pages import comparison_blocks
from mptrain.study.pages.sweep_page import (
    cliffs_plot,
    command_blocks,
    environments,
    points_table,
    progress_cell,
    sweep_plot,
    sweep_title,
)
from mptrain.study.pages.sweep_points import OpenedPoint, numeric_axis, read_points
from mptrain.system.errors import StorageError
from mptrain.system.words import counted, listed

_TONES: Final[dict[str, Tone]] = {
    "REPRODUCED": "good",
    "NOT REPRODUCED": "bad",
    "met": "good",
    "not met": "bad",
    "undecided": "warn",
}


@dataclass(frozen=True)
class SavedVerdict:
    """Content of a recipe's ``verdict.json``; empty if there is none, or with a problem if it cannot be read."""

    fields: Mapping[str, Any]
    problem: str = ""

    @property
    def verdict(self) -> Cell | None:
        """The verdict, ``REPRODUCED`` or ``NOT REPRODUCED``, and with which overrides; None if there is none yet."""
        word = str(self.fields.get("verdict") or "")
        changed = f" with {shlex.join(self.words)}" if self.words else ""
        return Cell(f"{word}{changed}", _TONES.get(word, "warn")) if word else None

    @property
    def words(self) -> list[str]:
        """The user's overrides of every run."""
        words = self.fields.get("words")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def title(self) -> str:
        """Title of the recipe, or its name if it has no title; empty if neither is recorded."""
        return str(self.fields.get("title") or self.fields.get("recipe") or "")


def read_verdict(folder: Path) -> SavedVerdict:
    """Read the verdict on a recipe from its folder. The result is empty if there is none yet, or it is damaged.

    The folder may be that of any comparison, which has no verdict.
    """
    path = SweepPaths(folder).verdict
    try:
        if not path.exists():
            return SavedVerdict({})
        return SavedVerdict(restore_nonfinite(read_object(path, SCHEMA)))
    except StorageError as error:
        return SavedVerdict({}, str(error))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return SavedVerdict({}, f"{path} is damaged: its list of non-finite numbers is invalid")


def expectations_in_words(verdict: SavedVerdict) -> str:
    """Return the number of a recipe's expectations met, not met and undecided in words; empty if none is judged."""
    outcomes = [str(judged.get("outcome")) for judged in _expectations(verdict)]
    if not outcomes or not verdict.verdict:
        return ""
    parts = [f"{outcomes.count('met')} of {counted(len(outcomes), 'expectation')} met"]
    parts += [f"{outcomes.count(word)} {word}" for word in ("not met", "undecided") if word in outcomes]
    return ", ".join(parts) + "."


def _expectations(verdict: SavedVerdict) -> list[Mapping[str, Any]]:
    listed = verdict.fields.get("expectations")
    return [judged for judged in listed if isinstance(judged, Mapping)] if isinstance(listed, list) else []


def claim_blocks(verdict: SavedVerdict) -> list[Block]:
    """Return the part of a recipe's report on its claim: claim and source, table of expectations."""
    fields = verdict.fields
    rows: list[list[Cell | str]] = []
    for judged in _expectations(verdict):
        outcome = str(judged.get("outcome") or "undecided")
        rows.append(
            [str(judged.get("text") or ""), Cell(outcome, _TONES.get(outcome, "")), str(judged.get("numbers") or "")]
        )
    return [
        facts(("claim", str(fields.get("claim") or "")), ("source", str(fields.get("source") or ""))),
        *([Text(verdict.problem, "warn")] if verdict.problem else []),
        table(("expectation", "outcome", "numbers"), rows),
    ]


Read = Callable[[Path], OpenedRun | str]


def comparison_page(paths: SweepPaths, sweep: Sweep | None) -> Page:
    """Return the report of the folder of a comparison or recipe. Verdicts are missing until the jobs are done.

    ``sweep`` has the jobs; None if existing runs are compared.
    """
    # Several sections show the same runs, and opening one reads all of its records.
    read: Read = lru_cache(maxsize=None)(lambda folder: open_or_reason(folder, BUCKETS))
    groups = read_comparisons(paths.comparison) if paths.comparison.exists() else {}
    verdict = read_verdict(paths.root)
    points = read_points(sweep, read) if sweep is not None else []
    recipe = str((sweep.plan if sweep is not None else {}).get("recipe") or verdict.fields.get("recipe") or "")
    smoke = bool(sweep is not None and sweep.plan.get("smoke"))
    title = verdict.title or recipe or (sweep_title(sweep) if sweep is not None and sweep.words else "")
    return Page(
        over="mptrain recipe report" if recipe else "mptrain comparison report",
        title=": ".join(filter(None, (title or " vs ".join(_arms(groups)), "" if verdict.title else _what(groups)))),
        status=verdict.verdict or (progress_cell(sweep) if sweep is not None and sweep.jobs else Cell("done", "good")),
        lead=_lead(groups, verdict, smoke=smoke, waiting=bool(points)),
        sections=(
            section("Claim and verdict", *claim_blocks(verdict)),
            *(_judged(groups, paths.root, read, points) if groups else _waiting(points, smoke=smoke)),
            section("Runs", Fold(f"All {counted(len(points), 'run')}", (points_table(points),)) if points else None),
            section("Environment", *environments(points), *shared_parts(_runs(groups, paths.root, read, points))),
            section("Commands", *_commands(groups, paths.root, sweep, recipe, verdict)),
        ),
    )


def _arms(groups: Mapping[str, Comparison]) -> list[str]:
    names = [result.arm.name for comparison in groups.values() for result in comparison.arms[1:]]
    names += [comparison.reference for comparison in groups.values()]
    return list(dict.fromkeys(names))


def _what(groups: Mapping[str, Comparison]) -> str:
    """Return the model and the data of all runs, ``cnn on digits``, as far as they are the same."""
    runs = [run for comparison in groups.values() for result in comparison.arms for run in result.arm.runs]
    same = [{run.chosen.get(group, "") for run in runs} for group in ("model", "dataset")]
    return " on ".join(name for names in same if len(names) == 1 for name in names if name)


def _runs(
    groups: Mapping[str, Comparison], folder: Path, read: Read, points: Sequence[OpenedPoint]
) -> Iterator[OpenedRun]:
    """Yield the runs of all jobs that can be read, or those of all arms if existing runs are compared."""
    arms = [read(folder / run.path) for some in groups.values() for result in some.arms for run in result.arm.runs]
    for opened in [point.opened for point in points] or arms:
        if isinstance(opened, OpenedRun):
            yield opened


def _lead(groups: Mapping[str, Comparison], verdict: SavedVerdict, *, smoke: bool, waiting: bool) -> str:
    sentences = [expectations_in_words(verdict)]
    for name, comparison in groups.items():
        words = [f"{result.arm.name} {result.verdict.word}" for result in comparison.arms[1:]]
        what = f"{f'{name}: ' if name else ''}{comparison.metric} on {comparison.split} data"
        sentences.append(f"{what}, against {comparison.reference}: {listed(words, 6)}.")
    fatal = sum(objection.fatal for comparison in groups.values() for objection in comparison.objections)
    if fatal:
        sentences.append(f"The comparison is not fair ({counted(fatal, 'objection')} below).")
    if smoke:
        sentences.append("A smoke run only checks that every run works; it gives no verdict.")
    elif waiting and not groups:
        sentences.append("There is no verdict yet.")
    return " ".join(sentence for sentence in sentences if sentence)


def _waiting(points: Sequence[OpenedPoint], *, smoke: bool) -> tuple[Section, ...]:
    if not points:
        return ()
    text = None if smoke else Text("There is no comparison.json yet. It is written after all runs have ended.", "warn")
    return (section("Comparison", text, sweep_plot(points)),)


def _judged(groups: Mapping[str, Comparison], folder: Path, read: Read, points: Sequence[OpenedPoint]) -> list[Section]:
    """Return the sections of a single comparison, or for several groups all tables first and then the details."""
    if len(groups) == 1:
        ((name, comparison),) = groups.items()
        return list(comparison_sections(LoadedComparison(comparison, folder, read, _of_group(points, name))))
    sections = [section("All groups", comparison_blocks.groups_table(groups))]
    sections += [
        section(
            f"{name or 'Others'}: comparison",
            *comparison_blocks.outcome_blocks(comparison),
        )
        for name, comparison in groups.items()
    ]
    for at, (name, comparison) in enumerate(groups.items(), 1):
        parts = comparison_sections(LoadedComparison(comparison, folder, read, _of_group(points, name), f"g{at}-"))[1:]
        blocks: list[Block] = []
        for part in parts:  # figures are always visible, the rest is collapsed
            blocks += [block for block in part.blocks if isinstance(block, Plots)]
            rest = tuple(block for block in part.blocks if not isinstance(block, Plots))
            blocks += [Fold(part.title, rest)] if rest else []
        sections.append(section(f"{name or 'Others'}: details", *blocks))
    return sections


def _of_group(points: Sequence[OpenedPoint], name: str) -> list[OpenedPoint]:
    return [point for point in points if point.job.arm.rpartition("/")[0] == name]


def _commands(
    groups: Mapping[str, Comparison], folder: Path, sweep: Sweep | None, recipe: str, verdict: SavedVerdict
) -> list[Block]:
    if sweep is None:
        runs = [run for comparison in groups.values() for result in comparison.arms for run in result.arm.runs]
        return [Code(shlex.join(["mptrain", "compare", *(os.path.normpath(folder / run.path) for run in runs)]), "sh")]
    if not recipe:
        return command_blocks(sweep)
    smoke = ["--smoke"] if sweep.plan.get("smoke") else []
    return [Code(shlex.join(["mptrain", "reproduce", recipe, *verdict.words, *smoke]), "sh"), *command_blocks(sweep)]


#: Number of arms from which shades of one colour ramp replace separate colours.
_MOST_COLOURS: Final = 14

#: Minimum number of settings of a numeric key for a plot of the metric over it.
_LEAST_SETTINGS: Final = 3

#: Maximum size in bytes of one sample file of an arm.
_MOST_BYTES: Final = 400_000


@dataclass(frozen=True)
class LoadedComparison:
    """A comparison's results with the means to read the records of its runs.

    Attributes:
        folder: The folder that the paths of runs are relative to.
        read: Function that opens a run directory, or returns an error message.
        points: The jobs of the comparison; empty if it compares existing runs.
        prefix: Prefix of the names of its figures, so that several comparisons can share a page.
    """

    comparison: Comparison
    folder: Path
    read: Callable[[Path], OpenedRun | str]
    points: Sequence[OpenedPoint]
    prefix: str = ""


def comparison_sections(compared: LoadedComparison) -> tuple[Section, ...]:
    """Return the sections of a comparison's report: table and verdicts first, then the evidence."""
    comparison = compared.comparison
    arms = [_arm_runs(compared, result) for result in comparison.arms]
    others = len(arms) - 1
    drawn = ordered_series(others) if others >= _MOST_COLOURS else dashed_series(others)
    styles = dict(zip([arm.name for arm in arms], [(BLACK, "-"), *drawn], strict=True))
    lost = tuple(problem for arm in arms for problem in arm.problems)
    return (
        section("Comparison", *comparison_blocks.outcome_blocks(comparison)),
        section("Differences", _differences(compared, styles)),
        section("Fairness: identical in all arms", Bullets(comparison.checks)),
        section("Speed and memory", comparison_blocks.ratios_table(comparison)),
        section("Curves", _curves(comparison, arms, styles, compared.prefix), Bullets(lost, "warn")),
        section("Samples", *_samples(compared, arms)),
        section("At equal updates and samples", comparison_blocks.aligned_table(comparison)),
        section("Configuration", _differing_keys(comparison)),
    )


def _samples(compared: LoadedComparison, arms: Sequence[ArmRuns]) -> list[Block]:
    blocks: list[Block] = []
    for arm, result in zip(arms, compared.comparison.arms, strict=True):
        for opened, run in zip(arm.runs[:1], result.arm.runs, strict=False):
            shown = exhibits(opened.run, over=f"{run.path}/", most_bytes=_MOST_BYTES)
            blocks += [Text(f"{result.arm.name}, seed {run.seed}:"), *shown] if shown else []
    return blocks


def _arm_runs(compared: LoadedComparison, result: ArmResult) -> ArmRuns:
    opened_runs: list[OpenedRun] = []
    problems: list[str] = []
    for run in result.arm.runs:
        opened = compared.read(compared.folder / run.path)
        if isinstance(opened, str):
            problems.append(f"{result.arm.name}, seed {run.seed}: {opened}")
        else:
            opened_runs.append(opened)
            problems += [f"{result.arm.name}, seed {run.seed}: {note}" for note in opened.history.notes]
    return ArmRuns(result.arm.name, tuple(opened_runs), tuple(problems))


def _differences(compared: LoadedComparison, styles: comparison_blocks.Styles) -> Plots:
    comparison, prefix = compared.comparison, compared.prefix
    axis = numeric_axis(compared.points)
    metric = f"{comparison.metric} ({comparison.split})"
    return plots(
        comparison_blocks.forest_plot(f"{prefix}differences", comparison),
        comparison_blocks.seeds_plot(f"{prefix}seeds", comparison, styles),
        cliffs_plot(f"{prefix}cliffs", compared.points, axis, metric)
        if axis is not None and len(axis.values) >= _LEAST_SETTINGS
        else None,
    )


def _differing_keys(comparison: Comparison) -> Table:
    reference = {key: result.differs[key][0] for result in comparison.arms for key in result.differs}
    rows = [
        [key, *(show(result.differs[key][1] if key in result.differs else own) for result in comparison.arms)]
        for key, own in reference.items()
    ]
    return table(("key", *(result.arm.name for result in comparison.arms)), rows)


#: Maximum number of panels in the figure of loss scales.
_MOST_PANELS: Final = 8


@dataclass(frozen=True)
class ArmRuns:
    """Records of an arm of a comparison: the runs that could be opened, and messages about what could not be read."""

    name: str
    runs: tuple[OpenedRun, ...]
    problems: tuple[str, ...]

    def learners(self) -> list[LearnerHistory]:
        """Return the step records of each run's first learner."""
        return [next(iter(run.history.learners.values())) for run in self.runs if run.history.learners]

    def metric(self, name: str) -> list[Curve]:
        """Return the curves of a metric on validation data, one for each run of the arm that has it."""
        curves = [run.history.evaluations.get("val", {}).get(name) for run in self.runs]
        return [curve for curve in curves if curve is not None]

    def panel(self) -> Panel | None:
        """Return the arm's loss scales and overflows as a panel of a figure; None if no loss scale ever changed."""
        curves = [learner.loss_scale for learner in self.learners()]
        overflows: list[Overflows] = []
        for run in self.runs:
            first = next(iter(run.history.learners), "")
            overflows += [run.history.overflows[first]] if first in run.history.overflows else []
        values = {value for curve in curves for value in curve.finite()}
        return Panel(self.name, curves, overflows) if len(values) > 1 else None


def _curves(comparison: Comparison, arms: Sequence[ArmRuns], styles: comparison_blocks.Styles, prefix: str) -> Block:
    """Return plots of losses and metrics with bands, and of the loss scales of arms in which they change."""
    losses = {arm.name: [learner.loss for learner in arm.learners()] for arm in arms}
    if not any(losses.values()):
        return Text("The run directories were moved or deleted, so there are no curves.")
    metric, metrics = comparison.metric, {arm.name: arm.metric(comparison.metric) for arm in arms}
    panels = [panel for arm in arms if (panel := arm.panel()) is not None]
    few = panels[:_MOST_PANELS]
    left = f" The first {len(few)} of {len(panels)} such arms are shown." if len(panels) > len(few) else ""
    caption = f"Loss scales and overflows of all seeds, for the arms whose loss scale changes.{left}"
    known = any(curve.finite() for curves in metrics.values() for curve in curves)
    return plots(
        comparison_blocks.arms_plot(f"{prefix}losses", "training loss", "Training loss", losses, styles),
        comparison_blocks.arms_plot(f"{prefix}metrics", metric, f"{metric} on validation data", metrics, styles)
        if known
        else None,
        loss_scale_plot(f"{prefix}loss-scales", caption, few) if few else None,
    )
