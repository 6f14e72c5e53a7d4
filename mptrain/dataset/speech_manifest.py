"""Which recordings belong to which transcripts: lists of pairs, and folders as LibriSpeech has them. Opens no recording."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mptrain.dataset.audio import SUFFIXES
from mptrain.dataset.text import read_file
from mptrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mptrain.dataset.faults import Faults

#: Names of LibriSpeech's lists of transcripts end so (Panayotov et al. 2015).
LIBRISPEECH = ".trans.txt"

#: What a line of JSON may call the recording, the transcript and its length in seconds.
_KEYS = {"path": ("audio_filepath", "audio", "path"), "text": ("text",), "seconds": ("duration", "seconds")}

_HINT = (
    "set dataset.path to a .tsv of PATH, tab, TRANSCRIPT; to a .jsonl with audio_filepath and text; or to a folder of "
    "recordings beside .trans.txt or .txt files; dataset=tone_words needs no files"
)


@dataclass(frozen=True)
class Entry:
    """A recording and what is said in it.

    Attributes:
        path: Of the recording.
        text: As written; empty where nothing is said.
        seconds: How long it is, where the manifest says so.
    """

    path: str
    text: str
    seconds: float | None = None


def entries_of(place: Path, faults: Faults) -> list[Entry]:
    """The recordings of a manifest or below a folder.

    A manifest is a file of UTF-8. If its first line begins with a brace it has a JSON object in each line: ``audio_filepath``,
    ``text`` and, if known, ``duration`` in seconds. Else it is a table: path, tab, transcript, and no header. Paths are
    relative to the manifest.

    A folder has, anywhere below it, lists ``*.trans.txt`` with a line ``NAME TRANSCRIPT`` for each recording ``NAME.flac``
    beside it (LibriSpeech), or for each recording a file of the same name that ends in ``.txt``.

    Args:
        place: The file or folder.
        faults: Takes lines that cannot be understood.

    Raises:
        DataError: There is nothing there, or a line cannot be understood and ``faults`` says stop.
    """
    if place.is_dir():
        found = list(_in_folder(place, faults))
        what = f"no recording with a transcript below {place}"
    elif place.is_file():
        lines = read_file(place, faults).splitlines()
        parse = _from_json if lines and lines[0].lstrip().startswith("{") else _from_table
        found = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = parse(line)
            except ValueError as error:
                faults.report({f"{place} line {number}": str(error)})
            else:
                found.append(Entry(str(place.parent / entry.path), entry.text, entry.seconds))
        what = f"{place} lists no recording"
    else:
        raise DataError(f"speech not found: looked for {place}", _HINT)
    if not found:
        raise DataError(what, _HINT)
    return found


def _from_table(line: str) -> Entry:
    path, tab, text = line.partition("\t")
    if not tab or not path.strip():
        raise ValueError("is not PATH, tab, TRANSCRIPT")
    return Entry(path.strip(), text)


def _from_json(line: str) -> Entry:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("is no JSON of a recording: too deep") from error
    values = {name: _first(given, keys) for name, keys in _KEYS.items()} if isinstance(given, dict) else {}
    path, text, seconds = (values.get(name) for name in _KEYS)
    if not isinstance(path, str) or not isinstance(text, str):
        raise ValueError("has no audio_filepath and text")
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ValueError(f"says a duration of {seconds!r} seconds")
    return Entry(path, text, seconds)


def _first(given: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((given[key] for key in keys if key in given), None)


def _in_folder(folder: Path, faults: Faults) -> Iterator[Entry]:
    listed: set[Path] = set()
    for table in sorted(folder.rglob(f"*{LIBRISPEECH}")):
        for line in read_file(table, faults).splitlines():
            name, _, text = line.strip().partition(" ")
            if name:
                path = _recording(table.parent / name)
                listed.add(path)
                yield Entry(str(path), text)
    for note in sorted(folder.rglob("*.txt")):
        path = _recording(note.with_suffix(""))
        if not note.name.endswith(LIBRISPEECH) and path.is_file() and path not in listed:
            yield Entry(str(path), " ".join(read_file(note, faults).split()))


def _recording(stem: Path) -> Path:
    """The recording with this name and any of the known endings; the first ending where there is none."""
    candidates = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
    return next((path for path in candidates if path.is_file()), candidates[0])
