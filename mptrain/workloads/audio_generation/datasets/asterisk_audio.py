"""Data set ``asterisk_audio``: prompts of the Asterisk telephone exchange as raw audio with their transcripts."""

from __future__ import annotations

from dataclasses import dataclass

from mptrain.workloads.audio_generation.audio_dataset import Clip, RecordingOptions, SoundDataset, clips_as_dataset
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.sound.recordings import ENGLISH, RATE, Alphabet, AsteriskFiles, read_prompts


@dataclass(frozen=True, kw_only=True)
class AsteriskAudioOptions(RecordingOptions, AsteriskFiles):
    """Options of the data set ``asterisk_audio``."""


@takes_fields_of(AsteriskAudioOptions)
def load_asterisk_audio(options: AsteriskAudioOptions) -> SoundDataset:
    """Read Asterisk's spoken prompts into memory as raw audio: about 24 minutes of one speaker at 8 kHz.

    DataError is raised if prompts are missing, or one cannot be read and ``on_error`` is ``stop``; ConfigError if no
    recording is left to train on.
    """
    faults, alphabet = Faults(options.on_error), Alphabet(ENGLISH)
    read = read_prompts(options.prompts(), faults)
    waves = {str(path): wave for _, path, _, wave in read}
    clips = [
        Clip(str(path), len(wave), letters=alphabet.known_numbers(words) if options.text else ())
        for _, path, words, wave in read
    ]
    return clips_as_dataset(
        "asterisk_audio",
        clips,
        waves.__getitem__,
        faults,
        options,
        rate=RATE,
        speakers=("Allison",),
        alphabet=alphabet.labels() if options.text else (),
    )
