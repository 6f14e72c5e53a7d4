"""Makes text safe inside Markdown: whatever a name contains, it stays a name.

HTML needs nothing of its own: markupsafe escapes it.
"""

from __future__ import annotations

import re
from typing import Final

from mptrain.report.wording import plain

#: What Markdown, its tables, its mathematics and its raw HTML react to.
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL: Final = re.compile(r"[\\`*\[\]|~$!&<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LINKS: Final = re.compile(r":(?=//)|(?<=www)\.|@", re.IGNORECASE)
_START: Final = re.compile(r"^([-+#=]|\d+[.)](?=\s|$))")


def markdown(text: object) -> str:
    """A line of text that every Markdown reader shows as it is, in a paragraph and in a cell of a table alike."""
    escaped = _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), plain(text))
    escaped = _LINKS.sub(lambda found: f"&#{ord(found[0])};", escaped)
    return _START.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", escaped)


def fenced(text: object, language: str = "") -> str:
    """A block of code inside a fence that no line of the text can close."""
    code = plain(text, lines=True)
    longest = max((len(found) for found in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
