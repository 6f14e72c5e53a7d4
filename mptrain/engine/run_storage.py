"""Storage of a training run's files: records and checkpoints on rank 0; on other ranks only shards of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.record_writer import RecordWriter
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.saver import NoSaver, Saver
from mptrain.runlog.sink import NoRecords


@dataclass(frozen=True)
class Storage:
    """Storage of a run on rank 0, which writes its records and checkpoints, with the configuration's digest."""

    paths: RunPaths
    writer: RecordWriter
    store: CheckpointStore
    config_digest: str

    def saver(self, *, async_save: bool) -> Saver:
        """Return the saver of checkpoints, which also flushes the records that they refer to."""
        return Saver(self.store, self.writer, async_save=async_save)


@dataclass(frozen=True)
class NoStorage:
    """Storage of a run on ranks other than 0, which writes no records and no checkpoint of its own."""

    paths: RunPaths
    writer: NoRecords = field(default_factory=NoRecords)
    config_digest: str = ""

    def saver(self, *, async_save: bool) -> NoSaver:
        """Return a saver that writes only this rank's shards of tensors; ``async_save`` has no effect."""
        return NoSaver(self.paths.checkpoints)
