"""Tensors of which every rank holds a part, in a folder beside a checkpoint's data file.

Each rank writes its own part, so no memory holds the whole: ``rank-NUMBER.pt`` is a file of states (`mptrain.runlog.checkpoint_data`)
with a tensor for each name. Parts are those of `mptrain.numerics.shards`, along the first dimension in the order of the ranks;
so what comes back are whole tensors, at any number of ranks. Only files that the checkpoint's manifest names are read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from mptrain.errors import CheckpointError, out_of_memory
from mptrain.numerics.shards import is_sharded, part
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.checkpoint_data import read_verified, write_state

Value = TypeVar("Value")

#: The ending of a folder of parts.
FOLDER: Final = ".parts"

#: Keys of the mapping that stands in the place of a tensor that was taken out: its name, and its shape.
_NAME, _SHAPE = "__part__", "shape"


class Collectives(Protocol):
    """Exchanges between the ranks that write together (`mptrain.parallel.communicator.Communicator`)."""

    rank: int

    def broadcast_object(self, value: Value) -> Value: ...  # noqa: D102

    def all_gather_object(self, value: Value) -> list[Value]: ...  # noqa: D102

    def raise_for_all(self, error: Exception | None) -> None: ...  # noqa: D102

    def wait_for(self, event: torch.Event) -> None: ...  # noqa: D102


def extract_shards(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state with marks in the places of tensors of which this rank has a part, and these by their marks."""
    found: dict[str, Tensor] = {}

    def taken(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_sharded(value):
                return value
            found[where] = value
            return {_NAME: where, _SHAPE: list(value.shape)}
        if isinstance(value, dict):
            return {key: taken(item, f"{where}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(taken(item, f"{where}/{index}") for index, item in enumerate(value))
        return value

    marked = taken(state, "")
    return (marked, found) if found else (state, found)  # as it is: what is one object in it stays one


def write_shards(folder: Path, tensors: Mapping[str, Tensor], comm: Collectives) -> dict[str, str]:
    """Write this rank's parts; all ranks call it, and all wait for the last.

    Args:
        folder: Made anew.
        tensors: What `extract_shards` has found.
        comm: Who writes.

    Returns:
        SHA-256 of the files of all ranks, by name.

    Raises:
        StorageError: The disk of one of them refuses.
    """
    error: Exception | None = None
    digest = ""
    try:
        if comm.rank == 0:
            with storage_errors(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.mkdir(exist_ok=True)  # that of checkpoints, but never the run's
                folder.mkdir()
    except Exception as raised:
        error = raised
    comm.raise_for_all(error)
    try:
        own = {name: _own_memory(part(tensor).contiguous()) for name, tensor in tensors.items()}
        digest, _ = write_state(own, list(own.values()), folder / _file_of(comm.rank))
    except Exception as raised:
        error = raised
    comm.raise_for_all(error)
    return {_file_of(rank): theirs for rank, theirs in enumerate(comm.all_gather_object(digest))}


def insert_shards(state: Any, folder: Path, files: Mapping[str, str]) -> Any:
    """Return a state whose marks have become whole tensors again, on the CPU.

    Args:
        state: What `extract_shards` has left.
        folder: Where the parts are.
        files: SHA-256 of their files by name.

    Raises:
        CheckpointError: A file is missing, damaged, or not one that `write_shards` writes.
        StorageError: It cannot be read.
    """
    names = [_file_of(rank) for rank in range(len(files))] or [_file_of(0)]
    if missing := [name for name in names if name not in files or not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / missing[0]} is missing")
    ranks = [read_verified(folder / name, files[name], "the manifest") for name in names]
    try:
        if any(parts.keys() != ranks[0].keys() for parts in ranks):
            raise ValueError("its files do not hold parts of the same tensors")
        joiner = _Wholes()
        wholes = {
            name: joiner.join([parts.pop(name) for parts in ranks]) for name in [*ranks[0]]
        }  # each part is let go
        return _put_back(state, wholes, {})
    except Exception as error:  # what a stranger's files hold can fail in any way
        if refused := out_of_memory(error, f"reading {folder}"):
            raise refused from error
        raise CheckpointError(f"{folder} cannot be loaded safely: {f'{error}'[:200]}") from error


class _Wholes:
    """Whole tensors out of the parts of all ranks.

    Parts have memory of their own, and tensors that share it are joined once: so a small file makes no large memory.
    """

    def __init__(self) -> None:
        self._joined: dict[tuple[int, ...], Tensor] = {}

    def join(self, parts: list[Any]) -> Tensor:
        """Return the whole of one tensor, from its part on each rank.

        Raises:
            TypeError: A part is not what `write_shards` writes.
        """
        if not all(type(one) is Tensor and _is_plain(one) for one in parts):
            raise TypeError("a part is no plain tensor")
        if len({(one.dtype, one.shape[1:]) for one in parts}) > 1:
            raise TypeError("the parts of a tensor do not fit together")
        places = tuple(one.data_ptr() for one in parts)
        if places not in self._joined or self._joined[places].dtype != parts[0].dtype:
            self._joined[places] = torch.cat([one.reshape(-1) for one in parts])
        return self._joined[places].view(sum(map(len, parts)), *parts[0].shape[1:])


#: The dtypes of what is trained and of what an optimizer keeps.
_DTYPES: Final = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)


def _is_plain(part: Tensor) -> bool:
    dense = part.layout is torch.strided and part.device.type == "cpu" and part.dtype in _DTYPES
    return dense and not part.requires_grad and part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def _put_back(value: Any, wholes: Mapping[str, Tensor], done: dict[int, Any]) -> Any:
    """Return a state with tensors in the places of their marks; what stands in several places is gone through once (``done``)."""
    if not isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, dict) and value.keys() == {_NAME, _SHAPE}:
        whole = wholes[value[_NAME]]
        if list(whole.shape) != value[_SHAPE]:
            raise ValueError(f"the parts of {value[_NAME]} are not the whole of it")
        return whole
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _put_back(item, wholes, done) for key, item in value.items()}
        else:
            done[id(value)] = type(value)(_put_back(item, wholes, done) for item in value)
    return done[id(value)]


def _own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor in no more memory than it fills: all of its memory is written."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _file_of(rank: int) -> str:
    return f"rank-{rank}.pt"
