"""Writes a file, digests it and gets it onto the disk, all three at the same time."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Final

import numpy as np

#: Small pieces are collected up to this length before they are written, bytes.
_SMALL: Final = 1 << 20

#: After so many bytes the system is asked to begin writing them out, for which it would else wait for the fsync.
_PIECE: Final = 8 << 20


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undigested.put(None)
        self._thread.join()
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Write all bytes."""
        view = memoryview(data)
        if self._lasting.get(_address(view), 0) >= len(view):
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


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
