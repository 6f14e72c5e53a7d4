"""Names and values under a title, wrapped: the shape of everything that is printed once."""

from __future__ import annotations

import textwrap
from typing import IO, TYPE_CHECKING

from mptrain.cli.messages import colourful

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 110


def print_rows(title: str, rows: Sequence[tuple[str, str]], stream: IO[str]) -> None:
    """Prints a title and its rows; a row without text is left out. Control characters only on a terminal."""
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if colourful(stream) else ("", "", "")
    left = max((len(name) for name, text in rows if text), default=0) + 2
    lines = [f"{bold}{title}{plain}"]
    for name, text in rows:
        if text:
            first, *more = textwrap.wrap(text, WIDTH - left, break_long_words=False, break_on_hyphens=False)
            lines.append(f"  {dim}{name.ljust(left)}{plain}{first}")
            lines += [" " * (left + 2) + line for line in more]
    print("\n".join(lines), file=stream, flush=True)
