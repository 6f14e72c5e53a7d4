"""Data set ``asterisk``: prompts of the Asterisk telephone exchange as utterances with transcripts."""

from __future__ import annotations

from dataclasses import dataclass

from mptrain.system.fields import BelowOneOrZero, PositiveFloat
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.sound.recordings import RATE, AsteriskFiles, read_prompts
from mptrain.workloads.speech.speech_dataset import SpeechDataset, SpeechOptions, Utterance, speech_as_dataset


@dataclass(frozen=True, kw_only=True)
class AsteriskOptions(SpeechOptions, AsteriskFiles):
    """Options of the data set ``asterisk``."""

    max_seconds: PositiveFloat | None = 15.0
    test_share: BelowOneOrZero = 0.15


@takes_fields_of(AsteriskOptions)
def load_asterisk(options: AsteriskOptions) -> SpeechDataset:
    """Read Asterisk's spoken prompts into memory as utterances: about 24 minutes of one speaker at 8 kHz.

    Prompts with numbers of several digits are left out, because the list has ``500`` and not the spoken words.
    DataError is raised if prompts are missing, or one is unusable and ``on_error`` is ``stop``; ConfigError if the
    features are invalid, or no utterance is left to train on.
    """
    form, faults = options.input_format(options.alphabet, RATE), Faults(options.on_error)
    prompts = [(name, path, form.alphabet.spelled(words)) for name, path, words in options.prompts()]
    foreign_digits = set("0123456789") - set(form.alphabet.letters)
    read = read_prompts([prompt for prompt in prompts if not foreign_digits & set(prompt[2])], faults)
    waves = {name: wave for name, _, _, wave in read}
    utterances = [Utterance(name, text, len(wave)) for name, _, text, wave in read]
    return speech_as_dataset("asterisk", {"train": (utterances, faults)}, waves.__getitem__, form, options, None)
