"""Safe opening of files that others made: regular files only, and no hard links when writing in place.

What is opened is checked, not its name before, and libraries get the open file (pictures, recordings, event files).
All functions raise OSError for a file that cannot be opened or is not a regular one (a named pipe, a socket, a device).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

from mptrain.system.errors import StorageError

#: Kinds of files that are not regular, in words.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_to_read(path: Path | str) -> IO[bytes]:
    """Open a regular file for reading bytes; fail at once for any other kind of file, such as a named pipe.

    Plain ``open`` would wait for the writer of a named pipe, which an untrusted run directory may contain.
    """
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def expanded(path: Path | str) -> Path:
    """Return a path with ``~`` and ``~USER`` replaced by home folders; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def read_bytes(path: Path | str) -> bytes:
    """Return the content of a regular file."""
    with open_to_read(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the content of a regular file as UTF-8 text; raise UnicodeDecodeError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def require_replaceable(path: Path) -> None:
    """Raise StorageError if a path exists and is no regular file; a rename would replace a device, a pipe or a link."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except OSError:  # it does not exist, or writing it says why it cannot be written
        return
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "something else")
        raise StorageError(f"{path} is {what}, not a file, and is not replaced", "choose another path")


def open_in_place(path: Path, flags: int) -> int:
    """Open a file for appending or truncating in place, create it if missing, and return its file descriptor.

    Symbolic links are not followed, so that an untrusted run directory cannot redirect a write. Raise StorageError if
    the file has other hard links, which would change too. ``flags`` are those of `os.open`.
    """
    descriptor = _open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW)
    links = os.fstat(descriptor).st_nlink
    if links > 1:
        os.close(descriptor)
        folder = path.parent
        raise StorageError(
            f"{path} has {'another hard link' if links == 2 else f'{links - 1} other hard links'}"
            ", which would change too",
            f"work on a copy: cp -r {folder} {folder}-copy",
        )
    return descriptor


def _open_regular(path: Path | str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a named pipe without a reader
            raise
        raise _no_file(path, stat.S_IFMT(Path(path).stat().st_mode)) from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise _no_file(path, kind)
    return descriptor


def _no_file(path: Path | str, kind: int) -> OSError:
    if kind == stat.S_IFDIR:
        return OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", str(path))
