"""Weights & Biases tracker, online or offline.

The x axis of every curve is a separate metric with the attempted step, because W&B's own step cannot decrease, and
timed values arrive before the step records of the device are read.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mptrain.logger.base import TrackedRun, TrackerOptions, load_or_create_id, numbers, points, read_table
from mptrain.system.records import EventRecord, Record


@dataclass(frozen=True)
class WandB(TrackerOptions):
    """Options of the Weights & Biases (W&B) tracker; all attempts at a training run share one W&B run.

    Attributes:
        project: Name of the W&B project.
        entity: User or team that owns the project; None uses W&B's default.
        mode: ``online``, or ``offline`` to upload with ``wandb sync`` later; None uses ``WANDB_MODE``.
    """

    project: str = "mptrain"
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None
    tags: tuple[str, ...] = ()

    def open(self, run: TrackedRun) -> _Run:
        """Open the W&B run that tracks a training run; the configuration is logged as W&B's config.

        The W&B run's ID is in ``RUN/wandb/run_id``; a new run creates the file.
        """
        return _Run(self, run)


class _Run:
    """Receiver of a run's records that sends them to Weights & Biases as curves, samples and final numbers."""

    def __init__(self, options: WandB, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._samples = run.samples
        self._every_steps = options.every_steps
        self._done = False
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            mode=options.mode,
            tags=options.tags or None,
            name=run.name,
            id=load_or_create_id(run.folder / "wandb" / "run_id", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(console="off"),  # the output of this process is already in its log
        )
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def take(self, record: Record) -> None:
        """Log the values that the record adds to curves as one row, samples, and the final numbers as W&B's summary."""
        if values := points(record, self._every_steps):
            self._run.log({"step": record.step, **values})
        match record:
            case EventRecord(kind="samples"):
                for name in record.fields["files"]:
                    tag = f"samples/{name.rpartition('-')[0]}"
                    self._run.log({"step": record.step, tag: self._sample(self._samples / name)})
            case EventRecord(kind="summary"):
                self._done = True
                self._run.summary.update({f"final/{name}": value for name, value in numbers(record.fields).items()})

    def _sample(self, path: Path) -> Any:
        if path.suffix == ".tsv":
            columns, *rows = read_table(path)
            return self._wandb.Table(columns=columns, data=rows)
        if path.suffix == ".wav":
            return self._wandb.Audio(str(path))
        return self._wandb.Image(str(path))

    def close(self) -> None:
        """Wait until everything is sent; the W&B run is marked as failed unless the run is complete."""
        self._run.finish(exit_code=0 if self._done else 1)
