"""Storage of a run: records and checkpoints on rank 0; on other ranks only shards of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.record_writer import RecordWriter
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.saver import NoSaver, Saver
from mptrain.runlog.sink import NoRecords


@dataclass(frozen=True)
class Storage:
    """Storage on rank 0.

    Attributes:
        paths: Paths of the run directory.
        writer: Writes the records.
        store: Store of the checkpoints.
        config_digest: Digest of the run's configuration, saved with each checkpoint.
    """

    paths: RunPaths
    writer: RecordWriter
    store: CheckpointStore
    config_digest: str

    def saver(self, *, async_save: bool) -> Saver:
        """Return the saver of checkpoints, which also flushes the records that they refer to."""
        return Saver(self.store, self.writer, async_save=async_save)


@dataclass(frozen=True)
class NoStorage:
    """Storage on ranks other than 0, which writes no records.

    Attributes:
        paths: Paths of the run directory, for files of this rank.
        writer: Discards records.
    """

    paths: RunPaths
    writer: NoRecords = field(default_factory=NoRecords)
    config_digest: str = ""

    def saver(self, *, async_save: bool) -> NoSaver:
        """Return a saver that writes no checkpoint of its own."""
        return NoSaver(self.paths.checkpoints)
