"""Where a run keeps what must survive it: all of it on the first rank, and on the others nothing but parts of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.record_writer import RecordWriter
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.saver import NoSaver, Saver
from mptrain.runlog.sink import NoRecords


@dataclass(frozen=True)
class Storage:
    """Where a run keeps what must survive it.

    Attributes:
        paths: The run directory.
        writer: Takes the records.
        store: Takes the checkpoints.
        config_digest: Which configuration they belong to.
    """

    paths: RunPaths
    writer: RecordWriter
    store: CheckpointStore
    config_digest: str

    def saver(self, *, async_save: bool) -> Saver:
        """What saves checkpoints, with the records that they count on."""
        return Saver(self.store, self.writer, async_save=async_save)


@dataclass(frozen=True)
class NoStorage:
    """What a rank has that keeps nothing, because another one does.

    Attributes:
        paths: The run directory, for files of its own.
        writer: Takes records and forgets them.
    """

    paths: RunPaths
    writer: NoRecords = field(default_factory=NoRecords)
    config_digest: str = ""

    def saver(self, *, async_save: bool) -> NoSaver:
        """What saves nothing."""
        return NoSaver(self.paths.checkpoints)
