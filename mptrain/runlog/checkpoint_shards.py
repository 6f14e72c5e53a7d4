"""Sharded tensors (FSDP2) of a checkpoint, stored in a folder beside its data file.

Each rank writes its own shard, so no rank needs memory for a whole tensor. ``rank-NUMBER.pt`` is a state file
(`mptrain.runlog.checkpoint_data`) with one tensor per name. Tensors are split as in `mptrain.numerics.tensors`: along
the first dimension, in rank order. Reading joins them to whole tensors, so a run can resume with any world size. Only
files that the checkpoint's manifest names are read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from mptrain.numerics.tensors import is_sharded, part
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.checkpoint_data import read_verified, write_state
from mptrain.system.errors import CheckpointError, out_of_memory

Value = TypeVar("Value")

#: Suffix of a folder of shards.
FOLDER: Final = ".parts"

#: Keys of the mapping that replaces an extracted tensor in the state: its name and its shape.
_NAME, _SHAPE = "__part__", "shape"


class Collectives(Protocol):
    """Protocol of the collective operations of the ranks that write one checkpoint together.

    ``broadcast_object`` returns the value of rank 0, and ``all_gather_object`` the values of all ranks in rank order.
    ``raise_for_all`` raises an error of one rank on every rank.
    """

    rank: int

    def broadcast_object(self, value: Value) -> Value: ...  # noqa: D102

    def all_gather_object(self, value: Value) -> list[Value]: ...  # noqa: D102

    def raise_for_all(self, error: Exception | None) -> None: ...  # noqa: D102


def extract_shards(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Replace the sharded tensors of a state, of which this rank holds only a part, by placeholders (name and shape).

    Return the new state, and the sharded tensors by placeholder name. Without sharded tensors, these are the same state
    and an empty dict. A state consists of nested dicts, lists, tuples, plain values and tensors.
    """
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
    return (marked, found) if found else (state, found)  # the original keeps its shared objects shared


def write_shards(folder: Path, tensors: Mapping[str, Tensor], comm: Collectives) -> dict[str, str]:
    """Write this rank's shards of a checkpoint's tensors to its file, and return when every rank has written.

    All ranks must call this. An existing folder is replaced. The result is the hexadecimal SHA-256 of the files of all
    ranks by file name. If writing fails on one rank, all ranks raise StorageError.
    """
    error: Exception | None = None
    digest = ""
    try:
        if comm.rank == 0:
            with storage_errors(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.mkdir(exist_ok=True)  # creates the checkpoint folder, never the run folder
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
    """Return a copy of a loaded state with whole tensors instead of placeholders, joined on the CPU from all shards.

    Containers that occur several times in the state stay shared. ``files`` has the SHA-256 of the shard
    files in ``folder``.

    Raises:
        CheckpointError: A file is missing, is damaged or was not written by `write_shards`.
        EnvironmentRefused: There is not enough memory.
    """
    names = [_file_of(rank) for rank in range(len(files))] or [_file_of(0)]
    if missing := [name for name in names if name not in files or not (folder / name).is_file()]:
        raise CheckpointError(f"{folder / missing[0]} is missing")
    ranks = [read_verified(folder / name, files[name], "the manifest") for name in names]
    try:
        if any(parts.keys() != ranks[0].keys() for parts in ranks):
            raise ValueError("its files hold shards of different tensors")
        joiner = _Wholes()
        # pop frees each shard once it is joined.
        wholes = {name: joiner.join([parts.pop(name) for parts in ranks]) for name in [*ranks[0]]}
        return _put_back(state, wholes, {})
    except Exception as error:  # untrusted files can fail in any way
        if refused := out_of_memory(error, f"reading {folder}"):
            raise refused from error
        raise CheckpointError(f"{folder} cannot be loaded safely: {f'{error}'[:200]}") from error


class _Wholes:
    """Joiner of the shards of all ranks to whole tensors.

    Shards must own their memory, and tensors that share memory are joined once. A small file therefore cannot make the
    reader allocate a large amount of memory.
    """

    def __init__(self) -> None:
        self._joined: dict[tuple[int, ...], Tensor] = {}

    def join(self, parts: list[Any]) -> Tensor:
        if not all(type(one) is Tensor and _is_plain(one) for one in parts):
            raise TypeError("a shard is not a plain tensor")
        if len({(one.dtype, one.shape[1:]) for one in parts}) > 1:
            raise TypeError("the shards of a tensor differ in dtype or shape")
        places = tuple(one.data_ptr() for one in parts)
        if places not in self._joined or self._joined[places].dtype != parts[0].dtype:
            self._joined[places] = torch.cat([one.reshape(-1) for one in parts])
        return self._joined[places].view(sum(map(len, parts)), *parts[0].shape[1:])


#: Dtypes of parameters, buffers and optimizer state.
_DTYPES: Final = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
)


def _is_plain(part: Tensor) -> bool:
    """Return whether a tensor is as `write_shards` writes it: dense, contiguous, on the CPU, and owns its memory."""
    dense = part.layout is torch.strided and part.device.type == "cpu" and part.dtype in _DTYPES
    return dense and not part.requires_grad and part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


def _put_back(value: Any, wholes: Mapping[str, Tensor], done: dict[int, Any]) -> Any:
    """Return the state with tensors instead of placeholders; ``done`` caches containers that occur several times."""
    if not isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, dict) and value.keys() == {_NAME, _SHAPE}:
        whole = wholes[value[_NAME]]
        if list(whole.shape) != value[_SHAPE]:
            raise ValueError(f"the shards of {value[_NAME]} do not add up to its shape")
        return whole
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _put_back(item, wholes, done) for key, item in value.items()}
        else:
            done[id(value)] = type(value)(_put_back(item, wholes, done) for item in value)
    return done[id(value)]


def _own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a view of larger memory, because `torch.save` writes the whole storage."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _file_of(rank: int) -> str:
    return f"rank-{rank}.pt"
