"""Safe file writing: atomic replacement, OS errors as `StorageError`, and checks that a folder stays in place.

All code that writes files uses this module. It must not depend on the content of a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mptrain.system.errors import StorageError
from mptrain.system.files import open_to_read, require_replaceable
from mptrain.system.machine import path_of_descriptor
from mptrain.system.masking import masked

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
    """Convert an OSError that is raised inside the ``with`` block to a StorageError with its cause and a hint.

    For any verb except ``read``, the folder must also still be in place (see `require_folder_stays`).

    Args:
        path: The file being written or read. The error names the OSError's own file name if it has one.
        doing: The verb of the message, such as ``write``, ``create``, ``lock`` or ``read``.
        needed: Bytes that the operation needs, if known; reported with the free bytes when the disk is full.
        good: Files that the failure leaves intact, for instance ``the checkpoint of step 100``.
    """
    if doing != "read":
        require_in_place(path)
    try:
        yield
    except OSError as error:
        if doing != "read":
            require_in_place(path)  # a moved folder is the more precise error
        raise as_storage_error(error, path, doing, needed=needed, good=good) from error


def as_storage_error(
    error: OSError, path: Path, doing: str = "write", *, needed: int | None = None, good: str = ""
) -> StorageError:
    """Return the StorageError for an OSError, with the cause and a hint; arguments as for `storage_errors`."""
    reason = _FULL.get(error.errno or 0) or _REFUSED.get(error.errno or 0) or error.strerror or str(error)
    hint = "check the path and the disk"
    if error.errno == errno.ENOSPC and free_bytes(path) > (needed or 0) and not _has_inodes(path):
        reason = "the disk can have no more files: its inodes are used up"
        hint = "remove files that are not needed; to write new runs to another disk, set run.root=FOLDER"
    elif error.errno in _FULL:
        wanted = "" if needed is None else f"{readable_bytes(needed)} needed, "
        reason += f" ({wanted}{readable_bytes(free_bytes(path))} free)"
        hint = "free some disk space; to write new runs to another disk, set run.root=FOLDER"
    elif error.errno in _REFUSED:
        hint = "change the permissions, or choose a writable folder (run.root for a new run)"
    if good:
        hint += f"; still intact: {good}"
    return StorageError(f"cannot {doing} {error.filename or path}: {reason}", hint)


#: Folders that this process is writing: absolute path to an open descriptor.
_in_place: dict[Path, int] = {}


@contextmanager
def require_folder_stays(folder: Path) -> Iterator[None]:
    """Guard a folder inside the ``with`` block: every write below it fails if it has been moved, removed or replaced.

    Without this check, writing would create a moved or removed folder again, or write into its replacement.
    The folder's descriptor stays open, so that no other folder can get its inode number. Only the functions of
    this module check.
    """
    absolute = folder.absolute()
    before = _in_place.get(absolute)
    with storage_errors(absolute, "read"):
        descriptor = os.open(absolute, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _in_place[absolute] = descriptor
    try:
        yield
    finally:
        if before is None:
            del _in_place[absolute]
        else:
            _in_place[absolute] = before
        os.close(descriptor)


def require_in_place(path: Path) -> None:
    """Raise StorageError if the guarded folder that contains a path was moved, removed or replaced.

    `require_folder_stays` guards a folder. Without a guarded folder nothing happens.
    """
    for folder, descriptor in list(_in_place.items()) if _in_place else ():
        if path.absolute().is_relative_to(folder) and not _is_open_as(folder, descriptor):
            now = path_of_descriptor(descriptor) or folder
            if now != folder and _is_open_as(now, descriptor):
                what, hint = (
                    f"it was moved to {now}",
                    f"do not move a folder while it is being written; to continue: mptrain resume {now}",
                )
            elif folder.exists():
                what, hint = "another folder has replaced it", "restore the original folder, or start again"
            else:
                what, hint = "it was removed", "start again and do not change the folder while it is being written"
            raise StorageError(f"{_as_named(folder)} disappeared while it was being written: {what}", hint)


def _is_open_as(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _as_named(folder: Path) -> Path:
    with contextlib.suppress(ValueError, OSError):
        return folder.relative_to(Path.cwd())
    return folder


def free_bytes(path: Path) -> int:
    """Return the bytes that an unprivileged user can still write on the disk of a path; 0 if unknown.

    For a path that does not exist, the disk is that of its nearest existing parent.
    """
    disk = _disk_of(path)
    return disk.f_bavail * disk.f_frsize if disk else 0


def _has_inodes(path: Path) -> bool:
    """Return whether the disk of a path can have more files; True if unknown, as on disks without a fixed number."""
    disk = _disk_of(path)
    return disk is None or not disk.f_files or disk.f_favail > 0


def _disk_of(path: Path) -> os.statvfs_result | None:
    for candidate in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return os.statvfs(candidate)
    return None


def readable_bytes(count: int) -> str:
    """Format a number of bytes with a unit: ``812 B``, ``4.2 kB``, ``1.5 GB`` (powers of 1000)."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def temporary(path: Path) -> Path:
    """Return an unused name ``NAME.xxxxxxxx.tmp`` beside a file, for a draft (a new version that will replace it).

    `remove_drafts` recognises such names if the writer was killed.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


def require_no_links(folder: Path, inside: Iterable[Path] = ()) -> None:
    """Check that a run or sweep folder has no symbolic links, which in an untrusted folder could point anywhere.

    The direct entries of ``folder`` are checked, and the folders ``inside`` recursively. Raise StorageError for
    the first link.
    """
    with storage_errors(folder, "read"), os.scandir(folder) if folder.is_dir() else nullcontext(()) as entries:
        kinds = {entry.name: entry.is_symlink() for entry in entries}
    links = sorted(folder / name for name, is_link in kinds.items() if is_link)
    for subfolder in () if links else (path for path in inside if path.name in kinds):
        for parent, folders, files in os.walk(subfolder):  # ignores entries that an active run removes meanwhile
            links += [path for name in sorted([*folders, *files]) if (path := Path(parent, name)).is_symlink()]
    if links:
        hint = "replace the link with its target: mptrain reads and writes only inside the folder itself"
        raise StorageError(f"{links[0]} is a symbolic link", hint)


def write_atomically(path: Path, data: str | bytes, *, durable: bool = True, good: str = "") -> None:
    """Replace a file atomically: readers, also after a crash, see either the old or the new content.

    The arguments are those of `write_together`.
    """
    write_together({path: data}, durable=durable, good=good)


def write_together(files: Mapping[Path, str | bytes], *, durable: bool = True, good: str = "") -> None:
    """Replace files, each atomically, after all of them have been written under other names: a full disk changes none.

    Values of secret environment variables (tokens, keys) are masked in text.

    Args:
        files: New content by file, whose folder must exist. Text is encoded as UTF-8; undecodable bytes of a command
            line are preserved.
        durable: Also force files and folders to the disk, so that the new content survives a power failure.
        good: Files that a failure leaves intact, for the error message.

    Raises:
        StorageError: A file cannot be written, or is something else than a regular file.
    """
    drafts: dict[Path, Path] = {}
    with contextlib.ExitStack() as held:  # each draft's descriptor, by whose lock others know that it is being written
        try:
            for path in files:
                require_replaceable(path)
            for path, data in files.items():
                content = masked(data).encode("utf-8", "surrogateescape") if isinstance(data, str) else data
                with storage_errors(path, needed=len(content), good=good):
                    drafts[path] = draft = temporary(path)
                    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                    held.callback(os.close, descriptor)
                    _is_free(descriptor)
                    write_all(descriptor, bytearray(content))
                    if durable:
                        os.fsync(descriptor)
            for path, draft in drafts.items():
                with storage_errors(path, good=good):
                    draft.replace(path)
        except BaseException:
            for draft in drafts.values():
                with contextlib.suppress(OSError):
                    draft.unlink()
            raise
    for folder in {path.parent for path in files} if durable else ():
        with storage_errors(folder, good=good):
            sync_folder(folder)


@contextmanager
def folder_at_once(path: Path) -> Iterator[Path]:
    """Give a draft of a new folder to be filled in the ``with`` block, which gets its name after it or is removed.

    What killed processes have left in its place is removed.
    """
    for folder in path.parent.parent.glob("*"):
        remove_drafts(folder)
    draft = temporary(path)
    with storage_errors(path, "create"):
        draft.mkdir(parents=True)
        descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _is_free(descriptor)
        yield draft
        with storage_errors(path, "create"):
            draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def remove_drafts(folder: Path, name: str | None = None) -> None:
    """Remove the drafts, or those of one name, that killed writers left in a folder; failures do not matter.

    A writer holds the lock of its draft, so drafts of other processes that are being written stay.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not _DRAFT.fullmatch(path.name) or name not in (None, path.name[: -len(".xxxxxxxx.tmp")]):
                continue
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if _is_free(descriptor):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                finally:
                    os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Take the lock of a draft, and return whether no other process holds it; False if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_all(descriptor: int, pending: bytearray) -> None:
    """Write a whole buffer to an open file, removing the written bytes from the buffer; raise OSError on failure.

    After an error, a retry with the same buffer continues behind the last written byte.
    """
    while pending:
        del pending[: os.write(descriptor, pending)]


def digest_of(path: Path, length: int | None = None) -> hashlib._Hash:
    """Return the SHA-256 object of a file's first ``length`` bytes (None: all), to which further bytes can be added.

    A missing file counts as empty.
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
    """Force a folder's entries (names of files) to the disk, so that a new or renamed file survives a power failure.

    Raise OSError if that fails. File systems that do not support it are ignored.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
