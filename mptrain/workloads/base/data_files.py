"""Files of a data set: search of folders, errors for what is missing or unreadable, and unusable samples.

A search is within bounds, without cycles of links, and for regular files only.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import stat
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from tarfile import TarError
from typing import Any, Literal, TypeVar

from mptrain.system.errors import DataError, UnusableSample
from mptrain.system.files import open_to_read

#: Number of other files and folders after which a search ends, if there are not a tenth as many data files.
MOST_OTHERS = 50_000

NO_DOWNLOAD = "dataset=digits needs no download"

_NOT_DOWNLOADED = (OSError, RuntimeError, EOFError, HTTPException, TarError, UnpicklingError)

#: Hidden files and folders that searches have left out since `hidden_noted`; None outside of it.
_hidden: dict[str, None] | None = None

_UNREADABLE = (FileNotFoundError, NotADirectoryError, PermissionError, ProcessLookupError)


def is_hidden(entry: os.DirEntry[str] | Path, *, data: bool = True) -> bool:
    """Return whether a file or folder is hidden or an extra of an archive, and note it if its kind is that of ``data``.

    Such are ``._x.png`` and ``__MACOSX`` of macOS, and ``.ipynb_checkpoints``.
    """
    hidden = entry.name.startswith(".") or entry.name == "__MACOSX"
    if hidden and data and _hidden is not None:
        _hidden[os.fspath(entry)] = None
    return hidden


@contextlib.contextmanager
def hidden_noted() -> Iterator[list[str]]:
    """Give a list that has a sentence, after the ``with`` block, if searches in it have left out hidden data."""
    global _hidden
    before, _hidden = _hidden, {}
    sentences: list[str] = []
    try:
        yield sentences
        if _hidden:
            count = f"{len(_hidden):,} hidden file{'s or folders' if len(_hidden) > 1 else ' or folder'}"
            sentences.append(f"left out: {count}, such as {next(iter(_hidden))}")
    finally:
        _hidden = before


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), in which names are compared: macOS writes ``e`` and an accent."""
    return unicodedata.normalize("NFC", name)


def as_stored(path: str) -> str:
    """Return the path of an existing file that a list names in another Unicode form (NFC, NFD), else the path."""
    if path.isascii() or os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    folder = as_stored(folder)
    others = [os.path.join(folder, unicodedata.normalize(form, name)) for form in ("NFC", "NFD")]  # noqa: PTH118
    return next(filter(os.path.lexists, others), path)


@contextlib.contextmanager
def _leaving_out_unreadable() -> Iterator[None]:
    try:
        with contextlib.suppress(*_UNREADABLE):
            yield
    except OSError as error:
        if error.errno != errno.EINVAL:  # that of the network of a process that has ended, below /proc
            raise


