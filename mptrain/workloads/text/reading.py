"""Readers of text files that may contain invalid UTF-8, and whose names may give their split of the data."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mptrain.system.errors import DataError
from mptrain.system.files import expanded, read_bytes
from mptrain.workloads.base.data_files import Faults, files_below, walk

#: Words in file names that give the part of the data, as in ``wiki.valid.tokens``.
_PARTS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}


def read_file(file: Path, faults: Faults) -> str:
    """Return the text of a UTF-8 file, without a byte order mark and with CRLF line ends converted to LF.

    DataError is raised if it cannot be read, or a line is not UTF-8 and ``faults.on_error`` is ``stop``; otherwise such
    lines are left out.
    """
    content = read_content(file).replace(b"\r\n", b"\n")
    try:
        return content.decode()
    except UnicodeDecodeError:
        problems: dict[str, str] = {}
        lines = [line for _, line in decoded(file, content.splitlines(keepends=True), problems)]
        faults.report(problems)
        return "".join(lines)


def read_content(file: Path, hint: str = "check its permissions") -> bytes:
    """Return the bytes of a file without a byte order mark; DataError with a hint is raised if it cannot be read."""
    try:
        return read_bytes(file).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}", hint) from error


def decoded(file: Path, lines: Iterable[bytes], problems: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line in UTF-8; ``problems`` gets the others, by ``FILE line NUMBER``."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            problems[f"{file} line {number}"] = f"byte {error.start + 1} is not UTF-8"
        else:
            yield number, text


def by_part(name: str, files: Sequence[Path], training: str) -> dict[str, list[Path]]:
    """Group data files by the split that their names give: ``wiki.valid.tokens`` is for validation.

    The words ``train``, ``valid``, ``validation``, ``val``, ``dev`` and ``test`` count in any case, between characters
    other than letters. If any file is for training, files without such a word are left out. If no file has such a word,
    all are for training. DataError, which suggests the name ``training``, is raised if only other parts have files.
    """
    parts: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        parts.setdefault(next((_PARTS[word] for word in words if word in _PARTS), ""), []).append(file)
    others = parts.pop("", [])
    if "train" in parts:
        return parts
    if parts:
        there = ", ".join(str(some[0]) for some in parts.values())
        raise DataError(
            f"{name}: found {there}, but no file to train on",
            f"rename {others[0] if others else 'it'} to {training}, or set dataset.path to the file to train on",
        )
    return {"train": others}


def find_parts(
    name: str, paths: Path | Sequence[Path], suffixes: Sequence[str], hint: str, *, subfolders: bool = False
) -> dict[str, list[Path]]:
    """Find the data files of paths, patterns and folders by the split that their names give, as in `by_part`.

    A single file is for training. In a folder, the files with ``suffixes`` count, and with ``subfolders`` those below
    it too. DataError, with the ``hint`` how to set the path, is raised if a path matches no file, or there is no
    training data.
    """
    given = [paths] if isinstance(paths, Path) else paths
    files = [file for path in given for file in _files_at(name, expanded(path), suffixes, hint, subfolders)]
    if files == [expanded(path) for path in given[:1]]:
        return {"train": files}
    return by_part(name, files, f"train{suffixes[0]}")


def _files_at(name: str, path: Path, suffixes: Sequence[str], hint: str, subfolders: bool) -> list[Path]:
    if path == Path():  # the path of an empty string, such as an unset shell variable
        what = f"{name} not found: dataset.path is empty or the current folder"
        raise DataError(what, f"{hint}; for the current folder use $PWD")
    if path.is_dir():
        directly = map(path.joinpath, next(walk(path, suffixes))[2])
        inside = files_below(path, suffixes) if subfolders else sorted(directly)
        files = [file for file in inside if file.suffix in suffixes and file.is_file()]
    elif path.exists():
        files = [path]
    else:
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207
        files = [file for file in matches if file.is_file()]
    if not files:
        what = f"no file in {path} ends in {' or '.join(suffixes)}" if path.is_dir() else f"looked for {path}"
        raise DataError(f"{name} not found: {what}", hint)
    return files
