"""Saves checkpoints while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from mptrain.device import capabilities, event_now
from mptrain.runlog.checkpoint_data import check_plain
from mptrain.runlog.checkpoint_shards import Collectives, extract_shards, write_shards
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.record_writer import RecordWriter
from mptrain.torch_private import foreach_copy_, storage_key


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

    def __exit__(self, *_: object) -> None:
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
        state, shards = extract_shards(state)
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
        shards = extract_shards(state)[1]
        if shards and comm is not None:
            write_shards(self._folder / comm.broadcast_object(""), shards, comm)

    def check(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Nothing is under way."""


class HostCopy:
    """Holds one copy of a state in memory of the host; the next one overwrites it.

    Fresh memory costs more than the copying: the system has to find each page and clear it.

    Args:
        everything: Copy tensors of the CPU as well; False hands these on as they are.
    """

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._buffers: dict[tuple[int, int, bool], Tensor] = {}
        self._arrivals: list[torch.Event] = []

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state on the CPU, as `torch.save` sees it: what shares memory in the state does so in the copy.

        What comes from a device with page-locked memory is there after `wait`. Nothing waits for that device; what it is given from here on
        finds the copying done.

        Args:
            state: dict, list, tuple, str, int, float, bool, None and tensors only.

        Raises:
            TypeError: The state holds something else; names where.
            MemoryError: The system has no memory for it.
        """
        found = {
            storage_key(storage): storage for tensor in check_plain(state) for storage in [tensor.untyped_storage()]
        }
        copied = {key: storage for key, storage in found.items() if self._everything or storage.device.type != "cpu"}
        buffers = self._buffers_for(list(copied.values()))
        sources = [
            torch.empty(0, dtype=buffer.dtype, device=storage.device).set_(storage)
            for storage, buffer in zip(copied.values(), buffers, strict=True)
        ]
        if buffers:
            foreach_copy_(
                buffers, sources, non_blocking=all(capabilities(storage.device).pinned for storage in copied.values())
            )
        self._arrivals = [
            event_now(device, sleeping=True)
            for device in {storage.device for storage in copied.values()}
            if capabilities(device).streams
        ]
        hosts = {key: buffer.untyped_storage() for key, buffer in zip(copied, buffers, strict=True)}
        taken: dict[str, Any] = _rebuilt(state, hosts, {})
        return taken

    def wait(self, wait_for: Callable[[torch.Event], None] = torch.Event.synchronize) -> None:
        """Wait until the copy is complete.

        Args:
            wait_for: Waits for an event.
        """
        for arrival in self._arrivals:
            wait_for(arrival)

    def _buffers_for(self, storages: list[UntypedStorage]) -> list[Tensor]:
        """A buffer for each; those of the last copy where they fit."""
        keys = [
            (index, storage.nbytes(), capabilities(storage.device).pinned) for index, storage in enumerate(storages)
        ]
        self._buffers = {key: self._buffers[key] for key in keys if key in self._buffers}  # the others are let go first
        for key in keys:
            if key not in self._buffers:
                _, size, pinned = key
                dtype = torch.uint8 if size % 8 else torch.int64  # wide elements are copied faster
                try:
                    self._buffers[key] = torch.empty(size // dtype.itemsize, dtype=dtype, pin_memory=pinned)
                except RuntimeError as error:  # what torch's allocators raise
                    self._buffers = {}
                    raise MemoryError(f"no memory for a copy of {size} bytes") from error
        return [self._buffers[key] for key in keys]


def _rebuilt(value: Any, hosts: dict[int, UntypedStorage], seen: dict[int, Any]) -> Any:
    """The same value over other memory; what is one object in the value is one object again."""
    if not isinstance(value, (torch.Tensor, dict, list, tuple)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    result: Any
    if isinstance(value, torch.Tensor):
        result = _tensor_over(hosts.get(storage_key(value.untyped_storage())), value)
    elif isinstance(value, dict):
        result = copy.copy(value)  # with what an OrderedDict has besides its items
        for key, item in value.items():
            result[key] = _rebuilt(item, hosts, seen)
    else:
        result = type(value)(_rebuilt(item, hosts, seen) for item in value)
    seen[id(value)] = result
    return result


def _tensor_over(host: UntypedStorage | None, like: Tensor) -> Tensor:
    if host is None:
        return like
    tensor = torch.empty(0, dtype=like.dtype).set_(host, like.storage_offset(), like.shape, like.stride())
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor.requires_grad_() if like.requires_grad else tensor
