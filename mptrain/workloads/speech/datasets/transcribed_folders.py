"""Data set ``speech``, recordings of the user: a manifest with transcripts, or folders in the layout of LibriSpeech."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.system.files import expanded
from mptrain.workloads.base.data_files import Faults, as_stored, composed, files_below
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.sound.recordings import SUFFIXES, RecordingError, read_recording, recording_seconds
from mptrain.workloads.speech.spectrograms import InputFormat
from mptrain.workloads.speech.speech_dataset import SpeechDataset, SpeechOptions, Utterance, speech_as_dataset
from mptrain.workloads.text.reading import read_file

#: Suffix of LibriSpeech's lists of transcripts (Panayotov et al. 2015).
LIBRISPEECH = ".trans.txt"

#: Accepted JSON keys of the recording, the transcript and the duration in seconds.
_KEYS = {"path": ("audio_filepath", "audio", "path"), "text": ("text",), "seconds": ("duration", "seconds")}

_HINT = (
    "set dataset.path to a .tsv of PATH, tab, TRANSCRIPT; to a .jsonl with audio_filepath and text; or to a folder of "
    "recordings with .trans.txt or .txt files; dataset=tone_words needs no files"
)

_EMPTY = "its transcript is empty"


@dataclass(frozen=True, kw_only=True)
class SpeechFolderOptions(SpeechOptions):
    """Options of the data set ``speech``, recordings of the user with transcripts, besides those of `SpeechOptions`.

    ``path``, ``val_path`` and ``test_path`` are manifests or folders as in `entries_of`; without one its share is held
    out of ``path``. ``sample_rate``, in hertz, is what recordings are converted to.
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
    """Find recordings and their transcripts, and make a data set; a recording is read when a batch needs it.

    Durations that the manifest does not give are read from the headers.

    Raises:
        DataError: No recordings are found, or an utterance is unusable and ``on_error`` is ``stop``.
        EnvironmentRefused: The recordings need the extra ``speech``, which is not installed.
        ConfigError: The features are invalid, or no utterance is left to train on.
    """
    form = options.input_format(options.alphabet, options.sample_rate)
    paths = {"val": options.val_path, "test": options.test_path, "train": options.path}
    by_part = {
        part: _utterances(path, form, Faults(options.on_error)) for part, path in paths.items() if path is not None
    }
    read = functools.partial(read_recording, rate=options.sample_rate)
    return speech_as_dataset(options.name, by_part, read, form, options, options.workers)


def _utterances(path: Path, form: InputFormat, faults: Faults) -> tuple[list[Utterance], Faults]:
    """Return the usable utterances of a manifest or folder, sorted by path, and the record of the unusable ones."""
    utterances = []
    for entry in entries_of(expanded(path), faults):
        utterance = Utterance(entry.path, form.alphabet.spelled(entry.text), 0, entry.where)
        try:
            samples = round(_seconds(entry) * form.features.rate)
        except RecordingError as error:
            # A first line of a table whose path does not look like a file may be a header.
            header = entry.where.endswith(" line 1") and not Path(entry.path).suffix
            hint = "fix or remove it"
            faults.report({utterance.title: error.reason}, f"{hint} (a table has no header line)" if header else hint)
        else:
            utterances.append(replace(utterance, samples=samples))
    return sorted(utterances, key=lambda utterance: utterance.name), faults


def _seconds(entry: ManifestEntry) -> float:
    # Checks before the first epoch rather than during it, and even if no library can read such files.
    is_file = os.path.isfile(entry.path)  # noqa: PTH113 (Path.is_file raises for names that no file can have)
    if not (is_file and os.access(entry.path, os.R_OK)):
        raise RecordingError(entry.path, "there is no such file, or it is not readable")
    return recording_seconds(entry.path) if entry.seconds is None else entry.seconds


@dataclass(frozen=True)
class ManifestEntry:
    """Recording and its transcript, as a manifest or a folder gives them, before the recording is read.

    Attributes:
        text: Transcript as written; empty if there is no speech.
        seconds: Duration in seconds, if the manifest gives it.
        where: Line of the list, for messages: ``mine.tsv line 3``; empty if the transcript has a file of its own.
    """

    path: str
    text: str
    seconds: float | None = None
    where: str = ""


