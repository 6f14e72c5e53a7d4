"""Files of states: tensors and plain values as ``torch.save`` writes them, digested while they are written, verified before they are read.

What is saved is checked, so that it can be read back: at save time, where the mistake is made, and not when a run is to be
resumed. What is read can be anybody's: nothing in it is called.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import IO, Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from mptrain.errors import CheckpointError, out_of_memory
from mptrain.files import open_to_read
from mptrain.runlog.atomic_files import as_storage_error, digest_of, storage_errors, sync_folder, temporary
from mptrain.torch_private import weights_only_unpickler

_LEAVES = frozenset({str, int, float, bool, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})

#: Small pieces are collected up to this length before they are written, bytes.
_SMALL: Final = 1 << 20

#: After so many bytes the system is asked to begin writing them out, for which it would else wait for the fsync.
_PIECE: Final = 8 << 20

#: Characters of a sentence about a file.
_LONGEST: Final = 200


def check_plain(value: Any, where: str = "state") -> list[Tensor]:
    """All tensors in a state of plain values, in their order.

    Types are compared exactly: a ``numpy.float64`` is a float to isinstance and is refused by a safe load.

    Args:
        value: dict (also OrderedDict), list, tuple, str, int, float, bool, None, Tensor, Parameter.
        where: The path of the value, for the message.

    Returns:
        The tensors; one that is there twice is listed twice.

    Raises:
        TypeError: Anything else is in it, or a key is neither str nor int; the message says where.
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
    raise TypeError(f"{where} is a {_name(kind)}; only plain containers, numbers, text, None and tensors can be saved")


def write_state(state: dict[str, Any], tensors: list[Tensor], path: Path, good: str = "") -> tuple[str, int]:
    """Write a state durably under its final name.

    Args:
        state: What `check_plain` lets pass. Nothing may change it meanwhile.
        tensors: Those in it.
        path: The file; its folder must exist.
        good: What a failure leaves intact, for the message.

    Returns:
        SHA-256 of the file, and its length in bytes.

    Raises:
        StorageError: The disk refuses.
    """
    draft = temporary(path)
    needed = sum(tensor.nbytes for tensor in tensors)
    storages = [tensor.untyped_storage() for tensor in tensors]
    lasting = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == "cpu"}
    file: HashedFile | None = None
    try:
        with storage_errors(path, needed=needed, good=good):
            with HashedFile(draft, lasting) as file:
                torch.save(state, cast("IO[bytes]", file))  # it only needs write and flush
                digest = file.finish()
            draft.replace(path)
            sync_folder(path.parent)  # the name must be on the disk before a manifest speaks of it
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if file is not None and file.failure is not None:
            raise as_storage_error(file.failure, path, needed=needed, good=good) from error
        raise
    return digest, file.count


def read_verified(path: Path, sha256: str, manifest: str, size: int | None = None) -> dict[str, Any]:
    """Return the state in a file, on the CPU, once its digest and its length are those that a manifest names.

    Args:
        path: The file.
        sha256: Its digest, in hexadecimal.
        manifest: The manifest's name, for the message.
        size: Its length in bytes, where known.

    Raises:
        CheckpointError: It is damaged, or holds anything else than tensors and plain values.
        StorageError: It cannot be read.
    """
    with storage_errors(path, "read"):
        found = path.stat().st_size
    if size not in (None, found):
        raise CheckpointError(f"{path} is damaged: {found} bytes instead of {size}")
    if digest_of(path).hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {manifest}")
    try:
        state = load_plain(path)
    except (OSError, NotPlain) as error:
        raise CheckpointError(f"{path} cannot be loaded safely: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds no state, but a value of type {type(state).__name__}")
    return state


class NotPlain(Exception):
    """A file holds something else than tensors and plain values, or is damaged; the message is short and says why."""


def load_plain(path: Path) -> Any:
    """Return what ``torch.save`` has written, on the CPU, if it is tensors and plain values: nothing in the file is called.

    Raises:
        OSError: The file cannot be read.
        NotPlain: It holds anything else, or is damaged.
    """
    with open_to_read(path):  # what is raised below is about what is in it
        pass
    try:
        if _is_tar(path):  # which torch would unpack into a folder before it refuses it
            raise NotPlain("it is a tar archive, as early versions of torch wrote them, or nothing but zeros")
        with _brief_refusals(), warnings.catch_warnings():  # of protocols that torch may not read: it says so, or does
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except NotPlain:
        raise
    except Exception as error:  # torch documents no set of errors for a file that it cannot read
        if refused := out_of_memory(error, f"reading {path}"):  # which says nothing about the file
            raise refused from error
        said = error.__context__ if isinstance(error.__context__, _Brief) else error  # torch wraps it in advice
        lines = str(said)[:_LONGEST].splitlines()
        raise NotPlain(lines[0] if lines else type(said).__name__) from error


def _is_tar(path: Path) -> bool:
    with open_to_read(path) as file:
        try:
            tarfile.open(fileobj=file, mode="r:").close()  # as torch does; other modes would unpack what is compressed
        except tarfile.TarError:
            return False
    return True


class _Brief(pickle.UnpicklingError):
    def __init__(self, message: str = "") -> None:
        super().__init__(str(message)[:_LONGEST])


@contextlib.contextmanager
def _brief_refusals() -> Iterator[None]:
    """Cut what torch's unpickler says about a file.

    `torch.load` looks into that sentence by patterns whose time grows with the square of the longest word. The words are
    the file's: one of 80,000 characters took it two minutes to refuse.
    """
    # Both names are private: where torch has others, its sentences stay as long as they are.
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
    """A new file. A thread digests the bytes while the caller's thread writes them; neither holds Python's lock then.

    Args:
        path: Replaced if it exists.
        lasting: Memory whose content stays as it is while the file is open: address to length in bytes. What is written
            from such an address is digested there meanwhile; of anything else, what is small is copied first.

    Attributes:
        count: Bytes so far.
        failure: The first OSError of the file; torch reports it as an error of its own, without the cause.

    Raises:
        OSError: The file cannot be made, here, or written, in every method.
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
        """Write all bytes."""
        view = memoryview(data)
        if self._lasting.get(int(np.frombuffer(view, np.uint8).ctypes.data), 0) >= len(view):
            self._undigested.put(view)
        elif len(view) <= _SMALL:
            self._undigested.put(bytes(view))
        else:  # no copies of what is large: there may be no memory for them
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
        """Nothing that is held back is needed before `finish`."""

    def finish(self) -> str:
        """Force the file to the disk; call it last.

        Returns:
            SHA-256 of all bytes, in hexadecimal.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._undigested.put(None)
        self._thread.join()
        return self._digest.hexdigest()

    def _write(self, piece: memoryview) -> None:
        self._file.write(piece)
        self.count += len(piece)
        if self.count - self._advised >= _PIECE and hasattr(os, "posix_fadvise"):  # macOS has none
            self._file.flush()
            self._advised = self.count
            with contextlib.suppress(OSError):  # advice that a file system does not take
                # Linux begins to write out what it is told to forget, and forgets what is on the disk, whose memory the
                # next pieces then take.
                os.posix_fadvise(self._file.fileno(), 0, self.count, os.POSIX_FADV_DONTNEED)

    def _digest_all(self) -> None:
        while (data := self._undigested.get()) is not None:
            self._digest.update(data)
            self._undigested.task_done()


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
