"""Saves checkpoints while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mptrain.runlog.host_copy import HostCopy
from mptrain.runlog.shards import Collectives, without_parts, write_parts

if TYPE_CHECKING:
    from mptrain.runlog.checkpoints import CheckpointStore
    from mptrain.runlog.writer import RecordWriter


class Saver:
    """Saves one checkpoint at a time: copies the state, and lets a thread write the copy. Leave the context to end it.

    What goes wrong in the thread is raised by the next call, as it would have been by `save`.

    Args:
        store: Takes the checkpoints.
        writer: Its records are forced to the disk before a checkpoint that counts on them.
        async_save: False makes `save` return when the checkpoint is on the disk.
    """

    def __init__(self, store: CheckpointStore, writer: RecordWriter, *, async_save: bool) -> None:
        self._store = store
        self._writer = writer
        self._async_save = async_save
        self._copy = HostCopy(everything=async_save)
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # it starts one when the first save is handed to it
        self._saving: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        metric: float | None,
        config_digest: str,
        comm: Collectives | None = None,
    ) -> None:
        """Save a state together with the records so far, after the save before is done.

        Where there is no memory for a copy, the state itself is written, and this returns when that is done.

        Args:
            state: What `CheckpointStore.save` takes. It may change afterwards.
            step: Attempted steps so far.
            metric: The validation metric of exactly these weights; None, inf and nan if unknown.
            config_digest: Digest of the configuration.
            comm: Who else holds parts of the state's tensors; they all call this, and wait until the parts are on the disk.

        Raises:
            TypeError: The state holds something that a safe load would refuse; names where.
            StorageError: The disk refuses, or has refused the save before.
        """
        self.wait()
        records, digests = self._writer.flush(), self._writer.digests()
        async_save = self._async_save
        state, shards = without_parts(state)
        parts = self._store.write_parts(shards, step, comm) if shards and comm is not None else None
        try:
            state = self._copy.take(state)
        except MemoryError:
            async_save = False

        def write() -> None:
            self._copy.wait(*(() if comm is None else (comm.wait_for,)))
            self._writer.force(records)
            self._store.save(
                state,
                step=step,
                records=records,
                digests=digests,
                metric=metric,
                config_digest=config_digest,
                parts=parts,
            )

        if async_save:
            self._saving = self._thread.submit(write)
        else:
            write()

    def check(self) -> None:
        """Raise what has gone wrong since `save`; waits for nothing.

        Raises:
            StorageError: The disk has refused.
        """
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until what was saved is on the disk.

        Raises:
            StorageError: The disk refuses.
        """
        if self._saving is not None:
            error = self._saving.exception()
            self._saving = None
            if error is not None:
                raise error


class NoSaver:
    """On a rank that keeps nothing but its parts of tensors.

    Args:
        folder: The checkpoints of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> NoSaver:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is under way."""

    def save(self, state: dict[str, Any], *, comm: Collectives | None = None, **_: object) -> None:
        """Write this rank's parts, where it has any, together with all others.

        Raises:
            StorageError: The disk of one of them refuses.
        """
        shards = without_parts(state)[1]
        if shards and comm is not None:
            write_parts(self._folder / comm.broadcast_object(""), shards, comm)

    def check(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Nothing is under way."""
