"""Recordings of the user's own: any folder of sound files, by speaker and with texts where there are such."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from mptrain.errors import DataError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.audio_generation.audio_dataset import Clip, RecordingOptions, SoundDataset, clips_as_dataset
from mptrain.workloads.base.dataset_options import takes_fields_of
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.sound.alphabet import ENGLISH, Alphabet
from mptrain.workloads.sound.audio_files import SUFFIXES, RecordingError, read_recording, recording_seconds

_HINT = "set dataset.root to a folder of WAV files; dataset=made_up_sounds needs no files"


@dataclass(frozen=True, kw_only=True)
class RecordingFolderOptions(RecordingOptions):
    """Options of `load_recordings`.

    Attributes:
        root: The folder.
        name: What to call the data set in records.
        rate: Samples a second that all recordings are converted to, in hertz.
        speakers: Tell the network who speaks, where there are several speakers.
        alphabet: Letters of the texts; others are left out.
        workers: Processes that read files.
    """

    root: Path = Path("data/recordings")
    name: str = "recordings"
    rate: PositiveInt = 16000
    speakers: bool = True
    alphabet: str = ENGLISH
    workers: NonNegativeInt = 2


@takes_fields_of(RecordingFolderOptions)
def load_recordings(options: RecordingFolderOptions) -> SoundDataset:
    """Find the recordings in a folder; they are read when a batch asks for them.

    Files lie in the folder itself or below it. Where they lie in folders of it, each of these is a speaker. A text file
    beside a recording, ``NAME.txt`` beside ``NAME.wav``, has what is said in it. Where texts are told to the network and one
    recording has one, a recording without a text and a text without a recording cannot be used.

    Raises:
        DataError: There are no recordings, or one cannot be used and ``on_error`` is ``stop``.
        ConfigError: Nothing is left to train on.
    """
    name, root = options.name, options.root.expanduser()
    letters, faults = Alphabet(options.alphabet), Faults(options.on_error)
    files = _sound_files(root, name)
    found = sorted({_speaker_of(file, root) for file in files}) if options.speakers else [""]
    texts = _texts_beside(files, faults) if options.text else {}
    clips = []
    for file in texts or files:
        try:
            samples = max(1, round(recording_seconds(file) * options.rate))
            said = letters.known_numbers(_read_text(texts[file])) if texts else ()
        except RecordingError as error:
            faults.report({str(file): error.reason})
        else:
            clips.append(
                Clip(str(file), samples, found.index(_speaker_of(file, root)) if options.speakers else 0, said)
            )
    if not clips:
        raise DataError(f"{name}: no recording in {root} can be used", "mend or remove the files")
    return clips_as_dataset(
        name,
        clips,
        functools.partial(read_recording, rate=options.rate),
        faults,
        options,
        rate=options.rate,
        speakers=tuple(found),
        alphabet=letters.labels() if any(clip.letters for clip in clips) else (),
        workers=options.workers,
    )


def _sound_files(root: Path, name: str) -> list[Path]:
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        what = f"no file in {root} ends in {' '.join(SUFFIXES)}" if root.is_dir() else f"looked for the folder {root}"
        raise DataError(f"{name} not found: {what}", _HINT)
    return files


def _speaker_of(file: Path, root: Path) -> str:
    """The folder of the root that a file lies in; empty in the root itself."""
    inside = file.relative_to(root).parts
    return inside[0] if len(inside) > 1 else ""


def _texts_beside(files: list[Path], faults: Faults) -> dict[Path, Path]:
    """The text file of each recording that has one; empty where none has.

    Raises:
        DataError: Some have one; another recording has none, or another text no recording, and ``faults`` says stop.
    """
    found = {file: file.with_suffix(".txt") for file in files if file.with_suffix(".txt").is_file()}
    if found:
        hint = "mend or remove it, set dataset.text=false"
        alone = [file for file in files if file not in found]
        faults.report({str(file): "has no text beside it, and other recordings have one" for file in alone}, hint)
        texts = sorted(text for folder in {file.parent for file in files} for text in folder.glob("[!.]*.txt"))
        known = set(found.values())
        faults.report({str(text): "has no recording beside it" for text in texts if text not in known}, hint)
    return found


def _read_text(path: Path) -> str:
    """What is said in a recording.

    Raises:
        RecordingError: The text cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(path, f"its text, {path.name}, cannot be read: {error}") from error
