"""Which recordings belong to which transcripts: lists of pairs, and folders as LibriSpeech has them. Opens no recording."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.errors import DataError
from mptrain.workloads.sound.audio_files import SUFFIXES
from mptrain.workloads.text.reading import read_file

if TYPE_CHECKING:
    from mptrain.workloads.base.faulty_samples import Faults

#: Names of LibriSpeech's lists of transcripts end so (Panayotov et al. 2015).
LIBRISPEECH = ".trans.txt"

#: What a line of JSON may call the recording, the transcript and its length in seconds.
_KEYS = {"path": ("audio_filepath", "audio", "path"), "text": ("text",), "seconds": ("duration", "seconds")}

_HINT = (
    "set dataset.path to a .tsv of PATH, tab, TRANSCRIPT; to a .jsonl with audio_filepath and text; or to a folder of "
    "recordings beside .trans.txt or .txt files; dataset=tone_words needs no files"
)


_EMPTY = "its transcript is empty"


@dataclass(frozen=True)
class Entry:
    """A recording and what is said in it.

    Attributes:
        path: Of the recording.
        text: As written; empty where nothing is said.
        seconds: How long it is, where the manifest says so.
        where: The line that says so, for messages: ``mine.tsv line 3``; empty where the transcript has a file of its own.
    """

    path: str
    text: str
    seconds: float | None = None
    where: str = ""


def entries_of(place: Path, faults: Faults) -> list[Entry]:
    """The recordings of a manifest or below a folder.

    A manifest is a file of UTF-8. If its first line begins with a brace it has a JSON object in each line: ``audio_filepath``,
    ``text`` and, if known, ``duration`` in seconds. Else it is a table: path, tab, transcript, and no header. Paths are
    relative to the manifest. An empty transcript is a fault, since it is mostly a forgotten one; a recording in which nothing
    is said has ``"text": ""`` in JSON.

    A folder has, anywhere below it, lists ``*.trans.txt`` with a line ``NAME TRANSCRIPT`` for each recording ``NAME.flac``
    beside it (LibriSpeech), or for each recording a file of the same name that ends in ``.txt``. Texts in folders without a
    recording, such as a README, are none of these.

    Args:
        place: The file or folder.
        faults: Takes lines that cannot be understood and empty transcripts, and in folders transcripts without a recording
            and recordings without a transcript.

    Raises:
        DataError: There is nothing there, or something cannot be used and ``faults`` says stop.
    """
    if place.is_dir():
        found = _in_folder(place, faults)
        what = f"no recording with a transcript below {place}"
    elif place.is_file():
        lines = read_file(place, faults).splitlines()
        parse = _from_json if lines and lines[0].lstrip().startswith("{") else _from_table
        found = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{place} line {number}"
            try:
                entry = parse(line)
            except ValueError as error:
                faults.report({where: str(error)})
            else:
                found.append(Entry(str(place.parent / entry.path), entry.text, entry.seconds, where))
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
    if not text.strip():
        raise ValueError(f"{path.strip()}: {_EMPTY}")
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


def _in_folder(folder: Path, faults: Faults) -> list[Entry]:
    """The recordings with transcripts; where there is one such, what lacks the one or the other, or words, is a fault."""
    recordings = _recordings(folder)
    found: list[Entry] = []
    used: set[Path] = set()
    alone: dict[str, str] = {}  # and what lacks its words
    for table in sorted(folder.rglob(f"*{LIBRISPEECH}")):
        for number, line in enumerate(read_file(table, faults).splitlines(), start=1):
            name, _, text = line.strip().partition(" ")
            stem, where = table.parent / name, f"{table} line {number}"
            if stem in recordings:
                used.add(stem)
                if text.strip():
                    found.append(Entry(str(recordings[stem]), text, where=where))
                else:
                    alone[where] = f"{recordings[stem]}: {_EMPTY}"
            elif name:
                alone[where] = f"there is no recording {name} beside it"
    folders = {path.parent for path in recordings}
    for note in sorted(folder.rglob("*.txt")):
        stem = note.with_suffix("")
        if note.name.startswith(".") or note.name.endswith(LIBRISPEECH) or note.parent not in folders or stem in used:
            continue
        if stem in recordings:
            used.add(stem)
            if text := " ".join(read_file(note, faults).split()):
                found.append(Entry(str(recordings[stem]), text))
            else:
                alone[str(note)] = "is empty, and so is the transcript of the recording beside it"
        else:
            alone[str(note)] = "there is no recording of this name beside it"
    if found:
        faults.report(alone)
        faults.report(
            {str(path): "has no transcript beside it" for stem, path in recordings.items() if stem not in used}
        )
    return found


def _recordings(folder: Path) -> dict[Path, Path]:
    """The recordings below a folder by their paths without an ending; of several endings the first of `SUFFIXES`."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    found.sort(key=lambda path: (path.with_suffix(""), -SUFFIXES.index(path.suffix.lower())))
    return {path.with_suffix(""): path for path in found if path.is_file()}
