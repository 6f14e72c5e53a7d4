"""Checkpoints of a run: when its state is saved, and how it gets back there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mptrain.engine.snapshot import restore_snapshot, take_snapshot

if TYPE_CHECKING:
    from mptrain.engine.parts import Options, Parts, Progress
    from mptrain.engine.run_storage import NoStorage, Storage
    from mptrain.engine.telemetry import Telemetry


class Checkpointing:
    """Saves the state of a run.

    Args:
        parts: What the run is made of.
        options: What the user chose about it.
        storage: Where it keeps checkpoints.
        progress: How far it has come.
        telemetry: Takes records.

    Attributes:
        saver: Writes checkpoints, perhaps in a thread of its own; entered around the run.
        carried: The buffers that belong to the run and not to its weights.
    """

    def __init__(
        self, parts: Parts, options: Options, storage: Storage | NoStorage, progress: Progress, telemetry: Telemetry
    ) -> None:
        self._parts, self._options, self._storage = parts, options.checkpoint, storage
        self._progress, self._telemetry = progress, telemetry
        self.saver = storage.saver(async_save=options.checkpoint.async_save)
        self.carried = CarriedBuffers(parts)

    def restore(self, state: Mapping[str, Any], *, forgive: bool) -> list[str]:
        """Go back to where a checkpoint was taken.

        Args:
            state: The checkpoint's state.
            forgive: Count refused steps in a row anew; for a run that was stopped by them and is tried again.

        Returns:
            What could not be restored, as sentences.
        """
        restored, notes = restore_snapshot(self._parts, self._telemetry.step_log, state)
        self._progress.become(restored)
        self.carried.begin()
        if forgive:
            for log in self._telemetry.step_log.learner_logs:
                log.history.consecutive = 0
        return notes

    def due_after_step(self) -> bool:
        """Return whether the state is to be saved behind the present step."""
        every = self._options.every_steps
        return every is not None and self._progress.step % every == 0

    def due_after_epoch(self) -> bool:
        """Return whether the state is to be saved behind the present epoch."""
        every = self._options.every_epochs
        return every is not None and self._progress.epoch % every == 0

    def save(self, *, wait: bool = False) -> None:
        """Save the state, with the metric of exactly these weights if they were validated.

        Args:
            wait: Until it is on the disk.

        Raises:
            StorageError: The disk refuses.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.show("saving")
        telemetry.step_log.flush()
        telemetry.clock.save()
        metric = None  # also when a step is saved again: the best checkpoint is found by it
        if progress.evaluated_at == progress.step:
            metric = progress.last.get("val", {}).get(self._parts.task.metric or "")
        telemetry.event("checkpoint", metric=metric)
        self.saver.save(
            take_snapshot(self._parts, telemetry.step_log, progress, self.carried.whole()),
            step=progress.step,
            metric=metric,
            config_digest=self._storage.config_digest,
            comm=self._parts.comm,
        )
        if wait:
            self.saver.wait()


class CarriedBuffers:
    """The carried buffers of a run.

    Each rank trains on its rows of every batch, so it changes its rows of such a buffer and no others. The whole is what
    each rank has changed since all had the same. The last batch of an epoch may be smaller, and then a row belongs to
    another rank; so the whole is asked for at the end of every epoch, where the later rank's row counts.

    Args:
        parts: The run; all ranks have the same buffers.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.begin()

    def begin(self) -> None:
        """All ranks have the same buffers now."""
        alone = self._parts.comm.world_size == 1
        self._base = {} if alone else {name: buffer.clone() for name, buffer in self._parts.carried().items()}

    def whole(self) -> dict[str, Tensor]:
        """The buffers with the rows of all ranks, which must all ask, and have them from then on.

        Asked where a checkpoint is taken and where an epoch ends, outside of steps: the device is waited for.
        """
        buffers = self._parts.carried()
        if not self._base:
            return buffers
        changes: dict[str, Tensor] = {}
        for name, buffer in buffers.items():
            if not torch.equal(buffer, self._base[name]):
                changes[name] = buffer.cpu()
        base = {name: buffer.cpu() for name, buffer in self._base.items()}
        merged = {name: buffer.clone() for name, buffer in base.items()}
        for theirs in self._parts.comm.all_gather_object(changes):
            for name, buffer in theirs.items():
                merged[name] = torch.where(buffer != base[name], buffer, merged[name])
        for name, buffer in buffers.items():
            buffer.copy_(merged[name])
        self.begin()
        return buffers
