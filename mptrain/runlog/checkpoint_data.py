"""State files and their shards: tensors and plain values, hashed on writing and verified on reading.

Values are checked when they are saved, so that a state that cannot be loaded fails at once and not when the run is
resumed. Files are untrusted on reading: loading must not call anything in them.

Each rank writes its own shard, so no rank needs memory for a whole tensor. ``rank-NUMBER.pt`` is a state file with one
tensor per name. Tensors are split as in `mptrain.numerics.tensors`: along the first dimension, in rank order. Reading
joins them to whole tensors, so a run can resume with any world size. Only files that the checkpoint's manifest names
are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import IO, Any, Final, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mptrain.numerics.tensors import is_sharded, part
from mptrain.runlog.atomic_files import as_storage_error, digest_of, storage_errors, sync_folder, temporary
from mptrain.system.errors import CheckpointError, out_of_memory
from mptrain.system.files import open_to_read
from mptrain.system.torch_private import weights_only_unpickler

_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})

#: Size of the write buffer in bytes.
_SMALL: Final = 1 << 20

#: Write-back to the disk is requested after this many bytes; without a request the system may delay it until fsync.
_PIECE: Final = 8 << 20

#: Maximum length of an error text from torch, characters.
_LONGEST: Final = 200


def check_plain(value: Any, where: str = "state") -> list[Tensor]:
    """Check that a state of a checkpoint holds only plain values and tensors, and return its tensors.

    Allowed are dict (also OrderedDict) with keys of str and int, list, tuple, str, bytes, int, float, bool, None,
    Tensor and Parameter. Types are compared exactly: ``numpy.float64`` passes isinstance for float, but a weights-only
    load rejects it. The tensors are in order of traversal; one that occurs twice is listed twice. Raises TypeError for
    another type; the message names the place, a path that begins with ``where``.
    """
    kind = type(value)
    if kind in _LEAVES:
        return []
    if kind in _TENSORS:
        return [value]
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in _KEYS:
                raise TypeError(f"{where} has a key of type {_name(type(key))}; only str and int can be saved")
        return [tensor for key, item in value.items() for tensor in check_plain(item, f"{where}[{key!r}]")]
    if kind is list or kind is tuple:
        return [tensor for index, item in enumerate(value) for tensor in check_plain(item, f"{where}[{index}]")]
    raise TypeError(
        f"{where} is a {_name(kind)}; only plain containers, numbers, text, bytes, None and tensors can be saved"
    )


def write_state(state: dict[str, Any], tensors: list[Tensor], path: Path, good: str = "") -> tuple[str, int]:
    """Write a checkpoint's state to a file of `torch.save`, atomically and durably; return its SHA-256 and bytes.

    The state passes `check_plain`, which returned ``tensors``, and must not change during the call.
    """
    draft = temporary(path)
    needed = sum(tensor.nbytes for tensor in tensors)
    storages = [tensor.untyped_storage() for tensor in tensors]
    lasting = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == "cpu"}
    file: HashedFile | None = None
    try:
        with storage_errors(path, needed=needed, good=good):
            with HashedFile(draft, lasting) as file:
                torch.save(state, cast("IO[bytes]", file))  # torch.save only needs write and flush
                digest = file.finish()
            draft.replace(path)
            sync_folder(path.parent)  # the name must be on the disk before a manifest refers to it
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if file is not None and file.failure is not None:
            raise as_storage_error(file.failure, path, needed=needed, good=good) from error
        raise
    return digest, file.count


def read_verified(path: Path, sha256: str, manifest: str, size: int | None = None) -> dict[str, Any]:
    """Load a state that `write_state` wrote, on the CPU, after verifying the file's SHA-256 and length.

    ``sha256`` is hexadecimal, ``size`` in bytes, if known; ``manifest`` names the source of both in the error message.

    Raises:
        CheckpointError: The file is damaged, or holds anything except tensors and plain values.
        EnvironmentRefused: There is not enough memory.
    """
    with storage_errors(path, "read"):
        actual = path.stat().st_size
    if size not in (None, actual):
        raise CheckpointError(f"{path} is damaged: {actual} bytes instead of {size}")
    if digest_of(path).hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {manifest}")
    try:
        state = load_plain(path)
    except (OSError, NotPlain) as error:
        raise CheckpointError(f"{path} cannot be loaded safely: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds a value of type {type(state).__name__} instead of a state")
    return state


class NotPlain(Exception):
    """Error, one short line, for a file that is damaged or holds anything except tensors and plain values."""


def load_plain(path: Path) -> Any:
    """Load a file of tensors and plain values written by `torch.save`, on the CPU, without calling anything in it.

    Raises:
        OSError: The file cannot be read.
        NotPlain: The file holds anything else, or is damaged.
        EnvironmentRefused: There is not enough memory.
    """
    with open_to_read(path):  # raises OSError here, so that errors below concern the content
        pass
    try:
        if _is_tar(path):  # torch would unpack it into a folder before rejecting it
            raise NotPlain("it is a tar archive, as early versions of torch wrote them, or contains only zeros")
        with _brief_refusals(), warnings.catch_warnings():  # torch warns of pickle protocols other than its own
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except NotPlain:
        raise
    except Exception as error:  # torch documents no set of errors for a file that it cannot read
        if refused := out_of_memory(error, f"reading {path}"):  # not a fault of the file
            raise refused from error
        cause = error.__context__ if isinstance(error.__context__, _Brief) else error  # torch adds advice to it
        lines = str(cause)[:_LONGEST].splitlines()
        raise NotPlain(lines[0] if lines else type(cause).__name__) from error


def _is_tar(path: Path) -> bool:
    with open_to_read(path) as file:
        try:
            tarfile.open(fileobj=file, mode="r:").close()  # like torch; other modes decompress
        except tarfile.TarError:
            return False
    return True


class _Brief(pickle.UnpicklingError):
    def __init__(self, message: str = "") -> None:
        super().__init__(str(message)[:_LONGEST])


@contextlib.contextmanager
def _brief_refusals() -> Iterator[None]:
    """Limit the length of error messages from torch's unpickler.

    `torch.load` searches them with regular expressions whose time grows with the square of the longest word, which
    comes from the file: rejecting a word of 80,000 characters took two minutes.
    """
    # Both names are private. If torch renames them, messages keep their full length.
    module = weights_only_unpickler()
    before = getattr(module, "UnpicklingError", None)
    if module is None or before is None:
        yield
        return
    module.UnpicklingError = _Brief  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.UnpicklingError = before  # type: ignore[attr-defined]


class HashedFile:
    """New file that a second thread hashes while the caller writes it; both release the GIL meanwhile.

    Use it as a context manager, and call `finish` at the end. `torch.save` accepts it as a file. Constructor and
    methods raise OSError if the file cannot be created or written.

    Args:
        path: The file; replaced if it exists.
        lasting: Memory that does not change while the file is open: address to length in bytes. Data written from such
            an address is hashed in place. Small data from other addresses is copied first.

    Attributes:
        count: Number of bytes written so far.
        failure: The first OSError of the file, kept because torch raises its own error without the cause; else None.
    """

    def __init__(self, path: Path, lasting: Mapping[int, int]) -> None:
        self.count = 0
        self.failure: OSError | None = None
        self._lasting = lasting
        self._advised = 0
        self._digest = hashlib.sha256()
        self._undigested: Queue[bytes | memoryview | None] = Queue()
        self._thread = Thread(target=self._digest_all, name="digest", daemon=True)
        self._file = path.open("wb", buffering=_SMALL)

    def __enter__(self) -> HashedFile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._undigested.put(None)
        self._thread.join()
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes to the file, pass them to the hashing thread, and return their number, which is always all.

        The bytes may change after the call, unless they lie in ``lasting`` memory.
        """
        view = memoryview(data)
        if self._lasting.get(int(np.frombuffer(view, np.uint8).ctypes.data), 0) >= len(view):
            self._undigested.put(view)
        elif len(view) <= _SMALL:
            self._undigested.put(bytes(view))
        else:  # large data is not copied, because memory may be short
            self._undigested.join()
            self._digest.update(view)
        try:
            for start in range(0, len(view), _PIECE):
                self._write(view[start : start + _PIECE])
        except OSError as error:
            self.failure = self.failure or error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing; `torch.save` needs the method, and `finish` flushes the file."""

    def finish(self) -> str:
        """Flush the file to the disk after the last `write`, and return the hexadecimal SHA-256 of its content."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._undigested.put(None)
        self._thread.join()
        return self._digest.hexdigest()

    def _write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self.count += len(piece)
        if self.count - self._advised >= _PIECE and hasattr(os, "posix_fadvise"):  # not on macOS
            self._file.flush()
            self._advised = self.count
            with contextlib.suppress(OSError):  # some file systems do not support it
                # On DONTNEED, Linux starts to write back dirty pages and drops clean ones, which frees memory for the
                # next pieces.
                os.posix_fadvise(self._file.fileno(), 0, self.count, os.POSIX_FADV_DONTNEED)

    def _digest_all(self) -> None:
        while (data := self._undigested.get()) is not None:
            self._digest.update(data)
            self._undigested.task_done()


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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
    shards: dict[str, Tensor] = {}

    def taken(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_sharded(value):
                return value
            shards[where] = value
            return {_NAME: where, _SHAPE: list(value.shape)}
        if isinstance(value, dict):
            return {key: taken(item, f"{where}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(taken(item, f"{where}/{index}") for index, item in enumerate(value))
        return value

    marked = taken(state, "")
    return (marked, shards) if shards else (state, shards)  # the original keeps its shared objects shared


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
        if not all(type(shard) is Tensor and _is_plain(shard) for shard in parts):
            raise TypeError("a shard is not a plain tensor")
        if len({(shard.dtype, shard.shape[1:]) for shard in parts}) > 1:
            raise TypeError("the shards of a tensor differ in dtype or shape")
        addresses = tuple(shard.data_ptr() for shard in parts)
        if addresses not in self._joined or self._joined[addresses].dtype != parts[0].dtype:
            self._joined[addresses] = torch.cat([shard.reshape(-1) for shard in parts])
        return self._joined[addresses].view(sum(map(len, parts)), *parts[0].shape[1:])


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
