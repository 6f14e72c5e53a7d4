"""The prompts of the Asterisk telephone exchange as utterances with transcripts (see `mptrain.dataset.asterisk`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.dataset.alphabet import ENGLISH, Alphabet
from mptrain.dataset.asterisk import RATE, SOUNDS, TRANSCRIPTS, asterisk_prompts
from mptrain.dataset.audio import RecordingError, read_recording
from mptrain.dataset.faults import Faults, OnError
from mptrain.dataset.sound_features import Features, Kind
from mptrain.dataset.speech_dataset import Format, SpeechDataset, SpeechSplit, Utterance, usable
from mptrain.dataset.speech_parts import hold_out_utterances
from mptrain.fields import BelowOneOrZero, PositiveFloat, PositiveInt

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

    Prompts with numbers of several digits are left out: the list says ``500``, and not which words that was. So is one
    that would be longer than ``max_seconds``.

    Args:
        sounds: Folder of the recordings.
        transcripts: The list of what is said.
        alphabet: Letters of the transcripts, the space included.
        features: ``log_mel`` or ``log_spectrogram``.
        window_ms: Length of the window of a frame, in milliseconds.
        hop_ms: From frame to frame, in milliseconds.
        bands: Numbers of a frame of ``log_mel``.
        stride: Frames that the network makes one of.
        max_seconds: Leave out what is longer; None for no limit.
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
    faults = Faults(on_error)
    waves: dict[str, Tensor] = {}
    utterances = []
    for name, path, words in asterisk_prompts(sounds.expanduser(), transcripts.expanduser()):
        text = form.alphabet.spelled(words)
        if any(letter.isdigit() and letter not in alphabet for letter in text):
            continue
        try:
            wave = read_recording(path, RATE)
        except RecordingError as error:
            faults.report({str(path): error.reason})
            continue
        if max_seconds is None or len(wave) <= max_seconds * RATE:
            waves[name] = wave
            utterances.append(Utterance(name, text, len(wave)))
    parts = hold_out_utterances(
        "asterisk", usable(utterances, form, faults), {"val": val_share, "test": test_share}, train_samples
    )
    splits = {
        part: SpeechSplit(
            f"asterisk {part}",
            chosen,
            form,
            waves.__getitem__,
            batch_size,
            faults if part == "train" else Faults(on_error),
            in_memory=True,
        )
        for part, chosen in parts.items()
    }
    return SpeechDataset("asterisk", form, 0, splits["train"], splits.get("val"), splits.get("test"))
