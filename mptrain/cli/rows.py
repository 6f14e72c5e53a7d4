"""Names and values: under a title, wrapped, for what is printed once; as ``key=value`` lines for what goes on."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO

from mptrain.cli.messages import colourful, harmless, writing

#: Characters of a line at most, and at least.
WIDTH, NARROWEST = 110, 60


class KeyValues:
    """Prints ``key=value`` lines; once the reader of the stream has gone, nothing more, and nobody is disturbed.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._gone = False

    def say(self, fields: Mapping[str, object]) -> None:
        """One line."""
        if self._gone:
            return
        try:
            print(harmless(" ".join(f"{key}={value}" for key, value in fields.items())), file=self._stream, flush=True)
        except OSError:
            self._gone = True  # what is trained goes on without a reader


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
    rows = [(harmless(name), text) for name, text in rows]
    left = max((len(name) for name, text in rows if text), default=0) + 2
    lines = [f"{bold}{harmless(title)}{plain}"]
    for name, raw in rows:
        if raw:
            text = harmless(re.sub(r"\s", " ", raw))
            width = len(text) if text.startswith("mptrain ") else width_of(stream) - left - 2
            first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            lines.append(f"  {dim}{name.ljust(left)}{plain}{first}")
            lines += [" " * (left + 2) + line for line in more]
    with writing():
        print("\n".join(lines), file=stream, flush=True)
