"""Tables and figures in the report of a comparison: results, verdicts, differences, curves, speed and memory.

``styles`` has colour and line style of each arm, by arm name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mptrain.report import plotting
from mptrain.report.page import Block, Bullets, Cell, Plot, Table, Tone, is_empty, table
from mptrain.report.run_history import MEAN, Curve, in_groups, mean_over_runs
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.study.comparison.results import ArmResult, Comparison, Interval, difference_and_interval, value_and_error
from mptrain.study.comparison.sentences import line
from mptrain.system.words import TIMES, UNKNOWN, elided, percent, rate, share

if TYPE_CHECKING:
    from mptrain.study.comparison.logs.compare_logs import LogComparison

#: Tone of each verdict, of run directories and logs; that of a reference has none.
TONES: Final[dict[str, Tone]] = {
    "better": "good",
    "equivalent": "good",
    "not inferior": "good",
    "beats target": "good",
    "worse": "bad",
    "misses target": "bad",
    "neither has learned": "warn",
    "undecided": "warn",
}


def outcome_blocks(comparison: Comparison) -> list[Block]:
    """Return the outcome of a comparison: its table, the verdicts with reasons, remarks on arms, objections and notes.

    The objections are to the fairness of the comparison, with hints to fix them.
    """
    named: dict[str, list[str]] = {}  # many remarks are about the machine and apply to several arms
    for result in comparison.arms:
        for remark in result.remarks:
            named.setdefault(remark, []).append(result.arm.name)
    checks = comparison.checks
    if len(checks) > 1:
        checks = (f"{len(checks)} conditions of a fair comparison hold; the report lists them under Fairness",)
    blocks = (
        comparison_table(comparison),
        memory_table(comparison),
        verdict_list(comparison),
        Bullets(tuple(f"{', '.join(arms)}: {remark}" for remark, arms in named.items())),
        objections_list(comparison),
        Bullets((*checks, *comparison.notes)),
    )
    return [block for block in blocks if not is_empty(block)]


def comparison_table(comparison: Comparison) -> Table:
    """Return the main table of a comparison's report, with a row for each arm.

    Columns: metric, difference from the reference, throughput, speed, memory, share of skipped steps, verdict.
    """
    term = next((run.term for result in comparison.arms for run in result.arm.runs), "samples")
    metric, reference, energy = comparison.metric, comparison.reference, _energy(comparison)
    measured = (f"{metric} ± 95 % CI", f"Δ vs {reference} [95 % CI]", f"{term}/s", "speed", "peak", energy, "skipped")
    rows: list[list[Cell | str]] = [
        [
            result.arm.name,
            _runs(result),
            value_and_error(result.metric),
            difference_and_interval(result.difference),
            rate(result.throughput.mean) if result.throughput else UNKNOWN,
            _ratio(result, result.speed),
            readable_bytes(round(result.peak.mean)) if result.peak and math.isfinite(result.peak.mean) else UNKNOWN,
            _ratio(result, result.energy),
            share(result.skip_rate),
            Cell(_verdict(result), TONES.get(result.verdict.word, "")),
        ]
        for result in comparison.arms
    ]
    direction = "higher" if comparison.higher_is_better else "lower"
    note = (
        f"{metric} on {comparison.split} data, {direction} is better. Differences within ±{comparison.margin:g} count "
        "as equivalent. Ratios are geometric means over pairs [95 % CI]."
    )
    optional = (measured[2], "skipped", "peak", energy, "speed")
    return table(("arm", "runs", *measured, "verdict"), rows, range(1, 9), note, optional)


def _energy(comparison: Comparison) -> str | None:
    return "energy" if any(result.energy for result in comparison.arms) else None


def ratios_table(comparison: Comparison) -> Table | None:
    """Return the table of ratios to the reference of speed, time, memory and energy; None with fewer than two arms."""
    if len(comparison.arms) < 2:
        return None
    rows = [
        [
            result.arm.name,
            *(_ratio(result, ratio) for ratio in (result.speed, result.time, result.memory, result.energy)),
        ]
        for result in comparison.arms
    ]
    head = ("arm", "speed after warm-up", "training time with warm-up", "peak memory", _energy(comparison))
    note = f"Ratios to {comparison.reference}, with 95 % CI from 3 pairs on."
    return table(head, rows, numeric=range(1, 5), note=note)


def groups_table(groups: Mapping[str, Comparison]) -> Table:
    """Return one table over the groups of a recipe: a row for each arm, with its metric and its difference."""
    rows: list[list[Cell | str]] = []
    for group, comparison in groups.items():
        title = f"{group or 'others'}, {comparison.metric}"
        for result in comparison.arms:
            verdict = Cell(result.verdict.word, TONES.get(result.verdict.word, ""))
            values = value_and_error(result.metric), difference_and_interval(result.difference)
            rows.append([title, result.name, *values, verdict])
            title = ""
    return table(("group", "arm", "value", "Δ", "verdict"), rows, numeric=range(2, 4), note=_OVER_GROUPS)


_OVER_GROUPS: Final = "Means over seeds ± 95 % CI, and differences from the reference [95 % CI]."


def memory_table(comparison: Comparison) -> Table:
    """Return the table of the memory of a training step by use, counted; without rows if no run has recorded it.

    An arm's figures are those of its first run: they do not depend on the seed, but for batches of other lengths.
    """
    counted = {
        result.arm.name: by_use
        for result in comparison.arms
        if (by_use := next((run.memory_by_use for run in result.arm.runs if run.memory_by_use), None))
    }
    uses = list(dict.fromkeys(use for by_use in counted.values() for use, size in by_use.items() if size))
    whole = sum(counted.get(comparison.reference, {}).values())
    rows = [
        [
            arm,
            *(readable_bytes(by_use.get(use, 0)) for use in uses),
            readable_bytes(sum(by_use.values())),
            f"{sum(by_use.values()) / whole:.2f}{TIMES}" if whole else UNKNOWN,
        ]
        for arm, by_use in counted.items()
    ]
    head = ("arm", *(use.replace("_", " ") for use in uses), "together", f"of {comparison.reference}")
    note = "Memory of one training step, counted before training. Activations are those saved for the backward pass."
    return table(head, rows, numeric=range(1, len(head)), note=note)


def _runs(result: ArmResult) -> str:
    """Return the number of runs with a metric, and the total if some runs have none."""
    total, lost = len(result.arm.runs), result.failed + result.missing
    return f"{total - lost} of {total}" if lost else f"{total}"


def _ratio(result: ArmResult, ratio: Interval | None) -> str:
    if result.verdict.word == "reference":
        return f"1.00{TIMES}"
    if ratio is None or not math.isfinite(ratio.mean):
        return UNKNOWN
    spread = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.mean:.2f}{TIMES}{spread}"


def _verdict(result: ArmResult) -> str:
    word, equal = result.verdict.word, result.equivalence
    known = word in ("equivalent", "undecided") and equal is not None and math.isfinite(equal.power)
    return f"{word} (power {percent(equal.power)})" if known and equal else word


def verdict_list(comparison: Comparison | LogComparison) -> Bullets:
    """Return the verdict on each arm of a comparison, except the reference, with its reason as a list of sentences."""
    return Bullets(tuple(line(arm.name, arm.word, arm.why) for arm in comparison.arms if arm.word != "reference"))


def aligned_table(comparison: Comparison) -> Table:
    """Return the table that compares all arms after the same number of updates and after the same number of samples."""
    rows = [
        [
            result.arm.name,
            f"{aligned.at:,} {aligned.by}",
            aligned.quantity,
            value_and_error(aligned.value),
            difference_and_interval(aligned.difference),
        ]
        for result in comparison.arms
        for aligned in result.aligned
    ]
    note = "All arms are compared after the same number of updates or samples, so skipped updates do not distort them."
    head = ("arm", "after", "quantity", "value ± 95 % CI", f"Δ vs {comparison.reference} [95 % CI]")
    return table(head, rows, numeric=(3, 4), note=note)


def objections_list(comparison: Comparison) -> Bullets:
    """Return the objections to the fairness of a comparison, as a list of sentences; a hint of several is said once."""
    objections: dict[tuple[bool, str], list[str]] = {}
    for objection in comparison.objections:
        objections.setdefault((objection.fatal, objection.hint.rstrip(".")), []).append(objection.what.rstrip("."))
    items = [
        f"{'Not comparable' if fatal else 'Caveat'}: {'; '.join(messages)}." + (f" To fix it: {hint}." if hint else "")
        for (fatal, hint), messages in objections.items()
    ]
    return Bullets(tuple(items), "warn")


#: Colour of each verdict. The figure shows the word beside it.
VERDICTS: Final = {
    "better": plotting.BLUE,
    "equivalent": plotting.GREEN,
    "worse": plotting.VERMILLION,
    "undecided": plotting.GREY,
}

#: Distance from zero, in margins, beyond which an arm counts as far away if others are closer.
_FAR: Final = 12

Styles = Mapping[str, tuple[str, str]]


def forest_plot(name: str, comparison: Comparison) -> Plot | None:
    """Plot each arm's difference from the reference with its 95 % and 90 % CI, over the band of the equivalence margin.

    The axis covers the arms near the margin. An arm far outside is drawn as an arrow with its numbers. None with fewer
    than two arms.
    """
    arms = [result for result in comparison.arms if result.verdict.word != "reference"]
    if len(comparison.arms) < 2:
        return None
    limit = _limit(comparison.margin, [_reach(result.difference) for result in arms])
    with plotting.drawing(name, 0.95 + 0.38 * len(arms)) as figure:
        (axes,) = figure.panels()
        axes.axvspan(-comparison.margin, comparison.margin, color=plotting.SKY, alpha=0.22, linewidth=0)
        axes.axvline(0, color=plotting.GREY, linewidth=1)
        axes.set_xlim(-limit, limit)
        for row, result in enumerate(arms):
            _difference(axes, row, result, limit)
        _rows(axes, [result.arm.name for result in arms])
        axes.set_xlabel(f"{elided(comparison.metric, 22)}, minus {elided(comparison.reference, 22)}")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plotting.tick(value)))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        figure.label("95 % CI", color=plotting.GREY, linewidth=1.4)
        figure.label("90 % CI (two one-sided tests)", color=plotting.GREY, linewidth=4.5)
        figure.label(f"margin ±{plotting.tick(comparison.margin)}", Patch(color=plotting.SKY, alpha=0.3, linewidth=0))
    caption = (
        "Differences from the reference, paired by seed. An arm is equivalent if its thick interval lies inside the "
        "band, and better or worse if its thin interval excludes zero. See the verdicts for other cases."
    )
    return Plot(name, caption, figure.svg)


def _reach(difference: Interval | None) -> float:
    """Return the largest distance from zero of an interval or a single difference; NaN if there is none."""
    if difference is None:
        return math.nan
    ends = [abs(end) for end in (difference.low, difference.high) if math.isfinite(end)]
    return max(ends, default=abs(difference.mean))


def _limit(margin: float, reaches: Sequence[float]) -> float:
    known = [reach for reach in reaches if math.isfinite(reach)]
    near = [reach for reach in known if reach <= _FAR * margin]
    return 1.12 * max([*(near or known), 1.5 * margin])


def _difference(axes: Axes, row: int, result: ArmResult, limit: float) -> None:
    colour = VERDICTS.get(result.verdict.word, plotting.GREY)
    difference = result.difference
    text_kwargs: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(1.02, row, result.verdict.word, color=colour, **text_kwargs)
    if difference is None or not math.isfinite(difference.mean):
        axes.text(0.5, row, "no difference available", ha="center", color=plotting.GREY, **text_kwargs)
        return
    if abs(difference.mean) > limit:
        left = difference.mean < 0
        at, mark, text_at, side = (0.02, "<", 0.06, "left") if left else (0.98, ">", 0.94, "right")
        axes.plot([at], [row], transform=text_kwargs["transform"], marker=mark, color=colour, markersize=8)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(text_at, row, difference_and_interval(difference), bbox=white, ha=side, **text_kwargs)
        return
    flat: dict[str, Any] = {"color": colour, "solid_capstyle": "butt"}
    axes.plot([difference.low, difference.high], [row, row], linewidth=1.4, **flat)
    if result.equivalence is not None:
        axes.plot([result.equivalence.low, result.equivalence.high], [row, row], linewidth=4.5, **flat)
    axes.plot([difference.mean], [row], marker="o", color=colour, markersize=6.5, markeredgecolor="white")


def seeds_plot(name: str, comparison: Comparison, styles: Styles) -> Plot:
    """Plot the final metric of every run of a comparison, a column for each arm, with lines between runs of a seed."""
    metric = comparison.metric
    values = {
        result.arm.name: {
            run.seed: run.metrics[metric]
            for run in result.arm.runs
            if run.status == "done" and math.isfinite(run.metrics.get(metric, math.nan))
        }
        for result in comparison.arms
    }
    failed = [at for at, result in enumerate(comparison.arms) if result.failed]
    with plotting.drawing(name, 2.9) as figure:
        (axes,) = figure.panels()
        for seed in sorted({seed for by_seed in values.values() for seed in by_seed}):
            line = [by_seed.get(seed, math.nan) for by_seed in values.values()]
            axes.plot(range(len(values)), line, color=plotting.GREY, linewidth=0.8, alpha=0.5)
        for at, (arm, by_seed) in enumerate(values.items()):
            plotting.dots(
                axes, [at] * len(by_seed), list(by_seed.values()), edge=True, markersize=5, color=styles[arm][0]
            )
            if by_seed:
                axes.plot([at - 0.22, at + 0.22], [fmean(by_seed.values())] * 2, color=plotting.BLACK, linewidth=1.8)
        plotting.numeric_y_axis(axes)
        figure.label("seed", color=plotting.GREY, marker="o", markersize=5, linewidth=0.8)
        figure.label("mean", color=plotting.BLACK)
        if failed:
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.07 * (high - low), high)
            for at in failed:
                plotting.failures_at(axes, [at], 0.035)
            figure.label("failed or diverged", **plotting.FAILED)
        axes.set_ylabel(elided(metric, 22))
        _arms_across(axes, list(values))
    return Plot(name, f"{metric} of every run. Lines join the runs of a seed.", figure.svg)


def arms_plot(name: str, unit: str, what: str, arms: Mapping[str, Sequence[Curve]], styles: Styles) -> Plot | None:
    """Plot a quantity of runs over steps: the mean over the seeds of each arm, with a band of lowest to highest seed.

    ``unit`` labels the vertical axis, and ``what`` names the quantity in the caption.
    """
    merged = {arm: mean_over_runs(curves) for arm, curves in arms.items() if any(curve.finite() for curve in curves)}
    with plotting.drawing(name, 2.7) as figure:
        (axes,) = figure.panels()
        for arm, (steps, means, lows, highs) in merged.items():
            colour, line = styles[arm]
            style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= 40 else {}
            style |= {"color": colour, "linestyle": line, "linewidth": 1.5}
            band = (lows, highs) if len(merged) <= 8 else None
            handle = figure.line(axes, arm, (steps, means), band=band, **style)
            if len(merged) <= plotting.MOST_NAMED:
                figure.label(elided(arm, plotting.NAME), handle)
        plotting.numeric_y_axis(axes, [value for _, means, *_ in merged.values() for value in means], 30)
        axes.set_ylabel(elided(unit, 22))
        plotting.step_axis(axes, max((steps[-1] for steps, *_ in merged.values() if steps), default=1))
    caption = f"{what}, means over seeds. The band spans the lowest to the highest seed."
    caption += in_groups([curve for curves in arms.values() for curve in curves], MEAN)
    return Plot(name, caption, figure.svg, figure.charts)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    plotting.category_y_axis(axes, names)
    axes.grid(visible=False, axis="y")


def _arms_across(axes: Axes, names: Sequence[str]) -> None:
    plotting.ticks_at(axes.xaxis, range(len(names)), lambda value: elided(names[int(value)], 20))
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(visible=False, axis="x")
    if sum(len(elided(name, 20)) + 2 for name in names) > 40:
        for label in axes.get_xticklabels():
            label.set(rotation=40, horizontalalignment="right", rotation_mode="anchor")
