"""Names and values under a title, wrapped: the shape of everything that is printed once."""

from __future__ import annotations

import shutil
import textwrap
from typing import IO, TYPE_CHECKING

from mptrain.cli.messages import colourful, writing

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Characters of a line at most, and at least.
WIDTH, NARROWEST = 110, 60


def width_of(stream: IO[str]) -> int:
    """Characters of a line: as wide as a terminal within limits, the same everywhere else."""
    if not stream.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def print_rows(title: str, rows: Sequence[tuple[str, str]], stream: IO[str]) -> None:
    """Prints a title and its rows; a row without text is left out. Control characters only on a terminal.

    Commands are not wrapped, so that they can be copied.

    Raises:
        StorageError: The stream takes no more.
    """
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if colourful(stream) else ("", "", "")
    left = max((len(name) for name, text in rows if text), default=0) + 2
    lines = [f"{bold}{title}{plain}"]
    for name, text in rows:
        if text:
            width = len(text) if text.startswith("mptrain ") else width_of(stream) - left - 2
            first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            lines.append(f"  {dim}{name.ljust(left)}{plain}{first}")
            lines += [" " * (left + 2) + line for line in more]
    with writing():
        print("\n".join(lines), file=stream, flush=True)
