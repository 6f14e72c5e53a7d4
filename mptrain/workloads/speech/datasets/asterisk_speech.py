"""The prompts of the Asterisk telephone exchange as utterances with transcripts (see `mptrain.workloads.sound.asterisk`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.fields import BelowOneOrZero, PositiveFloat, PositiveInt
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.sound.alphabet import ENGLISH, Alphabet
from mptrain.workloads.sound.asterisk import RATE, SOUNDS, TRANSCRIPTS, asterisk_prompts
from mptrain.workloads.sound.audio_files import RecordingError, read_recording
from mptrain.workloads.speech.features import Features, Kind
from mptrain.workloads.speech.speech_dataset import Format, SpeechDataset, Utterance
from mptrain.workloads.speech.speech_partition import Choices, speech_as_dataset

if TYPE_CHECKING:
    from torch import Tensor


def load_asterisk(
    *,
    sounds: Path = SOUNDS,
    transcripts: Path = TRANSCRIPTS,
    alphabet: str = ENGLISH,
    features: Kind = "log_mel",
    window_ms: PositiveFloat = 20.0,
    hop_ms: PositiveFloat = 10.0,
    bands: PositiveInt = 40,
    stride: PositiveInt = 2,
    max_seconds: PositiveFloat | None = 15.0,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.15,
    train_samples: PositiveInt | None = None,
    on_error: OnError = "stop",
    batch_size: PositiveInt = 16,
) -> SpeechDataset:
    """Read the prompts, about 24 minutes of one speaker at 8 kHz, and divide them, the same in every run.

    Prompts with numbers of several digits are left out: the list says ``500``, and not which words that was.

    Args:
        sounds: Folder of the recordings.
        transcripts: The list of what is said.
        alphabet: Letters of the transcripts, the space included.
        features: ``log_mel`` or ``log_spectrogram``.
        window_ms: Length of the window of a frame, in milliseconds.
        hop_ms: From frame to frame, in milliseconds.
        bands: Numbers of a frame of ``log_mel``.
        stride: Frames that the network makes one of.
        max_seconds: Leave out, and count, what is longer; None for no limit.
        val_share: Share of the prompts held out for validation.
        test_share: Share of the prompts to test on.
        train_samples: Train on so many only; None trains on all.
        on_error: What to do about recordings that cannot be read and transcripts that cannot be used.
        batch_size: Of the run: batches are made of neighbours in length.

    Raises:
        DataError: The prompts are not there, or one cannot be used and ``on_error`` is ``stop``.
        ConfigError: The features cannot be made, or nothing is left to train on.
    """
    form = Format(Alphabet(alphabet), Features(features, RATE, window_ms, hop_ms, bands), stride)
    choices = Choices(form, max_seconds, {"val": val_share, "test": test_share}, train_samples, batch_size, on_error)
    waves: dict[str, Tensor] = {}
    faults = Faults(on_error)
    utterances = _utterances(asterisk_prompts(sounds.expanduser(), transcripts.expanduser()), form, faults, waves)
    return speech_as_dataset("asterisk", {"train": (utterances, faults)}, waves.__getitem__, choices, None)


def _utterances(
    prompts: list[tuple[str, Path, str]], form: Format, faults: Faults, waves: dict[str, Tensor]
) -> list[Utterance]:
    """The prompts whose words are known; their samples go into ``waves``, by name."""
    utterances = []
    for name, path, words in prompts:
        text = form.alphabet.spelled(words)
        if any(letter.isdigit() and letter not in form.alphabet.letters for letter in text):
            continue
        try:
            waves[name] = read_recording(path, RATE)
        except RecordingError as error:
            faults.report({str(path): error.reason})
        else:
            utterances.append(Utterance(name, text, len(waves[name])))
    return utterances
