"""Tensors of which every rank holds a part, in files of `torch.distributed.checkpoint` beside a checkpoint's data file.

Each rank writes its own part, so no memory holds the whole. What comes back are whole tensors, at any number of
ranks. torch describes the parts in a pickled file, which `mptrain.runlog.shard_description` reads without running it,
and only files that the checkpoint's manifest names are read.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mptrain.errors import CheckpointError, StorageError, out_of_memory
from mptrain.files import open_to_read
from mptrain.numerics.shards import is_sharded
from mptrain.runlog.shard_description import read_description
from mptrain.runlog.state_validation import brief_refusals, why_refused
from mptrain.runlog.storage import storing, sync_folder

Value = TypeVar("Value")

#: The ending of a folder of parts, and the file in which torch describes them.
FOLDER, DESCRIPTION = ".parts", ".metadata"

#: What stands in a state where a tensor was taken out.
_MARK = "__part__"


class Everyone(Protocol):
    """The ranks that write together (`mptrain.parallel.communicator.Communicator`)."""

    rank: int

    def broadcast_object(self, value: Value) -> Value: ...  # noqa: D102

    def all_gather_object(self, value: Value) -> list[Value]: ...  # noqa: D102

    def raise_for_all(self, error: Exception | None) -> None: ...  # noqa: D102

    def wait_for(self, event: torch.Event) -> None: ...  # noqa: D102


def without_parts(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """A state with marks in the places of tensors of which this rank has a part, and these by their marks."""
    found: dict[str, Tensor] = {}

    def taken(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_sharded(value):
                return value
            found[where] = value
            return {_MARK: where}
        if isinstance(value, dict):
            return {key: taken(item, f"{where}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(taken(item, f"{where}/{index}") for index, item in enumerate(value))
        return value

    marked = taken(state, "")
    return (marked, found) if found else (state, found)  # as it is: what is one object in it stays one


def write_parts(folder: Path, parts: Mapping[str, Tensor], comm: Everyone) -> dict[str, str]:
    """Write this rank's parts; all ranks call it, and all wait for the last.

    Args:
        folder: Made anew.
        parts: What `without_parts` has found.
        comm: Who writes.

    Returns:
        SHA-256 of every file of all ranks, by name.

    Raises:
        StorageError: The disk of one of them refuses.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    error: Exception | None = None
    if comm.rank == 0:
        try:
            with storing(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.mkdir(exist_ok=True)  # that of checkpoints, but never the run's
                folder.mkdir()
        except Exception as raised:
            error = raised
    comm.raise_for_all(error)
    try:
        save(dict(parts), storage_writer=FileSystemWriter(folder, overwrite=False))
    except CheckpointException as raised:  # of any rank, told to all
        first = next(iter(raised.failures.values()))[0]
        if not isinstance(first, Exception):  # a signal says nothing about the disk
            raise first from raised
        with storing(folder):
            raise first if isinstance(first, OSError) else OSError(str(first)) from raised
    own: dict[str, str] = {}
    try:
        with storing(folder):
            own = {path.name: _digest(path) for path in folder.iterdir() if _is_of(path.name, comm.rank)}
    except StorageError as raised:
        error = raised
    comm.raise_for_all(error)
    files: dict[str, str] = {}
    for theirs in comm.all_gather_object(own):
        files |= theirs
    if comm.rank == 0:
        sync_folder(folder)
    return files


def with_parts(state: Any, folder: Path, files: Mapping[str, str]) -> Any:
    """A state whose marks have become whole tensors again, on the CPU.

    Raises:
        CheckpointError: A file is missing, damaged or not what torch writes.
        StorageError: It cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    for name, digest in files.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
        with storing(folder / name, "read"):
            found = _digest(folder / name)
        if found != digest:
            raise CheckpointError(f"{folder / name} is damaged: its SHA-256 is not the one in the manifest")
    try:
        tensors = _read(folder, files)
        return _put_back(state, tensors, {})
    except CheckpointError:
        raise
    except CheckpointException as error:  # no Exception, and its words are a traceback
        first = next(iter(error.failures.values()))[0]
        if not isinstance(first, Exception):  # a signal says nothing about the files
            raise first from error
        if refused := out_of_memory(first, f"reading {folder}"):
            raise refused from error
        raise CheckpointError(f"{folder} cannot be loaded safely: {why_refused(first)}") from error
    except Exception as error:  # torch documents no set of errors for files that it cannot read
        if refused := out_of_memory(error, f"reading {folder}"):
            raise refused from error
        raise CheckpointError(f"{folder} cannot be loaded safely: {why_refused(error)}") from error


def _read(folder: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    if DESCRIPTION not in files:
        raise CheckpointError(f"{folder} has no description that the manifest knows")
    described = read_description(folder / DESCRIPTION, files)
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            described.storage_meta = StorageMeta(load_id=self.load_id)
            return described

    with brief_refusals(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process, which is meant
        load(tensors, storage_reader=Reader(folder), no_dist=True)
    return tensors


def _put_back(value: Any, tensors: Mapping[str, Tensor], done: dict[int, Any]) -> Any:
    """A state with tensors in the places of their marks; what stands in several places is gone through once (``done``)."""
    if not isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, dict) and value.keys() == {_MARK}:
        return tensors[value[_MARK]]
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _put_back(item, tensors, done) for key, item in value.items()}
        else:
            done[id(value)] = type(value)(_put_back(item, tensors, done) for item in value)
    return done[id(value)]


def _is_of(name: str, rank: int) -> bool:
    """Whether a rank has written a file of that name; the first one writes the description."""
    return name.startswith(f"__{rank}_") or (rank == 0 and name == DESCRIPTION)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open_to_read(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
