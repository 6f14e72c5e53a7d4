"""Data set ``recordings``: raw audio from a folder of sound files, optionally with speakers and transcripts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.system.files import expanded, read_text
from mptrain.workloads.audio_generation.audio_dataset import Clip, RecordingOptions, SoundDataset, clips_as_dataset
from mptrain.workloads.base.data_files import Faults, as_stored, files_below
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.sound.recordings import (
    ENGLISH,
    SUFFIXES,
    Alphabet,
    RecordingError,
    read_recording,
    recording_seconds,
)

_HINT = "set dataset.root to a folder of WAV files; dataset=made_up_sounds needs no files"


@dataclass(frozen=True, kw_only=True)
class RecordingFolderOptions(RecordingOptions):
    """Options of the data set ``recordings``, a folder of sound files, besides those of `RecordingOptions`.

    ``rate`` is the sample rate that all recordings are converted to, in hertz; ``speakers`` conditions the network on
    the speaker, where there are several; letters of transcripts that are not in ``alphabet`` are left out.
    """

    root: Path = Path("data/recordings")
    name: str = "recordings"
    rate: PositiveInt = 16000
    speakers: bool = True
    alphabet: str = ENGLISH
    workers: NonNegativeInt = 2


@takes_fields_of(RecordingFolderOptions)
def load_recordings(options: RecordingFolderOptions) -> SoundDataset:
    """Find the recordings in a folder and make a raw-audio data set; a recording is read when a batch needs it.

    Files may be in the folder itself or in subfolders, in which case each direct subfolder is a speaker. The transcript
    of ``NAME.wav`` is the text file ``NAME.txt`` next to it. If the network is conditioned on text and one recording
    has a transcript, recordings without a transcript and transcripts without a recording are unusable.

    Raises:
        DataError: There are no recordings, or one is unusable and ``on_error`` is ``stop``.
        ConfigError: No recording is left to train on.
    """
    name, root = options.name, expanded(options.root)
    letters, faults = Alphabet(options.alphabet), Faults(options.on_error)
    files = _sound_files(root, name)
    speakers = sorted({_speaker_of(file, root) for file in files}) if options.speakers else [""]
    texts = _texts_beside(files, faults) if options.text else {}
    clips = []
    for file in texts or files:
        try:
            samples = max(1, round(recording_seconds(file) * options.rate))
            letter_numbers = letters.known_numbers(_text_of(texts[file])) if texts else ()
        except RecordingError as error:
            faults.report({str(file): error.reason})
        else:
            clips.append(
                Clip(
                    str(file),
                    samples,
                    speakers.index(_speaker_of(file, root)) if options.speakers else 0,
                    letter_numbers,
                )
            )
    if not clips:
        raise DataError(f"{name}: no recording in {root} can be used", "fix or remove the files")
    return clips_as_dataset(
        name,
        clips,
        functools.partial(read_recording, rate=options.rate),
        faults,
        options,
        rate=options.rate,
        speakers=tuple(speakers),
        alphabet=letters.labels() if any(clip.letters for clip in clips) else (),
        workers=options.workers,
    )


def _sound_files(root: Path, name: str) -> list[Path]:
    files = [path for path in files_below(root, (*SUFFIXES, ".txt")) if path.suffix.lower() in SUFFIXES]
    if not files:
        what = f"no file in {root} ends in {' '.join(SUFFIXES)}" if root.is_dir() else f"looked for the folder {root}"
        raise DataError(f"{name} not found: {what}", _HINT)
    return files


def _speaker_of(file: Path, root: Path) -> str:
    """Return the direct subfolder of the root that contains a file, or an empty string for the root itself."""
    inside = file.relative_to(root).parts
    return inside[0] if len(inside) > 1 else ""


def _texts_beside(files: list[Path], faults: Faults) -> dict[Path, Path]:
    """Return the text file of each recording that has one; if any has, the others and lone texts are faults."""
    beside = {file: Path(as_stored(str(file.with_suffix(".txt")))) for file in files}
    transcripts = {file: text for file, text in beside.items() if text.is_file()}
    if transcripts:
        hint = "fix or remove it, set dataset.text=false"
        alone = [file for file in files if file not in transcripts]
        faults.report({str(file): "has no text next to it, but other recordings have one" for file in alone}, hint)
        texts = sorted(text for folder in {file.parent for file in files} for text in folder.glob("[!.]*.txt"))
        known = set(transcripts.values())
        faults.report({str(text): "has no recording next to it" for text in texts if text not in known}, hint)
    return transcripts


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(path, f"its text file {path.name} cannot be read: {error}") from error
