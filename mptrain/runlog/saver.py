"""Saver of checkpoints that writes them in a background thread while training continues."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from mptrain.runlog.checkpoint_data import check_plain
from mptrain.runlog.checkpoint_shards import Collectives, extract_shards, write_shards
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.record_writer import RecordWriter
from mptrain.system.device import capabilities, event_now
from mptrain.system.torch_private import foreach_copy_, storage_key


class Saver:
    """Saver of a run's checkpoints, one at a time: copies the state and writes the copy in a thread.

    Use it as a context manager; leaving the context waits for the last save. The next call raises errors of the thread.

    Args:
        store: Store of the checkpoints.
        writer: Writer of the records; they are forced to the disk before the checkpoint that refers to them.
        async_save: If False, `save` returns after the checkpoint is on the disk.
    """

    def __init__(self, store: CheckpointStore, writer: RecordWriter, *, async_save: bool) -> None:
        self._store = store
        self._writer = writer
        self._async_save = async_save
        self._copy = HostCopy(everything=async_save)
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # starts its thread at the first save
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
        """Save a state as a checkpoint, together with the records so far, after the previous save is complete.

        If there is no memory for a copy, the state itself is written before this returns. The arguments are those of
        `CheckpointStore.save`, but the state may change after the call. ``comm`` are ranks that hold shards of the
        state's tensors: all of them must call `save`, which then waits until all shards are on the disk.
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
            self._copy.wait()
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
        """Raise the error of a save that has ended; do not wait for one that is running."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is on the disk; raise its error if it has failed."""
        if self._saving is not None:
            error = self._saving.exception()
            self._saving = None
            if error is not None:
                raise error


class NoSaver:
    """Saver of ranks other than 0, with the methods of `Saver`. It writes only this rank's shards of tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> NoSaver:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no save is running."""

    def save(self, state: dict[str, Any], *, comm: Collectives | None = None, **_: object) -> None:
        """Write this rank's shards of the state's tensors, if it has any, together with all other ranks.

        If writing fails on one of the ranks, all raise StorageError.
        """
        shards = extract_shards(state)[1]
        if shards and comm is not None:
            write_shards(self._folder / comm.broadcast_object(""), shards, comm)

    def check(self) -> None:
        """Do nothing: `save` has raised its errors already."""

    def wait(self) -> None:
        """Do nothing: `save` has written everything already."""


class HostCopy:
    """Copier of checkpoint states to host memory, which keeps its buffers for the next copy.

    Allocating and clearing new pages costs more than copying. With ``everything``, CPU tensors are copied too;
    otherwise the copy refers to the originals.
    """

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._buffers: dict[tuple[int, int, bool], Tensor] = {}
        self._arrivals: list[torch.Event] = []

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state on the CPU, in which tensors share memory if they share it in the state.

        The copy is valid until the next call. Copies from a device to pinned memory are asynchronous and complete after
        `wait`. The host does not wait for the device; kernels that are queued later run after the copy.

        Raises:
            TypeError: The state holds a type that `check_plain` rejects; the message names the place.
            MemoryError: There is no memory for the copy.
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
        for pinned in (True, False):  # the host copies its own memory while devices copy theirs
            pairs = [
                pair for pair in zip(buffers, sources, strict=True) if capabilities(pair[1].device).pinned == pinned
            ]
            if pairs:
                targets, origins = map(list, zip(*pairs, strict=True))
                foreach_copy_(targets, origins, non_blocking=pinned)
        self._arrivals = [
            event_now(device, sleeping=True)
            for device in {storage.device for storage in copied.values()}
            if capabilities(device).streams
        ]
        hosts = {key: buffer.untyped_storage() for key, buffer in zip(copied, buffers, strict=True)}
        taken: dict[str, Any] = _rebuilt(state, hosts, {})
        return taken

    def wait(self) -> None:
        """Wait until the asynchronous copies of the last `take` are complete."""
        for arrival in self._arrivals:
            arrival.synchronize()

    def _buffers_for(self, storages: list[UntypedStorage]) -> list[Tensor]:
        keys = [
            (index, storage.nbytes(), capabilities(storage.device).pinned) for index, storage in enumerate(storages)
        ]
        self._buffers = {key: self._buffers[key] for key in keys if key in self._buffers}  # free the others first
        for key in keys:
            if key not in self._buffers:
                _, size, pinned = key
                dtype = torch.uint8 if size % 8 else torch.int64  # wide elements are copied faster
                try:
                    self._buffers[key] = torch.empty(size // dtype.itemsize, dtype=dtype, pin_memory=pinned)
                except RuntimeError as error:  # torch's allocators raise it
                    self._buffers = {}
                    raise MemoryError(f"no memory for a copy of {size} bytes") from error
        return [self._buffers[key] for key in keys]


def _rebuilt(value: Any, hosts: dict[int, UntypedStorage], seen: dict[int, Any]) -> Any:
    if not isinstance(value, (torch.Tensor, dict, list, tuple)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    result: Any
    if isinstance(value, torch.Tensor):
        result = _tensor_over(hosts.get(storage_key(value.untyped_storage())), value)
    elif isinstance(value, dict):
        result = copy.copy(value)  # keeps attributes of an OrderedDict
        for key, item in value.items():
            result[key] = _rebuilt(item, hosts, seen)
    else:
        result = type(value)(_rebuilt(item, hosts, seen) for item in value)
    seen[id(value)] = result
    return result


def _tensor_over(host: UntypedStorage | None, like: Tensor) -> Tensor:
    """Return a tensor in ``host`` memory with the shape, strides and class of ``like``; ``like`` itself without one."""
    if host is None:
        return like
    tensor = torch.empty(0, dtype=like.dtype).set_(host, like.storage_offset(), like.shape, like.stride())
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor.requires_grad_() if like.requires_grad else tensor
