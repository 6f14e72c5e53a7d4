"""The prompts of the Asterisk telephone exchange as raw sound with the words said in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.fields import BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.audio_generation.audio_dataset import Choices, SoundDataset, clips_as_dataset
from mptrain.workloads.audio_generation.audio_windows import Clip
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.sound.alphabet import ENGLISH, Alphabet
from mptrain.workloads.sound.asterisk import RATE, SOUNDS, TRANSCRIPTS, asterisk_prompts
from mptrain.workloads.sound.audio_files import RecordingError, read_recording

if TYPE_CHECKING:
    from torch import Tensor


def load_asterisk_audio(
    *,
    sounds: Path = SOUNDS,
    transcripts: Path = TRANSCRIPTS,
    text: bool = True,
    levels: PositiveInt = 256,
    window: PositiveInt = 4000,
    context: NonNegativeInt = 510,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    on_error: OnError = "stop",
) -> SoundDataset:
    """Read the prompts, some 24 minutes of one speaker at 8 kHz, into memory.

    Args:
        sounds: Folder of the recordings.
        transcripts: The list of what is said.
        text: Tell the network which letter is being said.
        levels: Of µ-law.
        window: Samples that are predicted at a time.
        context: Samples that are heard before a window: what the network sees, less one.
        val_share: Share of the prompts held out for validation.
        test_share: Share of the prompts to test on.
        train_samples: Train on so many prompts only; None trains on all.
        on_error: What to do about recordings that cannot be read.

    Raises:
        DataError: The prompts are not there, or one cannot be read and ``on_error`` is ``stop``.
        ConfigError: Nothing is left to train on.
    """
    faults, alphabet = Faults(on_error), Alphabet(ENGLISH)
    waves: dict[str, Tensor] = {}
    clips = []
    for _, path, words in asterisk_prompts(sounds.expanduser(), transcripts.expanduser()):
        try:
            wave = read_recording(path, RATE)
        except RecordingError as error:
            faults.report({str(path): error.reason})
            continue
        waves[str(path)] = wave
        clips.append(Clip(str(path), len(wave), letters=alphabet.told(words) if text else ()))
    choices = Choices(RATE, levels, window, context, val_share, test_share, train_samples, None, on_error)
    letters = tuple(alphabet.labels()) if text else ()
    return clips_as_dataset("asterisk_audio", clips, waves.__getitem__, faults, choices, ("Allison",), letters)