def entries_of(path: Path, faults: Faults) -> list[ManifestEntry]:
    """Return the recordings with transcripts that a manifest or a folder lists; no recording is read.

    A manifest is a UTF-8 file. If its first line starts with a brace, each line is a JSON object with
    ``audio_filepath``, ``text`` and optionally ``duration`` in seconds. Otherwise it is a table of path, tab and
    transcript, without a header. Paths are relative to the manifest. An empty transcript in a table is a fault, because
    it has usually been forgotten; in JSON ``"text": ""`` marks a recording without speech.

    A folder has, in itself or in subfolders, lists ``*.trans.txt`` with a line ``NAME TRANSCRIPT`` for each recording
    ``NAME.flac`` next to it (LibriSpeech), or for each recording a file of the same name with the suffix ``.txt``.
    Text files in folders without recordings, such as a README, are ignored. Transcripts without a recording and
    recordings without a transcript are faults. DataError is raised for a fault if ``on_error`` is ``stop``, and
    without recordings.
    """
    if path.is_dir():
        entries = _in_folder(path, faults)
        what = f"no recording with a transcript below {path}"
    elif path.is_file():
        lines = read_file(path, faults).splitlines()
        parse = _from_json if lines and lines[0].lstrip().startswith("{") else _from_table
        entries = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                entry = parse(line)
            except ValueError as error:
                faults.report({where: str(error)})
            else:
                recording = as_stored(str(path.parent / entry.path))
                entries.append(ManifestEntry(recording, entry.text, entry.seconds, where))
        what = f"{path} lists no recording"
    else:
        raise DataError(f"speech not found: looked for {path}", _HINT)
    if not entries:
        raise DataError(what, _HINT)
    return entries


def _from_table(line: str) -> ManifestEntry:
    path, tab, text = line.partition("\t")
    if not tab or not path.strip():
        raise ValueError("is not PATH, tab, TRANSCRIPT, without quotes")
    if path.strip()[0] == path.strip()[-1] == '"':
        raise ValueError("has its path in quotes: write PATH, tab, TRANSCRIPT without quotes")
    if not text.strip():
        raise ValueError(f"{path.strip()}: {_EMPTY}")
    return ManifestEntry(path.strip(), text)


def _from_json(line: str) -> ManifestEntry:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("is not the JSON of a recording: too deep") from error
    values = {name: _first(given, keys) for name, keys in _KEYS.items()} if isinstance(given, dict) else {}
    path, text, seconds = (values.get(name) for name in _KEYS)
    if not isinstance(path, str) or not isinstance(text, str):
        raise ValueError("has no audio_filepath and text")
    if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ValueError(f"has an invalid duration of {seconds!r} seconds")
    return ManifestEntry(path, text, seconds)


def _first(given: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((given[key] for key in keys if key in given), None)


def _in_folder(folder: Path, faults: Faults) -> list[ManifestEntry]:
    """Return the recordings with transcripts; if there are any, texts and recordings without counterpart are faults."""
    files = files_below(folder, (*SUFFIXES, ".txt"))
    recordings = _recordings(files)
    entries: list[ManifestEntry] = []
    used: set[str] = set()
    alone: dict[str, str] = {}  # texts without a recording, and empty transcripts
    for table in (file for file in files if file.name.endswith(LIBRISPEECH)):
        for number, line in enumerate(read_file(table, faults).splitlines(), start=1):
            name, _, text = line.strip().partition(" ")
            stem, where = composed(str(table.parent / name)), f"{table} line {number}"
            if stem in recordings:
                used.add(stem)
                if text.strip():
                    entries.append(ManifestEntry(str(recordings[stem]), text, where=where))
                else:
                    alone[where] = f"{recordings[stem]}: {_EMPTY}"
            elif name:
                alone[where] = f"there is no recording {name} next to it"
    folders = {path.parent for path in recordings.values()}
    for note in (file for file in files if file.suffix == ".txt"):
        stem = composed(str(note.with_suffix("")))
        if note.name.endswith(LIBRISPEECH) or note.parent not in folders or stem in used:
            continue
        if stem in recordings:
            used.add(stem)
            if text := " ".join(read_file(note, faults).split()):
                entries.append(ManifestEntry(str(recordings[stem]), text))
            else:
                alone[str(note)] = "is empty, so the recording next to it has no transcript"
        else:
            alone[str(note)] = "there is no recording of this name next to it"
    if entries:
        faults.report(alone)
        faults.report(
            {str(path): "has no transcript next to it" for stem, path in recordings.items() if stem not in used}
        )
    return entries


def _recordings(files: list[Path]) -> dict[str, Path]:
    """Return recordings by composed path without suffix; of several suffixes the first in `SUFFIXES`."""
    paths = [path for path in files if path.suffix.lower() in SUFFIXES]
    paths.sort(key=lambda path: (path.with_suffix(""), -SUFFIXES.index(path.suffix.lower())))
    return {composed(str(path.with_suffix(""))): path for path in paths}
