"""Readers of text files that may contain bytes outside UTF-8, and whose names may give their part of the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mptrain.errors import DataError
from mptrain.workloads.base.faulty_samples import Faults

#: Words in file names that give the part of the data, as in ``wiki.valid.tokens``.
_PARTS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}


def read_file(file: Path, faults: Faults) -> str:
    """Return the text of a UTF-8 file, with CRLF line ends converted to LF.

    Args:
        file: Path of the file.
        faults: Record of lines that are not UTF-8; they are left out.

    Raises:
        DataError: The file cannot be read, or a line is not UTF-8 and ``faults`` stops.
    """
    try:
        content = file.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
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
    """Yield number, from 1, and text of each UTF-8 line; ``problems`` records the others by file and number."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            problems[f"{file} line {number}"] = f"byte {error.start + 1} is not UTF-8"
        else:
            yield number, text


def by_part(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Group files by the part of the data in their names: ``train``, ``val``, ``test``, or ``""`` for no part.

    If any file is for training, files without a part are left out.
    """
    found: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        found.setdefault(next((_PARTS[word] for word in words if word in _PARTS), ""), []).append(file)
    if "train" in found:
        found.pop("", None)
    return found
