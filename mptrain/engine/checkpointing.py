"""Saving of a run's state to checkpoints, and resuming from them."""

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
    """Connection between a run and its checkpoints: decides when to save, saves the state and restores it.

    Attributes:
        saver: Writer of checkpoints, optionally in a background thread. A context manager, entered around the run.
        carried: Buffers that belong to the run and not to its weights, such as an LSTM's state between batches.
    """

    def __init__(
        self, parts: Parts, options: Options, storage: Storage | NoStorage, progress: Progress, telemetry: Telemetry
    ) -> None:
        self._parts, self._options, self._storage = parts, options.checkpoint, storage
        self._progress, self._telemetry = progress, telemetry
        self.saver = storage.saver(async_save=options.checkpoint.async_save)
        self.carried = CarriedBuffers(parts)

    def restore(self, state: Mapping[str, Any], *, forgive: bool) -> list[str]:
        """Restore the run from a checkpoint, and return a sentence for the user about each item that is lost.

        ``forgive`` resets the count of consecutive overflows, for a run that they stopped and that is tried again.
        """
        restored, notes = restore_snapshot(self._parts, self._telemetry.step_log, state)
        self._progress.become(restored)
        self.carried.begin()
        if forgive:
            for log in self._telemetry.step_log.learner_logs:
                log.history.consecutive = 0
        return notes

    def due_after_step(self) -> bool:
        """Return whether ``checkpoint.every_steps`` asks for a checkpoint after the current step."""
        every = self._options.every_steps
        return every is not None and self._progress.step % every == 0

    def due_after_epoch(self) -> bool:
        """Return whether ``checkpoint.every_epochs`` asks for a checkpoint after the current epoch."""
        every = self._options.every_epochs
        return every is not None and self._progress.epoch % every == 0

    def save(self, *, wait: bool = False) -> None:
        """Save the run as a checkpoint, with the validation metric if exactly these weights were validated.

        It is called outside of training steps. ``wait`` blocks until the checkpoint is on disk. Raises StorageError if
        it cannot be written.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.show("saving")
        telemetry.step_log.flush()
        telemetry.clock.save()
        metric = None  # kept also if a step is saved again, because it selects the best checkpoint
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
    """Non-persistent buffers of a model, whose rows each rank changes for its own samples, merged over all ranks.

    Each rank trains on its rows of every batch, so it changes only its own rows of such a buffer. The merged buffer
    combines the rows that each rank has changed since all ranks last held the same values. If the last batch of an
    epoch is smaller, a row may belong to another rank. Buffers are therefore merged at the end of every epoch, where
    the row of the highest rank wins. All ranks start with the same buffers.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.begin()

    def begin(self) -> None:
        """Mark the current buffers as equal on all ranks, from which later changes are counted."""
        alone = self._parts.comm.world_size == 1
        self._base = {} if alone else {name: buffer.clone() for name, buffer in self._parts.carried().items()}

    def whole(self) -> dict[str, Tensor]:
        """Return the buffers merged over all ranks, by name, and store them in place on each rank.

        All ranks must call this, outside of steps: at checkpoints and at the end of an epoch. It waits for the device.
        """
        buffers = self._parts.carried()
        if not self._base:
            return buffers
        changes: dict[str, Tensor] = {}
        own = self._parts.plan.guard.reshaped  # of another shape on each rank, perhaps: rank 0's are saved
        for name, buffer in buffers.items():
            if name not in own and not torch.equal(buffer, self._base[name]):
                changes[name] = buffer.cpu()
        base = {name: buffer.cpu() for name, buffer in self._base.items()}
        merged = {name: buffer.clone() for name, buffer in base.items()}
        for theirs in self._parts.comm.all_gather_object(changes):
            for name, buffer in theirs.items():
                merged[name] = torch.where(buffer != base[name], buffer, merged[name])
        for name, buffer in buffers.items():
            buffer.copy_(buffer if name in own else merged[name])
        self.begin()
        return buffers
