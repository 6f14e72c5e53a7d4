"""Reads message catalogs of GNU gettext, in text (.po) and compiled (.mo): plain messages and their translations.

The standard library's ``gettext`` reads compiled ones only, and does not say which messages they hold.
"""

from __future__ import annotations

import ast
import codecs
import re
import struct
from collections.abc import Iterator
from pathlib import Path

_CHARSET = re.compile(r"charset=([\w.:-]+)", re.IGNORECASE)
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_QUOTED = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*(".*")$')


def read_compiled(file: Path) -> dict[str, str]:
    """Messages of a .mo file, by what they translate.

    The format: magic number, revision, number of messages, places of two tables; each table has length and place of every text
    (GNU gettext manual, *The Format of GNU MO Files*). Messages with a context or plural forms are left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    content = file.read_bytes()
    order = _MAGIC.get(content[:4])
    if order is None:
        raise ValueError("it does not begin as a compiled catalog does")
    try:
        count, sources, targets = struct.unpack_from(f"{order}3I", content, 8)
        pairs = []
        for number in range(count):
            texts = []
            for table in (sources, targets):
                length, place = struct.unpack_from(f"{order}2I", content, table + 8 * number)
                if place + length > len(content):
                    raise ValueError(f"message {number + 1} lies beyond its end")
                texts.append(content[place : place + length])
            pairs.append((texts[0], texts[1]))
    except struct.error as error:
        raise ValueError("it ends in the middle of a table") from error
    header = next((target for source, target in pairs if not source), b"").decode("ascii", "replace")
    charset = _charset(header)
    plain = [(source, target) for source, target in pairs if source and not {0, 4} & {*source, *target}]
    return {source.decode(charset): target.decode(charset) for source, target in plain}


def read_text(file: Path) -> dict[str, str]:
    """Messages of a .po file, by what they translate.

    Left out are messages with a context or plural forms, untranslated, doubtful (``fuzzy``) and obsolete ones.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    content = file.read_bytes()
    text = content.decode(_charset(content[:4096].decode("ascii", "replace")))
    found: dict[str, str] = {}
    for flags, parts in _entries(text.replace("\r\n", "\n")):
        source, target = parts.get("msgid"), parts.get("msgstr")
        if source and target and "fuzzy" not in flags and not {"msgctxt", "msgid_plural"} & set(parts):
            found[source] = target
    return found


def _entries(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The flags of each message, and its texts by keyword. Blank lines between messages are usual, not needed."""
    flags, last = "", ""
    parts: dict[str, str] = {}
    for line in [*text.split("\n"), ""]:
        match = _QUOTED.match(line.strip())
        over = not line.strip() or line.startswith("#") or (match is not None and match[1] in ("msgctxt", "msgid"))
        if over and any(keyword.startswith("msgstr") for keyword in parts):
            yield flags, parts
            flags, last, parts = "", "", {}
        if not line.strip() or line.startswith("#~"):  # what stands before is of no message, or of an obsolete one
            flags, last, parts = "", "", {}
        if line.startswith("#"):
            flags += line if line.startswith("#,") else ""
        elif match:
            last = match[1] or last
            parts[last] = parts.get(last, "") + _unquoted(match[2], line)
        elif line.strip():
            raise ValueError(f"cannot understand {line.strip()[:40]!r}")


def _charset(header: str) -> str:
    match = _CHARSET.search(header)
    try:
        return codecs.lookup(match[1]).name if match else "utf-8"
    except LookupError as error:
        raise ValueError(f"its charset {match[1] if match else ''} is unknown") from error


def _unquoted(quoted: str, line: str) -> str:
    try:
        return str(ast.literal_eval(quoted))
    except SyntaxError as error:
        raise ValueError(f"cannot understand {line.strip()[:40]!r}") from error
