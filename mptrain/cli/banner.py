"""What a run says before it starts and after it ends. Plain text, the same on a terminal and in a file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mptrain import __version__
from mptrain.cli import wording
from mptrain.cli.rows import print_rows
from mptrain.runlog.layout import RunPaths
from mptrain.runlog.storage import readable_bytes


@dataclass(frozen=True)
class Banner:
    """What is known when training begins.

    Attributes:
        model: Its name, and its size in words.
        dataset: Its name, and the sizes of its splits.
        mode: Name of the precision mode.
        precision: Which dtype everything has, in words.
        scaler: How each loss scale behaves, in words.
        device: What it trains on.
        support: What the device says to the mode; empty when there is nothing to say.
        run: The run directory.
        planned: Steps that will have been attempted at the end.
        from_step: Steps that were attempted before.
        notes: What the user should know about a continuation, one sentence each.
    """

    model: str
    dataset: str
    mode: str
    precision: str
    scaler: str
    device: str
    support: str
    run: Path
    planned: int
    from_step: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Closing:
    """How a run ended.

    Attributes:
        run: The run directory.
        metric_name: The metric of record.
        metric: Its value at the last evaluation; None without one.
        metric_split: Of which data.
        metric_interval: Ends of its 95 % interval over the choice of the samples; None where nothing is known.
        metrics: All metrics of that evaluation.
        best_val: The best value on validation data; None without any.
        steps: Batches attempted.
        learners: What happened to each learner's updates and loss scale, as in ``summary.json``.
        term: What throughput is counted in, in the plural.
        terms_per_second: Training throughput.
        seconds: Wall time of training.
        peak_memory: Bytes.
        epochs: Completed epochs.
        planned_epochs: As ``train.epochs`` said.
        max_steps: As ``train.max_steps`` said.
        max_minutes: As ``train.max_minutes`` said.
        planned_steps: Steps that would have been attempted with more time.
        trust: What a line that names the run needs behind it, with a blank before (see `mptrain.config.trust`).
        resume: The command that resumes it, on as many ranks.
    """

    run: Path
    metric_name: str
    metric: float | None
    metric_split: str
    best_val: float | None
    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_interval: tuple[float, float] | None = None
    learners: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    term: str = "samples"
    terms_per_second: float = 0.0
    seconds: float = 0.0
    peak_memory: int = 0
    epochs: int = 0
    planned_epochs: int | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    planned_steps: int = 0
    trust: str = ""
    resume: str = "mptrain resume"

    @classmethod
    def from_summary(cls, run: Path, summary: Mapping[str, Any]) -> Closing:
        """The closing of a run, from the numbers of its ``summary.json``."""
        return cls(
            run=run,
            metric_name=summary.get("metric_name") or "metric",
            metric=summary.get("metric"),
            metric_split=summary.get("metric_split", ""),
            metric_interval=(summary.get("intervals") or {}).get(summary.get("metric_name")),
            best_val=summary.get("best_val"),
            metrics=summary.get(summary.get("metric_split", "")) or {},
            steps=summary.get("steps", 0),
            learners=summary.get("learners") or {},
            term=summary.get("term", "samples"),
            terms_per_second=summary.get("terms_per_second", 0.0),
            seconds=summary.get("train_seconds", 0.0),
            peak_memory=summary.get("peak_memory") or 0,
            epochs=summary.get("epochs", 0),
            planned_epochs=summary.get("planned_epochs"),
            max_steps=summary.get("max_steps"),
            max_minutes=summary.get("max_minutes"),
            planned_steps=summary.get("planned_steps", 0),
        )


def print_banner(banner: Banner, stream: IO[str]) -> None:
    """Prints what is about to be trained, how, on what and where."""
    rows = [
        ("model", banner.model),
        ("dataset", banner.dataset),
        ("precision", f"{banner.mode}: {banner.precision}"),
        ("scaler", banner.scaler),
        ("device", banner.device + (f"; {banner.support}" if banner.support else "")),
        ("steps", f"{banner.planned:,}" + (f", from {banner.from_step:,} on" if banner.from_step else "")),
        ("run", str(banner.run)),
        *(("note", note) for note in banner.notes),
    ]
    print_rows(f"mptrain {__version__}", rows, stream)


def print_closing(closing: Closing, stream: IO[str]) -> None:
    """Prints the outcome of a run and the commands that go on from it."""
    rows = []
    if closing.metric is not None:
        where = closing.metric_split or "the last evaluation"
        rows.append((closing.metric_name, f"{closing.metric:.4f} on {where}{_reach(closing.metric_interval)}"))
        if others := {name: value for name, value in closing.metrics.items() if name != closing.metric_name}:
            rows.append(("also", wording.metrics(others)))
    elif closing.metrics:
        rows.append((closing.metric_split, wording.metrics(closing.metrics)))
    if closing.best_val is not None:
        rows.append(("best", f"{closing.best_val:.4f} on val"))
    if _ran_out_of_time(closing):
        rows.append(
            (
                "ended",
                f"train.max_minutes={closing.max_minutes:g} was up, after {closing.steps:,} of "
                f"{closing.planned_steps:,} steps",
            )
        )
    for name, learner in closing.learners.items():
        updates = learner["updates"]
        whose = f"{name}: " if len(closing.learners) > 1 else ""
        rows += [
            (
                "batches",
                f"{whose}{closing.steps:,} attempted, {updates:,} update{'s' * (updates != 1)}, {_skipped(learner)}",
            ),
            ("loss scale", f"{whose}{_scale_path(learner['scale'])}"),
        ]
    rows += [
        (
            "speed",
            f"{wording.rate(closing.terms_per_second)} {closing.term}/s, {wording.duration(closing.seconds)} of training",
        ),
        ("memory", f"{readable_bytes(closing.peak_memory)} at most" if closing.peak_memory else ""),
        ("run", str(closing.run)),
        ("samples", str(samples) if (samples := RunPaths(closing.run).samples).is_dir() else ""),
        ("evaluate", f"mptrain eval {shlex.quote(str(closing.run))}{closing.trust}"),
        ("export", f"mptrain export {shlex.quote(str(closing.run))}{closing.trust}"),
        ("go on", f"{closing.resume} {shlex.quote(str(closing.run))} {' '.join(_longer(closing))}{closing.trust}"),
    ]
    print_rows("done", rows, stream)


def _reach(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f", {interval[0]:.4f} to {interval[1]:.4f} on other samples (95 %)"


def _ran_out_of_time(closing: Closing) -> bool:
    return closing.max_minutes is not None and closing.steps < closing.planned_steps


def _longer(closing: Closing) -> list[str]:
    """The words that make the run twice as long: those of the limits that ended it."""
    words = []
    if _ran_out_of_time(closing):
        words.append(f"train.max_minutes={2 * (closing.max_minutes or 1):g}")
    if closing.max_steps and closing.steps >= closing.max_steps:
        words.append(f"train.max_steps={2 * closing.max_steps}")
    epochs = closing.planned_epochs or closing.epochs
    if not words or (closing.planned_epochs and closing.epochs >= closing.planned_epochs):
        words.append(f"train.epochs={2 * max(epochs, 1)}")
    return words


def _skipped(learner: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{count} {phase}" for phase, count in learner["overflows"].items() if count)
    if not learner["skipped"] and not kinds:
        return "none skipped"
    share = wording.share(learner["skip_rate"])
    return f"{learner['skipped']:,} skipped ({share})" + (f"; overflows: {kinds}" if kinds else "")


def _scale_path(scale: Mapping[str, float]) -> str:
    if not scale:
        return ""
    if scale["min"] == scale["max"]:
        return f"{wording.scale_with_power(scale['last'])} throughout"
    path = f"{wording.scale_with_power(scale['first'])} to {wording.scale_with_power(scale['last'])}"
    if {scale["first"], scale["last"]} == {scale["min"], scale["max"]}:
        return path
    return f"{path}, between {wording.scale(scale['min'])} and {wording.scale(scale['max'])}"
