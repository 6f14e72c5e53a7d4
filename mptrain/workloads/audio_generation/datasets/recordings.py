"""Recordings of the user's own: any folder of sound files, by speaker and with texts where there are such."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.errors import DataError
from mptrain.fields import BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.audio_generation.audio_dataset import Choices, SoundDataset, clips_as_dataset
from mptrain.workloads.audio_generation.audio_windows import Clip
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.sound.alphabet import ENGLISH, Alphabet
from mptrain.workloads.sound.audio_files import SUFFIXES, RecordingError, read_recording, recording_seconds

if TYPE_CHECKING:
    from torch import Tensor

_HINT = "set dataset.root to a folder of WAV files; dataset=made_up_sounds needs no files"


def load_recordings(
    *,
    root: Path = Path("data/recordings"),
    name: str = "recordings",
    rate: PositiveInt = 16000,
    speakers: bool = True,
    text: bool = True,
    alphabet: str = ENGLISH,
    levels: PositiveInt = 256,
    window: PositiveInt = 4000,
    context: NonNegativeInt = 510,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 2,
    on_error: OnError = "stop",
) -> SoundDataset:
    """Find the recordings in a folder; they are read when a batch asks for them.

    Files lie in the folder itself or below it. Where they lie in folders of it, each of these is a speaker. A text file
    beside a recording, ``NAME.txt`` beside ``NAME.wav``, has what is said in it. Where texts are told to the network and one
    recording has one, a recording without a text and a text without a recording cannot be used.

    Args:
        root: The folder.
        name: What to call the data set in records.
        rate: Samples a second that all recordings are converted to, in hertz.
        speakers: Tell the network who speaks, where there are several speakers.
        text: Tell it which letter is being said, where there are texts; False looks for none.
        alphabet: Letters of the texts; others are left out.
        levels: Of µ-law.
        window: Samples that are predicted at a time.
        context: Samples that are heard before a window: what the network sees, less one.
        val_share: Share of the recordings held out for validation.
        test_share: Share of the recordings to test on.
        train_samples: Train on so many recordings only; None trains on all.
        workers: Processes that read files.
        on_error: What to do about recordings and texts that cannot be read or lack one another.

    Raises:
        DataError: There are no recordings, or one cannot be used and ``on_error`` is ``stop``.
        ConfigError: Nothing is left to train on.
    """
    root, letters, faults = root.expanduser(), Alphabet(alphabet), Faults(on_error)
    files = _sound_files(root, name)
    found = sorted({_speaker_of(file, root) for file in files}) if speakers else [""]
    texts = _texts_beside(files, faults) if text else {}
    clips = []
    for file in texts or files:
        try:
            samples = max(1, round(recording_seconds(file) * rate))
            said = letters.told(_read_text(texts[file])) if texts else ()
        except RecordingError as error:
            faults.report({str(file): error.reason})
        else:
            clips.append(Clip(str(file), samples, found.index(_speaker_of(file, root)) if speakers else 0, said))
    if not clips:
        raise DataError(f"{name}: no recording in {root} can be used", "mend or remove the files")
    told = letters.labels() if any(clip.letters for clip in clips) else ()
    choices = Choices(rate, levels, window, context, val_share, test_share, train_samples, workers, on_error)
    return clips_as_dataset(name, clips, _Reading(rate), faults, choices, tuple(found), tuple(told))


def _sound_files(root: Path, name: str) -> list[Path]:
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        what = f"no file in {root} ends in {' '.join(SUFFIXES)}" if root.is_dir() else f"looked for the folder {root}"
        raise DataError(f"{name} not found: {what}", _HINT)
    return files


class _Reading:
    """Reads a recording at a rate; something that worker processes can be handed."""

    def __init__(self, rate: int) -> None:
        self.rate = rate

    def __call__(self, name: str) -> Tensor:
        return read_recording(name, self.rate)


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
