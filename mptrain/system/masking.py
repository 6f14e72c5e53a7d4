"""Masking of secrets in records: values of environment variables whose names look like secrets.

A value is replaced by ``${oc.env:NAME}``, which Hydra resolves again. So a masked configuration or sweep can be resumed
wherever the variable is set, and a run directory can be shared without the secret.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Callable
from functools import lru_cache
from html.entities import codepoint2name
from typing import Any, Final
from urllib.parse import quote

#: Minimum length of a secret: shorter values occur in many texts by chance.
SHORTEST: Final = 8

_NAMES: Final = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def masker() -> Callable[[Any], Any]:
    """Return a function that replaces secrets by references to their environment variables: ``${oc.env:NAME}``.

    Secrets are the values of at least `SHORTEST` characters of environment variables whose names contain TOKEN, KEY,
    SECRET, PASSWORD, PASSWD or CREDENTIAL, in every spelling: as they are, and as text of Python, JSON, YAML, HTML,
    Markdown, Hydra, a shell or a URL, on one line or several. The environment is read once, by this call. The function
    takes text, or lists, tuples and dicts of any values; numbers are returned unchanged.
    """
    secrets = {
        value: name
        for name, text in os.environ.items()
        if len(value := text.strip()) >= SHORTEST and _NAMES.search(name)
    }
    if not secrets:
        return lambda value: value
    longest_first = sorted(secrets, key=len, reverse=True)
    pattern = _pattern(tuple(longest_first))

    def mask(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: f"${{oc.env:{secrets[longest_first[(match.lastindex or 0) - 1]]}}}", value)
        if isinstance(value, dict):
            return {mask(key): mask(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            made = [mask(item) for item in value]
            return tuple(made) if isinstance(value, tuple) else made
        return value

    return mask


@lru_cache(maxsize=8)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of all spellings of secrets, with a group for each."""
    pieces = (re.findall(r"""[A-Za-z0-9]+|\s+|['"\\]+|.""", secret) for secret in secrets)
    return re.compile("|".join(f"({''.join(map(_spellings, parts))})" for parts in pieces))


#: Whitespace as it is, escaped, as an entity or percent-encoded. A writer may break a line, or join lines.
_BLANKS: Final = r"(?:\\{0,8}\s|\\{1,8}(?:[tnvfrNLP_]|x[\dA-Fa-f]{2}|u[\dA-Fa-f]{4})|&nbsp;|%[\dA-F]{2})+"

#: A quote or backslash, which several quotes or backslashes may spell.
_QUOTE: Final = r"""(?:[\\'"]|&(?:amp;){0,3}(?:#39|#34|#92|#x27|#x22|quot|apos|bsol);|%(?:22|27|5C))"""


def _spellings(piece: str) -> str:
    """Return the pattern of all spellings of letters and digits, whitespace, quotes and backslashes, or a character."""
    if piece.isspace():
        return _BLANKS
    if piece.isascii() and piece.isalnum():
        return piece
    if piece[0] in "'\"\\":
        doubled = piece.replace("\\", "\\\\")  # exact spellings first: the secret may end here
        exact = [piece, doubled, doubled.replace('"', '\\"'), doubled.replace("'", "\\'"), piece.replace("'", "''")]
        exact += [piece.replace('"', '""'), piece.replace("'", "'\"'\"'"), html.escape(piece)]
        longest_first = map(re.escape, sorted(exact, key=len, reverse=True))
        return rf"(?:{'|'.join(longest_first)}|{_QUOTE}{{{len(piece)},{32 * len(piece)}}}?)"
    code, known = ord(piece), codepoint2name.get(ord(piece), "apos")
    letter = {7: "a", 8: "b", 27: "e"}.get(code, f"x{code:02x}")
    escapes = f"x{code:02x}|u{code:04x}|U{code:08x}|{letter}|" + json.dumps(piece)[2:-1].replace("\\", r"\\{1,8}")
    forms = [
        rf"\\{{0,8}}(?:{re.escape(piece)}|&(?:amp;){{0,3}}(?:#{code}|#x{code:x}|{known});)",
        *([] if piece.isascii() and piece.isprintable() else [rf"\\{{1,8}}(?i:{escapes})"]),
        re.escape(quote(piece, safe="", errors="surrogateescape")),
    ]
    return f"(?:{'|'.join(forms)})"


class MaskedText(io.TextIOWrapper):
    """Text stream that masks secrets in everything written to it, unless they are split over two writes."""

    def write(self, text: str) -> int:
        """Write text with its secrets masked, and return the number of characters written."""
        return super().write(masked(text))


def masked(value: Any) -> Any:
    """Return a value with all secrets masked by `masker`."""
    return masker()(value)
