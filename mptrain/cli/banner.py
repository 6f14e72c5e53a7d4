"""What a run says before it starts and after it ends. Plain text, the same on a terminal and in a file."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from mptrain import __version__
from mptrain.cli import wording
from mptrain.cli.rows import print_rows
from mptrain.runlog.storage import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Banner:
    """What is known when training begins.

    Attributes:
        model: Its name, and its size in words.
        dataset: Its name, and the sizes of its splits.
        mode: Name of the precision mode.
        precision: Which dtype everything has, in words.
        scaler: How the loss scale behaves, in words.
        device: What it trains on.
        support: What the device says to the mode; empty when there is nothing to say.
        run: The run directory.
        planned: Steps that will be attempted.
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
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Closing:
    """How a run ended.

    Attributes:
        run: The run directory.
        metric_name: The metric of record.
        metric: Its value at the last evaluation; None without one.
        metric_split: Of which data.
        best_val: The best value on validation data; None without any.
        steps: Batches attempted.
        updates: Updates applied.
        skipped: Updates refused.
        overflows: Overflows by phase.
        scale: ``first``, ``min``, ``max``, ``last`` loss scale; empty before the first step.
        samples_per_second: Training throughput.
        seconds: Wall time of training.
        peak_memory: Bytes.
        epochs: Completed epochs.
        planned_epochs: As ``train.epochs`` said.
        max_steps: As ``train.max_steps`` said.
    """

    run: Path
    metric_name: str
    metric: float | None
    metric_split: str
    best_val: float | None
    steps: int
    updates: int
    skipped: int
    overflows: Mapping[str, int] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    samples_per_second: float = 0.0
    seconds: float = 0.0
    peak_memory: int = 0
    epochs: int = 0
    planned_epochs: int | None = None
    max_steps: int | None = None

    @classmethod
    def from_summary(cls, run: Path, summary: Mapping[str, Any]) -> Closing:
        """The closing of a run, from the numbers of its ``summary.json``."""
        return cls(
            run=run,
            metric_name=summary.get("metric_name", "metric"),
            metric=summary.get("metric"),
            metric_split=summary.get("metric_split", ""),
            best_val=summary.get("best_val"),
            steps=summary.get("steps", 0),
            updates=summary.get("updates", 0),
            skipped=summary.get("skipped", 0),
            overflows=summary.get("overflows") or {},
            scale=summary.get("scale") or {},
            samples_per_second=summary.get("samples_per_second", 0.0),
            seconds=summary.get("train_seconds", 0.0),
            peak_memory=summary.get("peak_memory") or 0,
            epochs=summary.get("epochs", 0),
            planned_epochs=summary.get("planned_epochs"),
            max_steps=summary.get("max_steps"),
        )


def print_banner(banner: Banner, stream: IO[str]) -> None:
    """Prints what is about to be trained, how, on what and where."""
    rows = [
        ("model", banner.model),
        ("dataset", banner.dataset),
        ("precision", f"{banner.mode}: {banner.precision}"),
        ("scaler", banner.scaler),
        ("device", banner.device + (f"; {banner.support}" if banner.support else "")),
        ("steps", f"{banner.planned:,}"),
        ("run", str(banner.run)),
        *(("note", note) for note in banner.notes),
    ]
    print_rows(f"mptrain {__version__}", rows, stream)


def print_closing(closing: Closing, stream: IO[str]) -> None:
    """Prints the outcome of a run and the commands that go on from it."""
    rows = []
    if closing.metric is not None:
        rows.append((closing.metric_name, f"{closing.metric:.4f} on {closing.metric_split or 'the last evaluation'}"))
    if closing.best_val is not None:
        rows.append(("best", f"{closing.best_val:.4f} on val"))
    rows += [
        ("batches", f"{closing.steps:,} attempted, {closing.updates:,} updates, {_skipped(closing)}"),
        ("loss scale", _scale_path(closing.scale)),
        (
            "speed",
            f"{wording.rate(closing.samples_per_second)} samples/s, {wording.duration(closing.seconds)} of training",
        ),
        ("memory", f"{readable_bytes(closing.peak_memory)} at most" if closing.peak_memory else ""),
        ("run", str(closing.run)),
        ("evaluate", f"mptrain eval {shlex.quote(str(closing.run))}"),
        ("go on", f"mptrain resume {shlex.quote(str(closing.run))} {' '.join(_longer(closing))}"),
    ]
    print_rows("done", rows, stream)


def _longer(closing: Closing) -> list[str]:
    """The words that make the run twice as long: those of the limits that ended it."""
    words = []
    if closing.max_steps and closing.steps >= closing.max_steps:
        words.append(f"train.max_steps={2 * closing.max_steps}")
    epochs = closing.planned_epochs or closing.epochs
    if not words or (closing.planned_epochs and closing.epochs >= closing.planned_epochs):
        words.append(f"train.epochs={2 * max(epochs, 1)}")
    return words


def _skipped(closing: Closing) -> str:
    if not closing.skipped and not any(closing.overflows.values()):
        return "none skipped"
    kinds = ", ".join(f"{count} {phase}" for phase, count in closing.overflows.items() if count)
    share = wording.share(closing.skipped / closing.steps) if closing.steps else "0 %"
    return f"{closing.skipped:,} skipped ({share})" + (f"; overflows: {kinds}" if kinds else "")


def _scale_path(scale: Mapping[str, float]) -> str:
    if not scale:
        return ""
    if scale["min"] == scale["max"]:
        return f"{wording.scale_with_power(scale['last'])} throughout"
    path = f"{wording.scale_with_power(scale['first'])} to {wording.scale_with_power(scale['last'])}"
    return f"{path}, between {wording.scale(scale['min'])} and {wording.scale(scale['max'])}"
