"""Atomic checkpoints of a run, written in the background: temporary files, hashed, renamed, and verified before use.

The order of writes makes a kill at any moment harmless. The data file is written to the disk first, then the manifest
that names it (the commit point), then pointers and deletions, which only save time and space. The caller decides what a
state contains. In `mptrain.runlog`, only this module and `checkpoint_data` import torch.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage

from mptrain.runlog.atomic_files import TEMPORARY, storage_errors, write_atomically
from mptrain.runlog.checkpoint_data import (
    FOLDER,
    Collectives,
    check_plain,
    extract_shards,
    insert_shards,
    read_verified,
    write_shards,
    write_state,
)
from mptrain.runlog.manifest import BEST, DATA, LAST, Manifest, manifest_name, manifests_in, read_manifest, step_of
from mptrain.runlog.record_writer import RecordWriter
from mptrain.system.device import capabilities, event_now
from mptrain.system.errors import CheckpointError, StorageError
from mptrain.system.torch_private import foreach_copy_, storage_key

_AGAIN = "-again"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Checkpoint of a run that was verified and loaded.

    Attributes:
        state: The saved state; tensors are on the CPU.
        skipped: One sentence for each newer checkpoint that could not be used.
    """

    state: dict[str, Any]
    manifest: Manifest
    skipped: list[str]


