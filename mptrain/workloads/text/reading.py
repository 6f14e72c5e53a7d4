"""Reading of text files, whose bytes may not be UTF-8 everywhere, and whose names may say which part of the data they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mptrain.errors import DataError
from mptrain.workloads.base.faulty_samples import Faults

#: The word in a file's name that says which part of the data it is, as in ``wiki.valid.tokens``.
_PARTS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}


def read_file(file: Path, faults: Faults) -> str:
    """The text of a UTF-8 file, with line ends of one character.

    Args:
        file: Where.
        faults: Takes the lines that are not UTF-8; they are left out.

    Raises:
        DataError: The file cannot be read, or a line of it is not UTF-8 and ``faults`` says stop.
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
    """The number, from 1, and text of each line that is UTF-8; ``problems`` takes the others by file and number."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            problems[f"{file} line {number}"] = f"byte {error.start + 1} is not UTF-8"
        else:
            yield number, text


def by_part(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the part of the data that their names say they are: ``train``, ``val``, ``test``, or ``""`` for none.

    Where one is for training, those that are for nothing are left out.
    """
    found: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        found.setdefault(next((_PARTS[word] for word in words if word in _PARTS), ""), []).append(file)
    if "train" in found:
        found.pop("", None)
    return found
