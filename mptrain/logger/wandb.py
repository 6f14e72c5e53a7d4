"""Weights & Biases, online or offline.

The x axis of every curve is the attempted step as a value of its own, because W&B's own step refuses to go back, and
what is measured by the clock is known before the rows of the device are read.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mptrain.logger.base import TrackedRun, TrackerOptions, load_or_create_id
from mptrain.logger.series import numbers, points, read_table
from mptrain.records import EventRecord, Record


@dataclass(frozen=True)
class WandB(TrackerOptions):
    """One W&B run for each run, whatever the number of attempts.

    Attributes:
        project: W&B's project.
        entity: The user or team it belongs to; None leaves it to W&B.
        mode: ``online``, or ``offline`` to be sent with ``wandb sync`` later; None leaves it to ``WANDB_MODE``.
        tags: Of the W&B run.
        every_steps: Send the curves of each n-th step only; those of overflows are always sent.
    """

    project: str = "mptrain"
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None
    tags: tuple[str, ...] = ()

    def open(self, run: TrackedRun) -> _Run:
        """The W&B run whose id stands in ``RUN/wandb/run_id``; it is made for a new run and gone on with for others."""
        return _Run(self, run)


class _Run:
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
            settings=wandb.Settings(console="off"),  # what this process prints is in its log already
        )
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def take(self, record: Record) -> None:
        """Log what the record adds to curves, as one row; samples; the final numbers as W&B's summary."""
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
        """Wait until everything is sent; the W&B run counts as failed unless the run is done."""
        self._run.finish(exit_code=0 if self._done else 1)
