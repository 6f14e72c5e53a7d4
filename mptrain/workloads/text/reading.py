"""Reading of text files, whose bytes may not be UTF-8 everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.errors import DataError

if TYPE_CHECKING:
    from mptrain.workloads.base.faulty_samples import Faults


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
        lines: list[str] = []
        problems: dict[str, str] = {}
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            try:
                lines.append(line.decode())
            except UnicodeDecodeError as error:
                problems[f"{file} line {number}"] = f"byte {error.start + 1} is not UTF-8"
        faults.report(problems)
        return "".join(lines)
