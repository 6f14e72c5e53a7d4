"""Our own loop: what `mptrain` does in a step, records included."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.loops.base import ByHand, Mode, Work, batches, cast_inputs
from mptrain.config.compose import compose
from mptrain.engine.loop import Loop
from mptrain.engine.rehearsal import rehearse_run
from mptrain.engine.telemetry import Storage
from mptrain.precision.apply import input_dtype
from mptrain.run.build.parts import build
from mptrain.runlog import RecordWriter, create_run
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.system.records import Record, StepRecord

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.workloads.base.batch import Batch


class Ours(ByHand):
    """A step of every learner on a prepared batch: `mptrain.engine.loop.Loop.attempt`.

    Args:
        work: What to train.
        mode: In which precision.
    """

    def __init__(self, work: Work, mode: Mode) -> None:
        parts, options = build(compose(work.line(mode)))
        self.device = work.device
        self.batches = cast_inputs(list(batches(work)), input_dtype(parts.policy))
        self._folder = tempfile.TemporaryDirectory()
        run = create_run(Path(self._folder.name), "benchmark")
        self._seen = _Losses()
        store = CheckpointStore(run.paths.checkpoints, 1)
        self._writer = RecordWriter(run.paths)
        self.loop = Loop(parts, options, Storage(run.paths, self._writer, store, ""), [self._seen])
        parts.model.train()
        rehearse_run(
            parts, options, self.loop.telemetry, self.batches[0], self.loop.planned
        )  # which a run does before its first step, and which chooses kernels

    def step(self, batch: Batch) -> Tensor:  # type: ignore[return]
        """One step; its loss is read from the record."""
        self.loop.attempt(batch)

    def whole_loop(self, steps: int) -> float:
        """Seconds of whole epochs of the training loop, scaled to some steps: fetching and preparation included."""
        loop, trained, started = self.loop, 0, time.perf_counter()
        loop.progress.batch = 0
        while trained < steps:
            loop.train_epoch()
            trained += loop.steps_per_epoch
            loop.progress.begin_epoch(loop.progress.epoch + 1)
        return (time.perf_counter() - started) * steps / trained

    def block_without_record(self, steps: int) -> float:
        """A block, on the same tensors as every other, whose record is neither kept nor written."""
        silent = [(ring, "record") for ring in self.loop.telemetry.rings] + [(self.loop.telemetry.step_log, "note")]
        for owner, method in silent:
            setattr(owner, method, lambda *_: None)
        try:
            return self.block(steps)
        finally:
            for owner, method in silent:
                delattr(owner, method)

    def losses(self, steps: int) -> list[float]:
        """The recorded losses."""
        self._seen.losses.clear()
        for index in range(steps):
            self.step(self.batches[index % len(self.batches)])
        self.loop.telemetry.step_log.flush()
        return list(self._seen.losses)

    def close(self) -> None:
        """Close the record and forget it."""
        self._writer.close()
        self._folder.cleanup()


class _Losses:
    """A sink that keeps the losses of the newest steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def take(self, record: Record) -> None:
        if isinstance(record, StepRecord) and len(self.losses) < 1000:
            self.losses.append(record.loss)

    def close(self) -> None:
        pass
