"""Kernel file lock of a run or sweep folder: it allows one writing process, and is released when that process ends.

The text in the lock file only names the holder for people. Only the kernel decides whether the lock is held.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mptrain.runlog.atomic_files import require_folder_stays, storage_errors, write_all
from mptrain.runlog.run_state import now
from mptrain.runlog.strict_json import parse_strict
from mptrain.system.errors import StorageError
from mptrain.system.files import open_in_place, open_to_read

PATIENCE = 0.3  # seconds to retry; a reader in `holder_of` blocks a writer for microseconds

_held: set[int] = set()


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Process that holds the lock of a run or sweep, as it wrote itself into the lock file.

    Attributes:
        pid: Process id; 0 if the process has not written it yet.
        host: Host name; empty if unknown.
        since: Time at which it took the lock, UTC in ISO 8601; empty if unknown.
    """

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}" if self.pid else "another process"


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a run or sweep folder inside the ``with`` block.

    The lock file is created if missing and never removed. Its folder must stay in place meanwhile. Raise StorageError
    if another process holds the lock; the message names it.
    """
    with storage_errors(path, "lock"):
        descriptor = open_in_place(path, os.O_RDWR)
        try:
            deadline = time.monotonic() + PATIENCE
            while not (taken := _take(descriptor)) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not taken:
                raise StorageError(
                    f"{path.parent} is being written by {_read_holder(descriptor)}",
                    "wait until that process ends, stop it, or choose another run.name",
                )
            os.ftruncate(descriptor, 0)
            holder = LockHolder(os.getpid(), socket.gethostname(), now())
            write_all(descriptor, bytearray(json.dumps(asdict(holder)).encode() + b"\n"))
        except BaseException:
            os.close(descriptor)
            raise
    _held.add(descriptor)
    try:
        with require_folder_stays(path.parent):
            yield
    finally:
        if descriptor in _held:  # a forked child has already closed its copy
            _held.discard(descriptor)
            os.close(descriptor)  # the kernel releases the lock with its last descriptor


def holder_of(path: Path) -> LockHolder | None:
    """Return the process that holds a lock; None if the lock is free or its file does not exist."""
    if not path.exists():
        return None
    with storage_errors(path, "read"), open_to_read(path) as file:
        return None if _take(file.fileno(), shared=True) else _read_holder(file.fileno())


def _take(descriptor: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _read_holder(descriptor: int) -> LockHolder:
    text = os.pread(descriptor, 4096, 0)
    try:
        return LockHolder(**parse_strict(text.decode()))
    except (ValueError, TypeError):  # the holder has not written its name yet
        return LockHolder(0, "", "")


def _forget_in_child() -> None:
    """Close the lock in a forked worker, because its copy would outlive a killed parent. The parent keeps the lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
