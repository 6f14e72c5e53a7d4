"""Data set ``gettext``: messages of programs and their translations, from GNU gettext catalogs in installed packages.

Catalogs are text (.po) or compiled (.mo). The standard library's ``gettext`` reads only compiled ones and does not list
their messages.
"""

from __future__ import annotations

import ast
import codecs
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mptrain.system.errors import DataError
from mptrain.system.fields import PositiveInt
from mptrain.system.files import expanded, read_bytes
from mptrain.workloads.base.data_files import Faults, OnError, files_below, package_folders
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.translation.pair_dataset import Pair, PairDataset, PairOptions, pairs_as_dataset, tidied

_CHARSET = re.compile(r"charset=([\w.:-]+)", re.IGNORECASE)
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_QUOTED = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*(".*")$')


@dataclass(frozen=True, kw_only=True)
class GettextOptions(PairOptions):
    """Options of the data set ``gettext``, translated messages of programs, besides those of `PairOptions`.

    ``path`` is a folder to search, and None searches an installed ``package``; ``language`` is as in the names of
    folders (fr, de, pt_BR); ``on_error`` is for damaged catalogs.
    """

    package: str | None = "django"
    path: Path | None = None
    language: str = "fr"
    name: str = "gettext"
    vocabulary: PositiveInt = 2000
    on_error: OnError = "stop"


@takes_fields_of(GettextOptions)
def load_gettext(options: GettextOptions) -> PairDataset:
    """Read the gettext catalogs of a package or folder as sentence pairs: messages with their translations.

    The catalogs are all files ``LANGUAGE/LC_MESSAGES/*.mo`` and ``*.po`` in the folder, at any depth. Messages with a
    context or plural forms and untranslated messages are left out. The package is located without importing it.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        DataError: There is no such package or no catalog of the language, or a catalog is damaged.
        ConfigError: There are too few messages for the options.
    """
    name, path, language = options.name, options.path, options.language
    package = options.package or ""
    folders = package_folders(package) if path is None else [expanded(path)]
    if not folders:
        raise DataError(
            f"{name}: the package {package!r} is not installed",
            f"pip install {package or 'django'}, or set dataset.path to a folder of catalogs",
        )
    files = [file for folder in folders for file in find_catalogs(folder, language)]
    if not files:
        raise DataError(
            f"{name}: no catalog {language}/LC_MESSAGES/*.mo or *.po in {', '.join(map(str, folders))}",
            f"{_languages(folders)}; dataset=number_words needs no files",
        )
    faults = Faults(options.on_error)
    pairs = [pair for file in files for pair in _pairs_in(file, faults)]
    if not pairs:
        raise DataError(f"{name}: {files[0]} has no translated message", "choose another language or package")
    return pairs_as_dataset(name, {"train": pairs}, options, {"train": faults}, {"train": files})


def find_catalogs(folder: Path, language: str) -> list[Path]:
    """Find the gettext catalogs of a language in a folder, at any depth; of both formats, only the compiled one."""
    catalogs = [file for file in _catalogs(folder) if file.parent.parent.name == language]
    return sorted({file.with_suffix(""): file for file in sorted(catalogs, reverse=True)}.values())


def _catalogs(folder: Path) -> list[Path]:
    files = files_below(folder, _READERS)
    return [file for file in files if file.parent.name == "LC_MESSAGES" and file.suffix in _READERS]


def _languages(folders: list[Path]) -> str:
    there = sorted({file.parent.parent.name for folder in folders for file in _catalogs(folder)})
    if not there:
        return "pip install django, which has catalogs in its wheel"
    return f"dataset.language may be {', '.join(there[:12])}{' ...' if len(there) > 12 else ''}"


def _pairs_in(file: Path, faults: Faults) -> list[Pair]:
    try:
        messages = _READERS[file.suffix](file)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        faults.report({str(file): f"not a catalog that can be read: {what}"})
        return []
    pairs = [Pair(tidied(source), tidied(target)) for source, target in messages.items()]
    return [pair for pair in pairs if pair.source and pair.target]


def read_compiled(file: Path) -> dict[str, str]:
    """Return the translations by source text of a compiled gettext catalog (.mo).

    The format is: magic number, revision, number of messages, offsets of two tables; each table has length and offset
    of every text (GNU gettext manual, *The Format of GNU MO Files*). Messages with a context or plural forms are left
    out. A damaged file is a ValueError, one that cannot be read an OSError.
    """
    content = read_bytes(file)
    order = _MAGIC.get(content[:4])
    if order is None:
        raise ValueError("it does not start with the magic number of a compiled catalog")
    try:
        count, sources, targets = struct.unpack_from(f"{order}3I", content, 8)
        pairs = []
        for number in range(count):
            texts = []
            for table in (sources, targets):
                length, offset = struct.unpack_from(f"{order}2I", content, table + 8 * number)
                if offset + length > len(content):
                    raise ValueError(f"message {number + 1} lies beyond the end of the file")
                texts.append(content[offset : offset + length])
            pairs.append((texts[0], texts[1]))
    except struct.error as error:
        raise ValueError("it ends in the middle of a table") from error
    header = next((target for source, target in pairs if not source), b"").decode("ascii", "replace")
    charset = _charset(header)
    plain = [(source, target) for source, target in pairs if source and not {0, 4} & {*source, *target}]
    return {source.decode(charset): target.decode(charset) for source, target in plain}


def read_text(file: Path) -> dict[str, str]:
    """Return the translations by source text of a gettext catalog in text form (.po); errors as in `read_compiled`.

    Messages with a context or plural forms are left out, and so are untranslated, ``fuzzy`` and obsolete messages.
    """
    content = read_bytes(file)
    text = content.decode(_charset(content[:4096].decode("ascii", "replace")))
    translations: dict[str, str] = {}
    for flags, parts in _entries(text.replace("\r\n", "\n")):
        source, target = parts.get("msgid"), parts.get("msgstr")
        if source and target and "fuzzy" not in flags and not {"msgctxt", "msgid_plural"} & set(parts):
            translations[source] = target
    return translations


def _entries(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each message of a .po file: its flags (``#, fuzzy``), and its texts by keyword (``msgid``, ``msgstr``)."""
    flags, last = "", ""
    parts: dict[str, str] = {}
    for line in [*text.split("\n"), ""]:
        match = _QUOTED.match(line.strip())
        over = not line.strip() or line.startswith("#") or (match is not None and match[1] in ("msgctxt", "msgid"))
        if over and any(keyword.startswith("msgstr") for keyword in parts):
            yield flags, parts
            flags, last, parts = "", "", {}
        if not line.strip() or line.startswith("#~"):  # discards what precedes a blank line or an obsolete message
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


_READERS = {".mo": read_compiled, ".po": read_text}
