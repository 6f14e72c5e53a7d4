"""The report of one run, finished or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mptrain.report.curves import MOST_BUCKETS
from mptrain.report.exhibits_part import exhibits
from mptrain.report.exponents_part import exponent_blocks
from mptrain.report.history import PHASES, LearnerHistory, Overflows
from mptrain.report.operators_part import operator_blocks
from mptrain.report.page import Block, Bullets, Cell, Page, Plot, Table, Text, Tiles, plots, section, table
from mptrain.report.run_figures import MetricView, loss_figure, metric_figure, quantity_figure
from mptrain.report.run_parts import OpenedRun, commands, environment, open_with_history
from mptrain.report.scaling_part import scaling_blocks
from mptrain.report.wording import UNKNOWN, counted, duration, number, rate, scale_path, share
from mptrain.runlog.layout import RunPaths
from mptrain.runlog.storage import readable_bytes

#: Metrics in one figure where the task has none of its own.
_MOST_METRICS = 4


def run_page(paths: RunPaths) -> Page:
    """The report of a run directory.

    Raises:
        StorageError: It is no run, or ``run.json`` or another small file is damaged.
    """
    opened = open_with_history(paths.root, MOST_BUCKETS)
    history, run = opened.history, opened.run
    notes = Bullets(tuple(history.notes), "warn") if history.notes else None
    return Page(
        over="mptrain, report of a run",
        title=opened.title(),
        status=opened.status,
        lead=_lead(opened),
        sections=(
            section(
                "Summary", _reason(opened), Tiles(_tiles(opened)), _metric_table(opened), _learner_table(opened), notes
            ),
            section("Training", *_training(opened)),
            section("Loss scale and overflows", *scaling_blocks(opened)),
            section("What FP16 holds", *exponent_blocks(opened)),
            section("Events", _events(opened)),
            section("Samples", *exhibits(run)),
            section("Operators and their dtypes", *operator_blocks(history.operators)),
            section("Environment", environment(run, opened.settings)),
            section("Command and configuration", *commands(run)),
        ),
    )


def _lead(opened: OpenedRun) -> str:
    summary, history = opened.run.summary, opened.history
    if not history.steps:
        return "It has no step on record."
    parts = []
    if opened.metric and summary.get("metric") is not None:
        parts.append(f"{opened.metric} {number(summary['metric'])} on {summary.get('metric_split', 'test')} data")
    updates = [learner.updates for learner in history.learners.values()]
    refused = sum(learner.refused for learner in history.learners.values())
    spread = f"{updates[0]:,}" if len(set(updates)) == 1 else f"{min(updates):,} to {max(updates):,}"
    parts.append(f"{spread} updates in {history.steps:,} steps")
    parts.append(f"{counted(refused, 'update')} skipped" if refused else "none skipped")
    return ", ".join(parts) + "."


def _reason(opened: OpenedRun) -> Text | None:
    state = opened.run.state
    if not state.reason:
        return None
    what_to_do = f". To fix it: {state.hint}" if state.hint else ""
    return Text(f"{state.reason}{what_to_do}", "bad" if state.status == "failed" else "warn")


def _tiles(opened: OpenedRun) -> tuple[tuple[str, str, str], ...]:
    summary, history = opened.run.summary, opened.history
    attempts = sum(learner.attempts for learner in history.learners.values())
    refused = sum(learner.refused for learner in history.learners.values())
    planned = summary.get("planned_steps")
    rows = [
        (f"{opened.metric}, {summary.get('metric_split', '')}", number(summary.get("metric")), _about_metric(opened)),
        ("steps", f"{history.steps:,}", f"of {planned:,} planned" if planned and planned != history.steps else ""),
        ("skipped updates", share(refused / attempts) if attempts else UNKNOWN, f"{refused:,} of {attempts:,}"),
        ("throughput", *_throughput(summary)),
        ("peak memory", readable_bytes(int(summary.get("peak_memory") or 0)), _memory_before(summary)),
        ("waiting for data", share(summary.get("data_wait")), "of the training time"),
        ("energy", _energy(summary.get("energy_joules")), "of the whole device, while training"),
    ]
    keep = [bool(opened.metric), True, True, *(summary.get(key) for key in _MEASURED)]
    return tuple(row for row, present in zip(rows, keep, strict=True) if present not in (None, False))


_MEASURED = ("terms_per_second", "peak_memory", "data_wait", "energy_joules")


def _about_metric(opened: OpenedRun) -> str:
    summary = opened.run.summary
    best, interval = summary.get("best_val"), (summary.get("intervals") or {}).get(opened.metric)
    parts = [f"{number(interval[0])} to {number(interval[1])} on other samples (95 %)"] if interval else []
    parts += [f"best {number(best)} on validation data"] if best is not None else []
    return "; ".join(parts)


def _metric_table(opened: OpenedRun) -> Table | None:
    """All metrics of the last evaluations, where there are others than the one in the tile."""
    summary = opened.run.summary
    found = {split: summary[split] for split in _SPLITS if summary.get(split)}
    names = sorted({name for values in found.values() for name in values}, key=lambda name: (name == "loss", name))
    if len(names) < 2:
        return None
    reach = summary.get("intervals") or {}
    rows: list[list[Cell | str]] = [
        [
            name,
            *(number(values.get(name)) for values in found.values()),
            *([" to ".join(map(number, reach[name])) if reach.get(name) else ""] if reach else []),
        ]
        for name in names
    ]
    head = ("metric", *(_SPLITS[split] for split in found), *(["on other samples (95 %)"] if reach else []))
    return table(head, rows, numeric=tuple(range(1, len(head))))


_SPLITS = {"val": "validation data", "test": "test data"}


def _throughput(summary: Mapping[str, Any]) -> tuple[str, str]:
    steady = summary.get("steady_terms_per_second")
    value = rate(steady if steady is not None else summary.get("terms_per_second"))
    warm = " after warm-up" if steady is not None else ""
    return (
        value,
        f"{summary.get('term', 'samples')} a second{warm}; {duration(summary.get('train_seconds'))} of training",
    )


def _memory_before(summary: Mapping[str, Any]) -> str:
    before = summary.get("memory_before")
    return f"{readable_bytes(int(before))} before the model" if before else ""


def _energy(joules: float | None) -> str:
    if joules is None or not math.isfinite(joules):
        return UNKNOWN
    return f"{joules / 1000:,.3g} kJ" if joules >= 1000 else f"{joules:.3g} J"


def _learner_table(opened: OpenedRun) -> Table | None:
    history = opened.history
    others = {phase for overflows in history.overflows.values() for phase in overflows.counts} - set(PHASES)
    phases = (*PHASES, *sorted(others))  # records of another version have words of their own
    rows: list[list[Cell | str]] = []
    for name, learner in history.learners.items():
        counts = history.overflows.get(name, Overflows()).counts
        finite = learner.loss.last()
        path = _path_of(learner)
        rows.append(
            [
                name,
                f"{learner.updates:,}",
                f"{learner.refused:,}",
                number(finite[1]) if finite else "not finite",
                scale_path(path) if history.scaled else "none",
                *(f"{counts.get(phase, 0):,}" for phase in phases),
            ]
        )
    if not rows:
        return None
    head = ("learner", "updates", "skipped", "last loss", "loss scale", *(f"overflows: {phase}" for phase in phases))
    return table(head, rows, numeric=(1, 2, 3, *range(5, len(head))))


def _path_of(learner: LearnerHistory) -> dict[str, float]:
    _, values = learner.loss_scale.extremes()
    finite = [value for value in values if math.isfinite(value)]
    return {"first": finite[0], "min": min(finite), "max": max(finite), "last": finite[-1]} if finite else {}


def _training(opened: OpenedRun) -> list[Block | None]:
    history = opened.history
    if not history.learners:
        return [Text("No step was recorded, so there are no curves.")]
    views = _views(opened)
    learners = history.learners
    norms = {name: learner.grad_norm for name, learner in learners.items()}
    rates = {name: learner.lr for name, learner in learners.items()}
    smoothed = any(len(learner.loss) >= 100 for learner in learners.values())
    how = (
        " Faint: every step, or the extremes of some steps; strong: moving mean over 2 % of the run."
        if smoothed
        else ""
    )
    return [
        plots(
            Plot("loss", f"Loss over steps.{how}", loss_figure(history)),
            Plot("metric", _metric_caption(views), metric_figure(history, views)) if views else None,
            _quantity("grad-norm", "Norm of the unscaled gradients before clipping; steps that overflowed have none.", norms, "gradient norm", True),
            _quantity("lr", "Learning rate; it follows updates, not steps.", rates, "learning rate", False),
        ),
        None if history.evaluations else Text("Nothing was evaluated yet, so there is no metric over steps."),
    ]  # fmt: skip


def _quantity(name: str, caption: str, curves: Mapping[str, Any], unit: str, logarithmic: bool) -> Plot | None:
    if not any(curve.finite() for curve in curves.values()):
        return None
    return Plot(name, caption, quantity_figure(name, unit, curves, logarithmic=logarithmic))


def _views(opened: OpenedRun) -> list[MetricView]:
    """The task's own metric; without one the first metrics that are no loss, else losses; none that has but one point."""
    curves = opened.history.evaluations.get("val") or opened.history.evaluations.get("test") or {}
    found = {name: curve for name, curve in curves.items() if len(curve.means()[0]) > 1}
    if opened.metric in found:
        return [MetricView(opened.metric, opened.run.summary.get("best_val"))]
    names = [name for name in found if name != "loss" and found[name].finite()]
    if opened.run.summary or any(name.endswith("_loss") for name in names):
        return [MetricView(name) for name in names[:_MOST_METRICS]]
    return [MetricView(name) for name in names[:1]]


def _metric_caption(views: list[MetricView]) -> str:
    return f"{', '.join(view.name for view in views)} over steps."


def _events(opened: OpenedRun) -> Table | None:
    ends = opened.history.occurrences
    if not ends.count:
        return None
    tones: dict[str, Any] = {"failure": "bad", "warning": "warn"}
    rows: list[list[Cell | str]] = [
        [f"{step:,}", Cell(kind, tones.get(kind, "")), text] for step, kind, text in ends.kept()
    ]
    note = f"{counted(ends.between, 'event')} in between left out; events.jsonl has all." if ends.between else ""
    return table(("step", "event", "what it says"), rows, numeric=(0,), note=note)
