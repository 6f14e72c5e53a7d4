"""Speech of the user's own: a manifest of recordings with transcripts, or folders as LibriSpeech has them."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptrain.errors import DataError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.dataset_options import takes_fields_of
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.sound.audio_files import SUFFIXES, RecordingError, read_recording, recording_seconds
from mptrain.workloads.speech.spectrograms import InputFormat
from mptrain.workloads.speech.speech_dataset import SpeechDataset, SpeechOptions, Utterance, speech_as_dataset
from mptrain.workloads.text.reading import read_file

#: Names of LibriSpeech's lists of transcripts end so (Panayotov et al. 2015).
LIBRISPEECH = ".trans.txt"

#: What a line of JSON may call the recording, the transcript and its length in seconds.
_KEYS = {"path": ("audio_filepath", "audio", "path"), "text": ("text",), "seconds": ("duration", "seconds")}

_HINT = (
    "set dataset.path to a .tsv of PATH, tab, TRANSCRIPT; to a .jsonl with audio_filepath and text; or to a folder of "
    "recordings beside .trans.txt or .txt files; dataset=tone_words needs no files"
)

_EMPTY = "its transcript is empty"


@dataclass(frozen=True, kw_only=True)
class SpeechFolderOptions(SpeechOptions):
    """Options of `load_speech`.

    Attributes:
        path: A manifest or a folder (see `entries_of`), to train on.
        val_path: Likewise, to validate on; None holds out ``val_share`` of ``path``.
        test_path: Likewise, to test on; None holds out ``test_share`` of ``path``.
        name: What to call the data set in records.
        sample_rate: What recordings are resampled to, in hertz.
        workers: Processes that read recordings, at most as many as there are cores to use.
    """

    path: Path = Path("data/speech")
    val_path: Path | None = None
    test_path: Path | None = None
    name: str = "speech"
    sample_rate: PositiveInt = 16000
    bands: PositiveInt = 80
    workers: NonNegativeInt = 4


@takes_fields_of(SpeechFolderOptions)
def load_speech(options: SpeechFolderOptions) -> SpeechDataset:
    """Find recordings and their transcripts; a recording is read when a batch asks for it.

    A length that a manifest does not say is read from a header.

    Raises:
        DataError: There is nothing there, or an utterance cannot be used and ``on_error`` is ``stop``.
        EnvironmentRefused: The recordings need the extra ``speech``, which is not installed.
        ConfigError: The features cannot be made, or nothing is left to train on.
    """
    form = options.input_format(options.alphabet, options.sample_rate)
    places = {"val": options.val_path, "test": options.test_path, "train": options.path}
    found = {
        part: _utterances(place, form, Faults(options.on_error)) for part, place in places.items() if place is not None
    }
    read = functools.partial(read_recording, rate=options.sample_rate)
    return speech_as_dataset(options.name, found, read, form, options, options.workers)


def _utterances(place: Path, form: InputFormat, faults: Faults) -> tuple[list[Utterance], Faults]:
    """The utterances of a manifest or folder in the order of their paths, and what was wrong with others."""
    found = []
    for entry in entries_of(place.expanduser(), faults):
        utterance = Utterance(entry.path, form.alphabet.spelled(entry.text), 0, entry.where)
        try:
            samples = round(_seconds(entry) * form.features.rate)
        except RecordingError as error:
            # The first line of a table, of something that looks like no file: it may be a header.
            header = entry.where.endswith(" line 1") and not Path(entry.path).suffix
            hint = "mend or remove it"
            faults.report({utterance.title: error.reason}, f"{hint} (a table has no header line)" if header else hint)
        else:
            found.append(replace(utterance, samples=samples))
    return sorted(found, key=lambda utterance: utterance.name), faults


def _seconds(entry: Entry) -> float:
    # Before an epoch has begun, not in the middle of it; and whether there is a library for such files or not.
    is_file = os.path.isfile(entry.path)  # noqa: PTH113 (Path.is_file raises for names that no file can have)
    if not (is_file and os.access(entry.path, os.R_OK)):
        raise RecordingError(entry.path, "there is no such file, or none that may be read")
    return recording_seconds(entry.path) if entry.seconds is None else entry.seconds


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
