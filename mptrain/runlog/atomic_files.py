"""Safe writing: failures of the disk as errors for the user, files that are replaced whole or not at all, in folders that stay in place.

Every writer of the package goes through here. Nothing here knows what a file means.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mptrain.errors import StorageError
from mptrain.files import open_to_read
from mptrain.machine import path_of_descriptor
from mptrain.masking import masked

TEMPORARY = ".tmp"
_DRAFT = re.compile(r".+\.[0-9a-f]{8}\.tmp")

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_REFUSED = {
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


@contextmanager
def storage_errors(path: Path, doing: str = "write", *, needed: int | None = None, good: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError; writing also requires that the folder is where it was (see `require_folder_stays`).

    Args:
        path: What was being written or read; the error names the file that the system names, else this.
        doing: The verb of the message: ``write``, ``create``, ``lock``; ``read`` alone changes nothing.
        needed: Bytes that the operation needs, where known; reported when the disk is full.
        good: What the failure leaves intact, for instance ``the checkpoint of step 100``.

    Raises:
        StorageError: With the cause in words, needed and free bytes of a full disk, and what is still good.
    """
    if doing != "read":
        require_in_place(path)
    try:
        yield
    except OSError as error:
        if doing != "read":
            require_in_place(path)  # else it is no error of the disk
        raise as_storage_error(error, path, doing, needed=needed, good=good) from error


def as_storage_error(
    error: OSError, path: Path, doing: str = "write", *, needed: int | None = None, good: str = ""
) -> StorageError:
    """The StorageError that stands for an OSError; the arguments are those of `storage_errors`."""
    reason = _FULL.get(error.errno or 0) or _REFUSED.get(error.errno or 0) or error.strerror or str(error)
    hint = "check the path and the disk"
    if error.errno in _FULL:
        wanted = "" if needed is None else f"{readable_bytes(needed)} needed, "
        reason += f" ({wanted}{readable_bytes(free_bytes(path))} free)"
        hint = "free some space; new runs can be written to another disk: run.root=FOLDER"
    elif error.errno in _REFUSED:
        hint = "change its permissions, or choose a folder that you can write (run.root for a new run)"
    if good:
        hint += f"; still good: {good}"
    return StorageError(f"cannot {doing} {error.filename or path}: {reason}", hint)


#: Folders that this process is writing: their absolute paths, and an open descriptor of each.
_in_place: dict[Path, int] = {}


@contextmanager
def require_folder_stays(folder: Path) -> Iterator[None]:
    """Let every write below a folder fail, while the context lasts, once the folder is no longer where it was.

    Paths would else make a folder anew that was moved or removed, or write into another one that has taken its place. Its
    descriptor is held open, so that no other folder can get its inode number.

    Raises:
        StorageError: There is no such folder.
    """
    place = folder.absolute()
    before = _in_place.get(place)
    with storage_errors(place, "read"):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _in_place[place] = descriptor
    try:
        yield
    finally:
        if before is None:
            del _in_place[place]
        else:
            _in_place[place] = before
        os.close(descriptor)


def require_in_place(path: Path) -> None:
    """Refuse to write below a folder of `require_folder_stays` that was moved, removed or replaced.

    Raises:
        StorageError: Says what has become of it.
    """
    for folder, descriptor in list(_in_place.items()) if _in_place else ():
        if path.absolute().is_relative_to(folder) and not _is_open_as(folder, descriptor):
            now = path_of_descriptor(descriptor) or folder
            if now != folder and _is_open_as(now, descriptor):
                what, hint = (
                    f"it was moved to {now}",
                    f"leave it alone while it is being written; go on with: mptrain resume {now}",
                )
            elif folder.exists():
                what, hint = "another folder is in its place", "restore the folder that was written, or start again"
            else:
                what, hint = "it was removed", "start again, and leave the folder alone"
            raise StorageError(f"{_as_named(folder)} has gone while it was being written: {what}", hint)


def _is_open_as(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _as_named(folder: Path) -> Path:
    """Return the path relative to the current folder where it lies below that, as users write it."""
    with contextlib.suppress(ValueError, OSError):
        return folder.relative_to(Path.cwd())
    return folder


def free_bytes(path: Path) -> int:
    """Bytes that can still be written without privileges where the path is or would be; 0 if unknown."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def readable_bytes(count: int) -> str:
    """A number of bytes for people: ``812 B``, ``4.2 kB``, ``1.5 GB`` (powers of 1000)."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def temporary(path: Path) -> Path:
    """A fresh name beside the path, for a file that is to replace it; recognised if its writer is killed."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


def remove_drafts(folder: Path) -> None:
    """Remove what writers that were killed left in a folder that nobody else writes: files with names of `temporary`.

    Raises:
        StorageError: One of them cannot be removed.
    """
    with storage_errors(folder, "clean"):
        for path in folder.iterdir():
            if _DRAFT.fullmatch(path.name):
                path.unlink(missing_ok=True)


def require_no_links(folder: Path, inside: Iterable[Path] = ()) -> None:
    """Refuse the folder of a run or sweep with links in it: they could lead anywhere if somebody else made it.

    Args:
        folder: What lies in it is looked at, but not what lies in its folders.
        inside: Those of its folders in which everything is looked at.

    Raises:
        StorageError: Names a link.
    """
    with storage_errors(folder, "read"):
        links = sorted(entry for entry in folder.iterdir() if entry.is_symlink()) if folder.is_dir() else []
    for place in () if links else inside:
        for parent, folders, files in os.walk(place):  # passes over what a run that goes on removes meanwhile
            links += [path for name in sorted([*folders, *files]) if (path := Path(parent, name)).is_symlink()]
    if links:
        hint = "put what it points to in its place: what mptrain reads and writes stays in the folder itself"
        raise StorageError(f"{links[0]} is a symbolic link", hint)


def write_atomically(path: Path, data: str | bytes, *, durable: bool = True, good: str = "") -> None:
    """Replace a file so that every reader, and every crash, sees the old content or the new one whole. Text is written without secrets.

    Args:
        path: The file; its folder must exist.
        data: The new content; text is encoded as UTF-8, undecodable bytes of a command line survive.
        durable: Also force file and folder to the disk, so that the new content survives a power failure.
        good: What a failure leaves intact, for the message.

    Raises:
        StorageError: The file cannot be written; the old content is untouched.
    """
    content = masked(data).encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    draft = temporary(path)
    with storage_errors(path, needed=len(content), good=good):
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, bytearray(content))
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        if durable:
            sync_folder(path.parent)


def write_all(descriptor: int, pending: bytearray) -> None:
    """Write a buffer to the end, removing from it what the system has accepted, so that a retry can go on."""
    while pending:
        del pending[: os.write(descriptor, pending)]


def digest_of(path: Path, length: int | None = None) -> hashlib._Hash:
    """Return SHA-256 of the first bytes of a file, or of all; of nothing where there is no file.

    Raises:
        StorageError: It cannot be read.
    """
    digest = hashlib.sha256()
    with storage_errors(path, "read"):
        if path.exists():
            with open_to_read(path) as file:
                left = path.stat().st_size if length is None else length
                while left > 0 and (piece := file.read(min(left, 1 << 20))):
                    digest.update(piece)
                    left -= len(piece)
    return digest


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk: a rename is not durable before that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder, and say so
            raise
    finally:
        os.close(descriptor)
