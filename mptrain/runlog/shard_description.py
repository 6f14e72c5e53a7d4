"""torch's description of the parts of a checkpoint, read without anything in it being run or changed.

The file is a pickle of instances of torch's classes, and anybody can have written it. A pickle that is handed a class can
call it, and set attributes of the class itself: of a ``Path``, say, which the whole program uses. So it is handed stand-ins,
which keep what they are given; what is in them is checked, and only then are there objects of torch.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from mptrain.errors import CheckpointError
from mptrain.files import open_to_read
from mptrain.runlog.state_validation import why_refused

#: With which an archive of ``torch.save`` begins; torch would unpack some other kinds of file into a folder.
_ARCHIVE = b"PK\x03\x04"

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")


def read_description(path: Path, files: Mapping[str, str]) -> Metadata:
    """What tensors there are, and in which places of which files their parts stand.

    Args:
        path: The description; the files are beside it.
        files: The names of those that belong to the checkpoint, as keys.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: It is no description of tensors in those files.
    """
    with open_to_read(path) as file:
        try:
            whole = _Reader(file).load()
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # a pickle raises what it likes
            raise CheckpointError(f"{path} cannot be read: {why_refused(error)}") from error
    try:
        return _described(whole, path.parent, files)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no description of the parts of a checkpoint: {why_refused(error)}") from error


class _StandIn:
    """Is there in the place of an instance of one of torch's classes.

    Attributes:
        state: What its attributes would have been made of.
    """

    state: Any = None

    def __init__(self, *given: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:  # asked of a class instead, it raises: there is nothing to set it on
        self.state = state


class _Whole(_StandIn): ...


class _Tensor(_StandIn): ...


class _Properties(_StandIn): ...


class _Chunk(_StandIn): ...


class _Index(_StandIn): ...


class _Place(_StandIn): ...


class _Unread(_StandIn): ...


_OF_TORCH = "torch.distributed.checkpoint."
_STAND_INS: dict[tuple[str, str], Any] = {
    (f"{_OF_TORCH}metadata", "Metadata"): _Whole,
    (f"{_OF_TORCH}metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_OF_TORCH}metadata", "TensorProperties"): _Properties,
    (f"{_OF_TORCH}metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_OF_TORCH}metadata", "MetadataIndex"): _Index,
    (f"{_OF_TORCH}filesystem", "_StorageInfo"): _Place,
    (f"{_OF_TORCH}metadata", "StorageMeta"): _Unread,
    (f"{_OF_TORCH}metadata", "_MEM_FORMAT_ENCODING"): _Unread,
    ("torch.serialization", "_get_layout"): _Unread,
    ("torch", "strided"): "strided",
    ("torch", "Size"): tuple,
    **{("torch", name): name for name in _DTYPES},
    **{(module, name): _Unread for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")},
}


class _Reader(pickle._Unpickler):
    """Reads what torch writes: mappings whose keys are names and indices, no sets, no bytes.

    In Python, because the other one takes as much memory as a few bytes name; and with keys checked before they are hashed,
    because hashing what is nested deeply ends the process, or never ends.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    for _code in (pickle.BYTEARRAY8, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.DICT):
        del dispatch[_code[0]]

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _load_setitems(self) -> None:
        self._set(self.pop_mark())

    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems

    def _set(self, items: list[Any]) -> None:
        mapping = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(mapping) is not dict or type(key) not in (str, _Index):
                raise TypeError("a mapping of something else than names and indices")
            mapping[key] = value

    def find_class(self, module: str, name: str) -> Any:
        """What stands in for a class of a description.

        Raises:
            CheckpointError: It is none.
        """
        if (module, name) not in _STAND_INS:
            raise CheckpointError(
                f"the description of the parts wants {f'{module}.{name}'[:100]} called, which torch's own does not: it is somebody else's"
            )
        return _STAND_INS[module, name]


def _described(whole: Any, folder: Path, files: Mapping[str, str]) -> Metadata:
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # private, and what torch's own reader reads
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described = _fields(whole, _Whole)
    places = {}
    for key, value in described["storage_data"].items():
        index, place = _fields(key, _Index), _fields(value, _Place)
        name, offset, length = place["relative_path"], _count(place["offset"]), _count(place["length"])
        if type(name) is not str or name not in files or place.get("transform_descriptors"):
            raise CheckpointError(f"{folder} names a file that is none of the checkpoint's")
        if type(index["fqn"]) is not str:
            raise TypeError("a tensor without a name")
        places[index["fqn"], _shape(index["offset"])] = _StorageInfo(name, offset, length)
    _check_places(places.values(), folder)
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, value in described["state_dict_metadata"].items():
        if type(name) is not str:
            raise TypeError("a tensor without a name")
        entry = _fields(value, _Tensor)
        dtype = _dtype(entry["properties"])
        size = _shape(entry["size"])
        chunks, begun = [], set()
        for item in entry["chunks"]:
            chunk = _fields(item, _Chunk)
            offsets, sizes = _shape(chunk["offsets"]), _shape(chunk["sizes"])
            inside = all(a + b <= c for a, b, c in zip(offsets, sizes, size, strict=True))
            if not inside or math.prod(sizes) * dtype.itemsize > places[name, offsets].length:
                raise ValueError(f"a part of {name} is larger than what there is of it")
            if offsets in begun:
                raise ValueError(f"a part of {name} is there twice")
            begun.add(offsets)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"the parts of {name} are not the whole of it")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)
    indexed = {MetadataIndex(name, offset): place for (name, offset), place in places.items()}
    return Metadata(tensors, storage_data=indexed)


def _check_places(places: Iterable[_StorageInfo], folder: Path) -> None:
    by_file: dict[str, list[tuple[int, int]]] = {}
    for place in places:
        by_file.setdefault(place.relative_path, []).append((place.offset, place.length))
    for name, spans in by_file.items():
        free, size = 0, (folder / name).stat().st_size
        with open_to_read(folder / name) as file:
            for offset, length in sorted(spans):
                file.seek(offset)
                if not free <= offset <= offset + length <= size or file.read(len(_ARCHIVE)) != _ARCHIVE:
                    raise ValueError(f"there is no tensor of its own at byte {offset} of {name}")
                free = offset + length


def _fields(value: Any, kind: type[_StandIn]) -> dict[str, Any]:
    if type(value) is not kind or type(value.state) is not dict:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value.state


def _dtype(properties: Any) -> torch.dtype:
    if type(properties) is not _Properties or properties.state[0] not in _DTYPES:
        raise TypeError("a tensor of no kind")
    dtype = getattr(torch, properties.state[0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError("no count")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 64:
        raise TypeError("no shape")
    return tuple(_count(item) for item in value)