def walk(
    folder: str | Path, suffixes: Collection[str], *, links: bool = True, special: bool = False
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder at and below a folder with the names of its folders and other entries, as `os.walk` does.

    A missing folder gives no result. Hidden entries (`is_hidden`) are left out, and so are links to a folder that
    contains them and folders that cannot be read. The caller may remove names of folders, which are then not searched.
    ``suffixes`` are those of data files, in lower case; without ``links``, folders behind symbolic links are not
    searched. With ``special``, named pipes, sockets and devices are yielded like files.

    Raises:
        DataError: A data file is a named pipe, a socket or a device; or nearly all of more than `MOST_OTHERS` entries
            are no data files.
    """
    data_files = others = 0
    waiting: list[tuple[str, tuple[str, ...]]] = [(str(folder), (os.path.realpath(folder),))]
    while waiting:
        parent, within = waiting.pop()
        others += 1
        folders: dict[str, str] = {}
        names = []
        with _leaving_out_unreadable(), os.scandir(parent) as entries:
            for entry in entries:
                is_folder = _is_folder(entry)
                if is_hidden(entry, data=is_folder or _has_suffix(entry.name, suffixes)):
                    continue
                if is_folder:
                    real_path = os.path.realpath(entry.path) if entry.is_symlink() else f"{within[-1]}/{entry.name}"
                    if real_path not in within and (links or not entry.is_symlink()):
                        folders[entry.name] = real_path
                    continue
                names.append(entry.name)
                if _has_suffix(entry.name, suffixes):
                    data_files += 1
                    is_file = special or entry.is_file(follow_symlinks=False)
                    if not is_file and (why := special_file(entry.path)):
                        raise DataError(f"{entry.path} cannot be read: {why}", "keep regular files only")
                    continue
                others += 1
                if others > MOST_OTHERS + 10 * data_files:
                    kinds = " ".join(sorted(suffixes))
                    raise DataError(
                        f"more than {MOST_OTHERS:,} files and folders below {folder} are no {kinds}",
                        "name the folder that holds the data set's own files",
                    )
        kept = list(folders)
        yield parent, kept, names
        waiting += [(f"{parent}/{name}", (*within, folders[name])) for name in reversed(kept)]


def files_below(folder: Path, suffixes: Collection[str], *, special: bool = False) -> list[Path]:
    """Return the sorted files in a folder and its subfolders that have one of some suffixes, given in lower case.

    The suffixes of the files may have any case. Folders behind symbolic links are not searched. With ``special``, what
    is no regular file is returned too, because opening it says what it is.
    """
    walked = walk(folder, suffixes, links=False, special=special)
    paths = (Path(parent, name) for parent, _, names in walked for name in names if _has_suffix(name, suffixes))
    return sorted(path for path in paths if special or path.is_file())


def package_folders(package: str) -> list[Path]:
    """Return the folders of an installed top-level package without importing it; none if it is not installed."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []


def _has_suffix(name: str, suffixes: Collection[str]) -> bool:
    return name[name.rfind(".") :].lower() in suffixes


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def special_file(path: str | Path) -> str:
    """Return why a path must not be opened: ``it is a named pipe, not a file``, or a socket, or a device.

    The result is empty for regular files and folders, and for what does not exist or cannot be looked at.
    """
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 (a path object for each of a million files)
    except (OSError, ValueError):
        return ""
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        return ""
    try:
        open_to_read(Path(path)).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def missing(what: str, where: str, other_way: str = "") -> DataError:
    """Return the error for data set files that are missing while downloads are off (``dataset.download=false``)."""
    ways = "set dataset.download=true, or set dataset.root=FOLDER to the folder that contains it"
    ways += f", {other_way}" if other_way else ""
    return DataError(f"{what} not found: looked in {where}", f"{ways}; {NO_DOWNLOAD}")


@contextlib.contextmanager
def fetching(what: str, root: Path, folder: Path | None = None) -> Iterator[None]:
    """Run a download in this context: convert its failures to `DataError`, and remove empty folders that it created.

    ``root`` was searched for the data; ``folder`` is the innermost folder that the download creates, None for ``root``.

    Raises:
        DataError: The download failed: no network, no space, wrong checksum or a damaged archive. Other exceptions pass
            through unchanged.
    """
    innermost = folder or root
    new = [path for path in (innermost, *innermost.parents) if not path.exists()]
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # not empty, or never created
            for path in new:
                path.rmdir()
        if not isinstance(error, _NOT_DOWNLOADED):
            raise
        raise DataError(
            f"{what} not found in {root}, and the download failed: {type(error).__name__}: {error}",
            f"copy the files there, or set dataset.root=FOLDER to the folder that contains them; {NO_DOWNLOAD}",
        ) from error


OnError = Literal["stop", "skip"]

Sample = TypeVar("Sample")

#: Part of the message of an OSError for a missing file. A line of a file is a sample too, but has no such error.
_NOT_THERE = f"[Errno {errno.ENOENT}]"


@dataclass
class Check:
    """Unusable samples that a check of all files before training found, with the reasons by file or index.

    Those in ``stopping`` would stop training, those in ``skipped`` would be left out. ``hints`` has advice on those of
    ``stopping`` that ``dataset.on_error=skip`` cannot leave out.
    """

    stopping: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)


_check: Check | None = None


@contextlib.contextmanager
def checking() -> Iterator[Check]:
    """Collect unusable samples in a context, in all threads of this process, instead of raising an error at one."""
    global _check
    _check = Check()
    try:
        yield _check
    finally:
        _check = None