class CheckpointStore:
    """Store of the checkpoints of one run: saves them, loads them, and removes old ones.

    The caller must hold the run's lock while saving. A checkpoint consists of a data file and a manifest (`Manifest`).

    Args:
        folder: Checkpoint folder; created at the first save.
        keep: Number of newest checkpoints to keep (at least 1, else ValueError), in addition to the best.
        higher_is_better: Whether a higher metric is better. If metrics are equal, the older checkpoint is the best.
    """

    def __init__(self, folder: Path, keep: int, *, higher_is_better: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = folder
        self.keep = keep
        self._sign = 1.0 if higher_is_better else -1.0

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        records: Mapping[str, int],
        metric: float | None,
        config_digest: str,
        digests: Mapping[str, str] | None = None,
        parts: tuple[str, dict[str, str]] | None = None,
    ) -> Path:
        """Save a state durably, and return the path of its manifest.

        A checkpoint of the same step is replaced; those of later steps are removed, and those that ``keep`` does not
        cover, except the best. If the checkpoint cannot be written, all earlier ones are intact.

        Args:
            state: dict, list, tuple, str, int, float, bool, None and tensors only; else TypeError, which names the
                place. It must not change during the call.
            step: Number of steps attempted so far.
            records: Byte length of each record file (``steps.jsonl`` ...), as `RecordWriter.flush` returned; the
                records must be on the disk (`RecordWriter.force`).
            metric: The validation metric of exactly these weights; None, inf or nan if unknown.
            config_digest: Digest of the configuration, with which a resumed run detects changes.
            digests: Result of `RecordWriter.digests` at the same moment.
            parts: Result of `write_parts` for this step.
        """
        tensors = check_plain(state)
        metric = metric if metric is not None and math.isfinite(metric) else None
        with storage_errors(self.folder):
            self.folder.mkdir(exist_ok=True)  # without parents: it must not create the run folder
            self._remove_leftovers(keep=parts[0] if parts else "")
            newest = next(iter(manifests_in(self.folder)), None)
        good = "" if newest is None else f"the checkpoint of step {step_of(newest)}"
        data = self._free_data_name(step)
        digest, size = write_state(state, tensors, data, good)
        path = self.folder / manifest_name(step)
        folder, files = parts or ("", {})
        manifest = Manifest(
            step,
            data.name,
            digest,
            size,
            dict(records),
            metric,
            config_digest,
            dict(digests or {}),
            parts=folder,
            part_files=files,
        )
        write_atomically(path, manifest.to_json(), good=good)  # the commit point
        self.drop_after(step)
        return path

    def write_parts(self, shards: dict[str, Tensor], step: int, comm: Collectives) -> tuple[str, dict[str, str]]:
        """Write this rank's tensor shards, from `extract_shards`, for the next `save` of the same step.

        All ranks must call this. Return the name of the folder, and the SHA-256 of the files of all ranks by name.
        """
        first, second = (path.with_suffix(FOLDER) for path in _data_names(self.folder / manifest_name(step)))
        manifest, named = self.folder / manifest_name(step), ""
        if manifest.exists():
            with contextlib.suppress(StorageError):
                named = read_manifest(manifest).parts
        name = comm.broadcast_object((second if named == first.name else first).name)
        return name, write_shards(self.folder / name, shards, comm)

    def load_latest(self, before: int | None = None) -> LoadedCheckpoint | None:
        """Load the newest undamaged checkpoint, falling back to older ones; None if the run has no checkpoints.

        ``before`` leaves out the checkpoints of that step and of later ones.

        Raises:
            CheckpointError: All checkpoints of the run are damaged.
            StorageError: The system refuses to read a checkpoint that is there, which may be intact.
        """
        skipped: list[str] = []
        for path in manifests_in(self.folder):
            if before is not None and step_of(path) >= before:
                continue
            try:
                return _load(path, skipped)
            except StorageError as error:
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                    raise  # a resumed run would remove it as one that belongs to another future
                skipped.append(str(error))
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(skipped)}",
                "restore the folder from a copy, or start the run again",
            )
        return None

    def load(self, which: Path | Literal["last", "best"]) -> LoadedCheckpoint:
        """Load one checkpoint: ``last`` (highest step), ``best`` (best metric), or that of a manifest or data file.

        Raises:
            CheckpointError: The checkpoint does not exist or is damaged; no other one is used instead.
            StorageError: A file cannot be read, or another version of mptrain wrote it.
        """
        path: Path | None
        if isinstance(which, Path):
            path = _manifest_beside(which)
        elif which == LAST:
            path = next(iter(manifests_in(self.folder)), None)
        else:
            path = self.best()
        if path is None:
            raise CheckpointError(
                f"{self.folder} has no {which} checkpoint",
                "train first, or choose another run"
                if which == LAST
                else "use the last one: no checkpoint has been evaluated, or the task has no metric",
            )
        try:
            return _load(path, [])
        except CheckpointError as error:
            raise CheckpointError(str(error), error.hint or self._way_round(path, which)) from error

    def _way_round(self, damaged: Path, which: Path | Literal["last", "best"]) -> str:
        hint = "restore it from a copy, or resume the run, if it is unfinished, from the checkpoint before it"
        other = self.best() if which == LAST else None
        return hint if other in (None, damaged) else f"use --best for {other.name}, or {hint}"

    def best(self) -> Path | None:
        """Return the manifest path of the checkpoint with the best metric; None if no checkpoint has a metric."""
        ranked: list[tuple[float, int, Path]] = []
        for path in manifests_in(self.folder):
            with contextlib.suppress(StorageError):
                metric = read_manifest(path).metric
                if metric is not None:
                    ranked.append((self._sign * metric, -step_of(path), path))
        return max(ranked)[-1] if ranked else None

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of steps after ``step``, which are invalid once a run resumes from that step.

        Checkpoints that ``keep`` does not cover are removed as well, except the best.
        """
        with storage_errors(self.folder, "clean"):
            for path in manifests_in(self.folder):
                if step_of(path) > step:
                    path.unlink()
            best = self.best()
            for path in manifests_in(self.folder)[self.keep :]:
                if path != best:
                    path.unlink()
            self._remove_leftovers()
        self._point(LAST, next(iter(manifests_in(self.folder)), None))
        self._point(BEST, best)

    def _point(self, name: str, manifest: Path | None) -> None:
        """Write a pointer file for users and scripts; mptrain never reads it."""
        pointer = self.folder / name
        if manifest is None:
            with storage_errors(pointer, "clean"):
                pointer.unlink(missing_ok=True)
        else:
            write_atomically(pointer, manifest.name + "\n", durable=False)

    def _remove_leftovers(self, keep: str = "") -> None:
        """Remove files of killed writers: temporary files, and data that no manifest names, except ``keep``."""
        named = {keep}
        for path in manifests_in(self.folder):
            try:
                manifest = read_manifest(path)
                named |= {manifest.file, manifest.parts}
            except StorageError:  # keep its data: a newer version may be able to read it
                named |= {data.with_suffix(kind).name for data in _data_names(path) for kind in (DATA, FOLDER)}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.suffix == TEMPORARY or (path.suffix == DATA and path.name not in named):
                    path.unlink(missing_ok=True)
                elif path.suffix == FOLDER and path.name not in named and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)

    def _free_data_name(self, step: int) -> Path:
        """Return an unused data file name: the file of an earlier save must exist until its manifest is replaced."""
        first, second = _data_names(self.folder / manifest_name(step))
        return second if first.exists() else first


def _data_names(manifest: Path) -> tuple[Path, Path]:
    """Return the two possible data file names of a manifest; they alternate when a step is saved again."""
    return manifest.with_suffix(DATA), manifest.with_name(f"{manifest.stem}{_AGAIN}{DATA}")


def _manifest_beside(path: Path) -> Path:
    return path if path.suffix != DATA else path.with_name(path.stem.removesuffix(_AGAIN) + ".json")


def _load(path: Path, skipped: list[str]) -> LoadedCheckpoint:
    manifest = read_manifest(path)
    state = read_verified(path.with_name(manifest.file), manifest.sha256, path.name, manifest.bytes)
    if manifest.parts:
        state = insert_shards(state, path.with_name(manifest.parts), manifest.part_files)
    return LoadedCheckpoint(state, manifest, skipped)


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
        storages = {
            storage_key(storage): storage for tensor in check_plain(state) for storage in [tensor.untyped_storage()]
        }
        copied = {key: storage for key, storage in storages.items() if self._everything or storage.device.type != "cpu"}
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
