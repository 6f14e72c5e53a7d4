"""What a report says of one comparison, as titled parts; of several groups, each with figures of its own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mptrain.comparison.results import ArmResult, Comparison
from mptrain.config.ranges import show
from mptrain.report.canvas import BLACK, dashed_series, ordered_series
from mptrain.report.comparison_curves import ArmRuns, curve_blocks
from mptrain.report.comparison_figures import bars_figure, forest_figure, seeds_figure
from mptrain.report.comparison_tables import (
    aligned_table,
    comparison_table,
    objections_list,
    ratios_table,
    remarks_table,
    verdict_list,
)
from mptrain.report.exhibits_part import exhibits
from mptrain.report.page import Block, Bullets, Cell, Plot, Plots, Section, Table, Text, plots, section, table
from mptrain.report.run_parts import OpenedRun
from mptrain.report.sweep_axes import Point, numeric_axis
from mptrain.report.sweep_page import cliffs_plot

#: Arms with colours of their own; more of them become shades of one ramp.
_MOST_COLOURS: Final = 14

#: Settings of a numeric key from which on the metric is drawn over it.
_LEAST_SETTINGS: Final = 3

#: Bytes of one sample of an arm.
_MOST_BYTES: Final = 400_000

_FOREST: Final = (
    "Differences from the reference, paired by seed. An arm is equivalent where its thick interval lies inside the band, "
    "better or worse where its thin one lies on one side of zero; see the verdicts for the rest."
)


@dataclass(frozen=True)
class Compared:
    """A comparison and where its records are.

    Attributes:
        comparison: What was found.
        folder: What paths of runs are relative to.
        read: Opens a run, or says why it cannot.
        points: The jobs that belong to it; none where runs were compared that existed.
        prefix: Of the names of its figures.
    """

    comparison: Comparison
    folder: Path
    read: Callable[[Path], OpenedRun | str]
    points: Sequence[Point]
    prefix: str = ""


def comparison_sections(compared: Compared) -> tuple[Section, ...]:
    """Table and verdicts first, then what they rest on."""
    comparison = compared.comparison
    arms = [_arm_runs(compared, result) for result in comparison.arms]
    others = len(arms) - 1
    drawn = ordered_series(others) if others >= _MOST_COLOURS else dashed_series(others)
    styles = dict(zip([arm.name for arm in arms], [(BLACK, "-"), *drawn], strict=True))
    lost = tuple(problem for arm in arms for problem in arm.problems)
    return (
        section("Comparison", comparison_table(comparison), verdict_list(comparison)),
        section("Differences", _differences(compared, styles)),
        section("Is it fair?", *_fairness(comparison)),
        section("Speed and memory", ratios_table(comparison), _speed(compared), remarks_table(comparison)),
        section(
            "Curves",
            *curve_blocks(comparison, arms, styles, compared.prefix),
            Bullets(lost, "warn") if lost else None,
        ),
        section("Samples", *_samples(compared, arms)),
        section("At equal work", aligned_table(comparison)),
        section("Configuration", _differing_keys(comparison)),
    )


def _samples(compared: Compared, arms: Sequence[ArmRuns]) -> list[Block]:
    """What the first run of each arm exhibited."""
    blocks: list[Block] = []
    for arm, result in zip(arms, compared.comparison.arms, strict=True):
        for opened, run in zip(arm.runs[:1], result.arm.runs, strict=False):
            shown = exhibits(opened.run, over=f"{run.path}/", most_bytes=_MOST_BYTES)
            blocks += [Text(f"{result.arm.name}, seed {run.seed}:"), *shown] if shown else []
    return blocks


def _arm_runs(compared: Compared, result: ArmResult) -> ArmRuns:
    """The records of an arm's runs."""
    found: list[OpenedRun] = []
    problems: list[str] = []
    for run in result.arm.runs:
        opened = compared.read(compared.folder / run.path)
        if isinstance(opened, str):
            problems.append(f"{result.arm.name}, seed {run.seed}: {opened}")
        else:
            found.append(opened)
            problems += [f"{result.arm.name}, seed {run.seed}: {note}" for note in opened.history.notes]
    return ArmRuns(result.arm.name, tuple(found), tuple(problems))


def _differences(compared: Compared, styles: dict[str, tuple[str, str]]) -> Plots | None:
    comparison, prefix = compared.comparison, compared.prefix
    forest, seeds = f"{prefix}differences", f"{prefix}seeds"
    axis = numeric_axis(compared.points)
    metric = f"{comparison.metric} ({comparison.split})"
    return plots(
        Plot(forest, _FOREST, forest_figure(forest, comparison)) if len(comparison.arms) > 1 else None,
        Plot(
            seeds,
            f"{comparison.metric} of every run; a line joins the runs of a seed.",
            seeds_figure(seeds, comparison, styles),
        ),
        cliffs_plot(f"{prefix}cliffs", compared.points, axis, metric)
        if axis is not None and len(axis.values) >= _LEAST_SETTINGS
        else None,
    )


def _fairness(comparison: Comparison) -> list[Block | None]:
    same: list[Block | None] = [Text("The same in all arms:"), Bullets(comparison.checks)] if comparison.checks else []
    notes: list[Block | None] = (
        [Text("To know when reading it:"), Bullets(comparison.notes)] if comparison.notes else []
    )
    return [objections_list(comparison), *same, *notes]


def _speed(compared: Compared) -> Plots | None:
    throughput: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    energy: dict[str, list[float]] = {}
    for result in compared.comparison.arms:
        done = [run for run in result.arm.runs if run.status == "done"]
        throughput[result.arm.name] = [run.terms_per_second for run in done if run.terms_per_second]
        memory[result.arm.name] = [float(run.peak_memory) for run in done if run.peak_memory]
        energy[result.arm.name] = [run.energy for run in done if run.energy]
    term = next((run.term for result in compared.comparison.arms for run in result.arm.runs), "samples")
    size, unit = _unit(max((value for values in memory.values() for value in values), default=0.0))
    memory = {arm: [value / size for value in values] for arm, values in memory.items()}
    bars = (
        ("throughput", "Throughput after warm-up", f"{term} a second", throughput),
        ("memory", "Peak memory", unit, memory),
        ("energy", "Energy of the device while training", "J", energy),
    )
    return plots(
        *(
            Plot(f"{compared.prefix}{name}", f"{caption}; dots are runs.", bars_figure(f"{compared.prefix}{name}", label, values))
            for name, caption, label, values in bars
            if any(values.values())
        )
    )  # fmt: skip


def _unit(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 2e9 else (1e6, "MB")


def _differing_keys(comparison: Comparison) -> Table | None:
    """The keys in which any arm differs from the reference, with the values of all arms."""
    keys = list(dict.fromkeys(key for result in comparison.arms for key in result.differs))
    if not keys:
        return None
    reference = {key: result.differs[key][0] for result in comparison.arms for key in result.differs}
    rows: list[list[Cell | str]] = [
        [
            key,
            *(show(result.differs[key][1] if key in result.differs else reference[key]) for result in comparison.arms),
        ]
        for key in keys
    ]
    return table(("key", *(result.arm.name for result in comparison.arms)), rows)
