"""Certificate of a comparison of logs: one page with the claim, runs, verdicts, and what they do not exclude."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mptrain.report import plotting
from mptrain.report.page import Block, Bullets, Cell, Page, Plot, Plots, Section, facts, section, table
from mptrain.study.comparison.logs.compare_logs import LogComparison, LoggedArm
from mptrain.study.comparison.logs.runs import Question
from mptrain.study.pages.comparison_blocks import TONES, verdict_list
from mptrain.system.words import UNKNOWN, counted, number, percent


def certificate_page(comparison: LogComparison) -> Page:
    """Return the certificate of a comparison of logs."""
    judged = [arm for arm in comparison.arms if arm.verdict != "reference"]
    worst = min((TONES[arm.verdict] for arm in judged), key=["bad", "warn", "good"].index)
    return Page(
        over="mptrain comparison of logs",
        title=" vs ".join(arm.name for arm in comparison.arms),
        status=Cell(", ".join(dict.fromkeys(arm.verdict for arm in judged)), worst),
        lead=" ".join(f"{arm.name}: {arm.verdict}." for arm in judged),
        sections=(
            Section("Verdicts", tuple(outcome_blocks(comparison))),
            section(
                "Claim", facts(*_claim(comparison.question, comparison.alpha), ("noise floor", _noise(comparison)))
            ),
            section(
                "Not excluded",
                Bullets((*_not_excluded(comparison.arms), *_overturned(comparison))),
            ),
            section("Runs", _runs_plot(comparison), _runs_table(comparison)),
        ),
    )


def outcome_blocks(comparison: LogComparison) -> list[Block]:
    """Return the table of the arms, the reasons of the verdicts, and notes on the logs."""
    rows: list[list[Cell | str]] = [
        [
            arm.name,
            f"{len(arm.runs)}",
            UNKNOWN if arm.mean is None else f"{number(arm.mean.mean)} ± {_half(arm)}",
            UNKNOWN if arm.mean is None or math.isnan(arm.mean.spread) else number(arm.mean.spread),
            UNKNOWN if arm.difference is None else f"{arm.difference.mean:+.4g}",
            UNKNOWN if math.isnan(arm.power) else percent(arm.power),
            Cell(arm.verdict, TONES.get(arm.verdict, "")),
        ]
        for arm in comparison.arms
    ]
    head = ("", "runs", f"{comparison.question.metric} ± 95 % CI", "spread", "difference", "power", "verdict")
    return [
        table(head, rows),
        verdict_list(comparison),
        Bullets(comparison.notes),
    ]


def _half(arm: LoggedArm) -> str:
    assert arm.mean is not None
    return UNKNOWN if math.isnan(arm.mean.high) else f"{arm.mean.high - arm.mean.mean:.2g}"


def _claim(question: Question, alpha: float) -> list[tuple[str, str]]:
    better = "lower" if question.lower_is_better else "higher"
    claims = {
        "equivalent": f"each arm is equal to the reference up to ±{question.margin:g}",
        "not inferior": f"each arm is less than {question.margin:g} worse than the reference",
        "beats target": f"the mean of each arm is better than {question.target:g}",
    }
    tests = {
        "equivalent": f"two one-sided tests of level {alpha:.2g}; better and worse: two-sided, {alpha:.2g}",
        "not inferior": f"a one-sided test of level {alpha:.2g}",
        "beats target": f"a one-sided test of level {alpha:.2g}",
    }
    return [
        ("claim", claims[question.form]),
        ("metric", f"{question.metric}, {better} is better"),
        ("tests", tests[question.form]),
        ("runs", "paired by seed" if question.paired else "unpaired; degrees of freedom of the smaller arm"),
        ("looks", f"{question.looks}" if question.looks > 1 else ""),
        ("holds if", "the margin, the point and the runs were chosen before the results were seen"),
    ]


def _noise(comparison: LogComparison) -> str:
    """Return the largest difference that could not be told from none with these runs."""
    halves = [arm.difference.high - arm.difference.mean for arm in comparison.arms if arm.difference is not None]
    return f"with these runs a difference of {max(halves):.2g} cannot be told from none" if halves else ""


def _not_excluded(arms: Sequence[LoggedArm]) -> list[str]:
    """Return what the runs cannot exclude: a sentence for the arms of which it says the same."""
    names: dict[str, list[str]] = {}
    for arm in arms:
        share, runs = percent(arm.unseen), len(arm.runs)
        worst = f"up to {share} of runs may fail, or end worse than the worst of {counted(runs, 'run')}"
        what = f"{worst} (95 % confidence, for any distribution)"
        if failed := sum(not math.isfinite(run.value) for run in arm.runs):
            what = f"{failed} of {runs} runs failed, and up to {share} of all may (95 % confidence)"
        names.setdefault(what, []).append(arm.name)
    return [f"{', '.join(some)}: {what}" for what, some in names.items()]


def _overturned(comparison: LogComparison) -> list[str]:
    """Return what would overturn each verdict."""
    return [
        f"{arm.name}: one more run of it that ends at {number(arm.overturned_at)} would end the verdict {arm.verdict!r}"
        for arm in comparison.arms
        if math.isfinite(arm.overturned_at)
    ]


def _runs_table(comparison: LogComparison) -> Block:
    rows = [
        [arm.name, run.path, run.form, f"{run.step:,}", f"{run.value:.7g}", run.digest[:12]]
        for arm in comparison.arms
        for run in arm.runs
    ]
    return table(("arm", "log", "format", "step", comparison.question.metric, "SHA-256"), rows)


def _runs_plot(comparison: LogComparison) -> Block:
    """Return the value of every run, a column for each arm."""
    with plotting.drawing("runs", 2.9) as figure:
        (axes,) = figure.panels()
        for at, arm in enumerate(comparison.arms):
            values = [run.value for run in arm.runs if math.isfinite(run.value)]
            plotting.dots(axes, [at] * len(values), values, edge=True, markersize=5, color=plotting.SERIES[0])
            if arm.mean is not None:
                axes.plot([at - 0.22, at + 0.22], [arm.mean.mean] * 2, color=plotting.BLACK, linewidth=1.8)
        figure.label("run", color=plotting.SERIES[0], marker="o", markersize=5, linestyle="none")
        figure.label("mean", color=plotting.BLACK)
        plotting.numeric_y_axis(axes)
        axes.set_ylabel(comparison.question.metric)
        plotting.ticks_at(axes.xaxis, range(len(comparison.arms)), lambda position: comparison.arms[int(position)].name)
        axes.set_xlim(-0.6, len(comparison.arms) - 0.4)
    what = f"{comparison.question.metric} of every run at the compared point"
    return Plots((Plot("runs", what, figure.svg),))
