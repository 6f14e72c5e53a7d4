"""Readers of text files that may contain invalid UTF-8, and whose names may give their split of the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mptrain.errors import DataError
from mptrain.files import read_bytes
from mptrain.workloads.base.faulty_samples import Faults

#: Words in file names that give the part of the data, as in ``wiki.valid.tokens``.
_PARTS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}


def read_file(file: Path, faults: Faults) -> str:
    """Return the text of a UTF-8 file, without a byte order mark and with CRLF line ends converted to LF.

    Args:
        file: Path of the file.
        faults: Record of unusable samples of the split. It receives each line that is not UTF-8; such lines are left
            out of the text.

    Raises:
        DataError: The file cannot be read, or a line is not UTF-8 and ``faults.on_error`` is ``stop``.
    """
    try:
        content = read_bytes(file).removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}", "check its permissions") from error
    try:
        return content.decode()
    except UnicodeDecodeError:
        problems: dict[str, str] = {}
        lines = [line for _, line in decoded(file, content.splitlines(keepends=True), problems)]
        faults.report(problems)
        return "".join(lines)


def decoded(file: Path, lines: Iterable[bytes], problems: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Decode lines of a file as UTF-8 one by one, and leave out those that are not UTF-8.

    Args:
        file: Path of the file, for messages only.
        lines: Lines of the file as bytes.
        problems: Record of lines that are not UTF-8, which this function extends: the reason by ``FILE line NUMBER``.

    Yields:
        Number, counted from 1, and text of each line in UTF-8, in order.
    """
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
    all are for training.

    Args:
        name: Name of the data set, for messages.
        files: Paths of the files.
        training: File name to suggest for training data, such as ``train.txt``.

    Returns:
        Files of ``train``, and of ``val`` and ``test`` if there are any, in the given order.

    Raises:
        DataError: There are files for validation or testing, but none for training.
    """
    found: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        found.setdefault(next((_PARTS[word] for word in words if word in _PARTS), ""), []).append(file)
    others = found.pop("", [])
    if "train" in found:
        return found
    if found:
        there = ", ".join(str(some[0]) for some in found.values())
        raise DataError(
            f"{name}: found {there}, but no file to train on",
            f"rename {others[0] if others else 'it'} to {training}, or set dataset.path to the file to train on",
        )
    return {"train": others}


def find_parts(name: str, path: Path, suffixes: Sequence[str], hint: str) -> dict[str, list[Path]]:
    """Find the data files of a file or folder, grouped by the split that their names give; see `by_part`.

    Args:
        name: Name of the data set, for messages.
        path: A file, which is for training, or a folder. All its files are if no name in it marks training data.
        suffixes: Suffixes of data files in a folder.
        hint: How to set the path, for messages.

    Returns:
        Files of ``train``, and of ``val`` and ``test`` if there are any.

    Raises:
        DataError: There is no such file or folder, or it has no training data.
    """
    place = path.expanduser()
    if place == Path():
        raise DataError(
            f"{name} not found: dataset.path is empty or the current folder", f"{hint}; for the current folder use $PWD"
        )
    if not place.exists():
        raise DataError(f"{name} not found: looked for {place}", hint)
    if not place.is_dir():
        return {"train": [place]}
    files = sorted(file for file in place.iterdir() if file.suffix in suffixes and file.is_file())
    if not files:
        raise DataError(f"{name} not found: no file in {place} ends in {' or '.join(suffixes)}", hint)
    return by_part(name, files, f"train{suffixes[0]}")