@dataclass
class Faults:
    """Unusable samples and converted files found so far in one split of a data set.

    Attributes:
        on_error: Reaction to an unusable sample: ``stop`` raises an error at the first one; ``skip`` leaves it out.
        unusable: Reason for each sample left out so far, by file or index.
        remarks: Kind of conversion, such as ``palette``, of each file converted so far.
    """

    on_error: OnError = "stop"
    unusable: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of samples in ``unusable`` and of files in ``remarks`` so far, to pass to `since`."""
        return len(self.unusable), len(self.remarks)

    def since(self, counts: tuple[int, int]) -> Faults:
        """Return what was added after an earlier call of `counts`; a worker process sends it with each batch."""
        new = (
            islice(known.items(), count, None)
            for known, count in zip((self.unusable, self.remarks), counts, strict=True)
        )
        return Faults(self.on_error, *map(dict, new))

    def add(self, other: Faults) -> None:
        """Add what another process (a worker of the loader) found."""
        self.unusable.update(other.unusable)
        self.remarks.update(other.remarks)

    def report(self, problems: dict[str, str], hint: str = "fix or remove it", *, skippable: bool = True) -> None:
        """Record unusable samples with their reasons by file or index, or raise an error for the first of them.

        Raises:
            UnusableSample: ``problems`` is not empty, and ``on_error`` is ``stop`` or training cannot leave the samples
                out (``skippable``). Never raised inside `checking`.
            DataError: A folder was removed while training.
        """
        if not problems:
            return
        stops = self.on_error == "stop" or not skippable
        if _check is not None:
            (_check.stopping if stops else _check.skipped).update(problems)
            _check.hints.update({} if skippable else dict.fromkeys(problems, hint))
        elif stops:
            name, reason = next(iter(problems.items()))
            missing = [folder for folder in Path(name).parents if not folder.exists()] if _NOT_THERE in reason else []
            if missing:
                raise DataError(
                    f"{name}: the folder {missing[-1]} no longer exists",
                    "restore the folder, then resume the run from its last checkpoint",
                )
            more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
            otherwise = ", or set dataset.on_error=skip to skip and count such samples" if skippable else ""
            raise UnusableSample(f"{name}: {reason}{more}", f"{hint}{otherwise}")
        self.unusable.update(problems)

    def first(self) -> str:
        """Return the first unusable sample with its reason, to end a sentence that nothing is left; empty if none."""
        reasons = self.unusable or ({} if _check is None else {**_check.stopping, **_check.skipped})
        return next((f": {name}: {reason}" for name, reason in reasons.items()), "")

    def usable(
        self,
        kind: str,
        names: Sequence[str],
        read: Callable[[int], Sample],
        errors: tuple[type[Exception], ...],
        reason: Callable[[Any], str],
    ) -> list[Sample]:
        """Return what a function reads for a batch, for each position in ``names``, without the unusable samples.

        These raise one of ``errors``, of which ``reason`` makes the message. ``kind`` says what a sample is, such as a
        ``picture``.

        Raises:
            DataError: A sample is unusable and ``on_error`` is ``stop``, or none of them is usable.
        """
        samples = []
        for position, name in enumerate(names):
            try:
                samples.append(read(position))
            except errors as error:
                self.report({name: reason(error)})
        if not samples:
            raise DataError(
                f"no {kind} of the batch is usable; the first is {names[0]}",
                "fix or remove the files, or use a larger train.batch_size",
            )
        return samples


def by_remark(remarks: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files by the kind of conversion that they needed when read, the most frequent kind first."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, remark in remarks.items():
        kinds[remark].append(name)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def describe(remarks: Mapping[str, str], names: int = 1) -> str:
    """Return the files by kind of conversion as text, such as ``palette: 12 files, such as a.png; CMYK: b.jpg``."""
    parts = []
    for remark, files in by_remark(remarks).items():
        such = f"{len(files):,} files, such as " if len(files) > names else ""
        parts.append(f"{remark}: {such}{', '.join(files[:names])}")
    return "; ".join(parts)
