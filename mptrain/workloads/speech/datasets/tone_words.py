"""Data set ``tone_words``, for machines without recorded speech: synthetic words whose letters are pairs of tones.

The sixteen letters are the sixteen tone pairs of push-button telephones (ITU-T Q.23), with varying tempo, pitch and
loudness, with pauses and noise. Results on these words say nothing about the quality of a network on speech.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mptrain.system.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.base.random_streams import mix, uniforms
from mptrain.workloads.speech.spectrograms import FrameOptions
from mptrain.workloads.speech.speech_dataset import SpeechDataset, SpeechSplit, Utterance, usable

LETTERS = "abcdefghijklmnop"

#: Frequencies of the rows and columns of telephone keys, in hertz.
LOW, HIGH = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0, 1633.0)

#: Sample rate in hertz.
RATE = 4000

_FIXED = 19631118  # seed of the utterances, the same in every run
_WORDS, _LETTERS = 3, 4  # largest number of words, and of letters in a word
_AMPLITUDE = 6000.0  # amplitude of the loudest tone, in 16-bit steps


@dataclass(frozen=True, kw_only=True)
class ToneWordsOptions(FrameOptions):
    """Options of the data set ``tone_words`` of synthetic words, besides those of `FrameOptions`.

    A smaller training set is a prefix of a larger one; 0 ``val_samples`` or ``test_samples`` make no such part.
    ``noise`` is the standard deviation of white noise, relative to that of a tone pair of medium loudness.
    """

    train_samples: PositiveInt = 1200
    val_samples: NonNegativeInt = 200
    test_samples: NonNegativeInt = 400
    noise: PositiveFloat = 1.0
    window_ms: PositiveFloat = 32.0
    bands: PositiveInt = 32
    batch_size: PositiveInt = 32


@takes_fields_of(ToneWordsOptions)
def make_tone_words(options: ToneWordsOptions) -> SpeechDataset:
    """Synthesise utterances of one to three words of one to four letters, the same in every run.

    Transcripts are drawn with replacement, so short ones repeat. With the default numbers of utterances, 10.5 % of the
    validation transcripts and 12 % of the test transcripts also occur in training, with other audio. ConfigError is
    raised if the features are invalid.
    """
    form = options.input_format(LETTERS + " ", RATE)
    counts = {"train": options.train_samples, "val": options.val_samples, "test": options.test_samples}
    parts: dict[str, SpeechSplit] = {}
    for number, (part, count) in enumerate(counts.items()):
        faults = Faults("skip")  # with a long hop some utterances have too few frames
        waves, utterances = {}, []
        for index in range(count):
            text = text_of(number, index)
            name = f"tone_words {part} {index}: {text}"
            waves[name] = wave_of(text, number, index, options.noise)
            utterances.append(Utterance(name, text, len(waves[name])))
        if count:
            kept = usable(utterances, form, faults)
            parts[part] = SpeechSplit(
                f"tone_words {part}", kept, form, waves.__getitem__, options.batch_size, faults, in_memory=True
            )
    return SpeechDataset(name="tone_words", splits=parts, form=form)


def text_of(part: int, index: int) -> str:
    """Return the transcript of a synthetic utterance, such as ``fa ocb``, by its split (0, 1 or 2) and index."""
    draws = uniforms(_FIXED, part, [index], 1 + _WORDS * (1 + _LETTERS))[0].tolist()
    words = []
    for word in range(1 + int(draws[0] * _WORDS)):
        length, *letters = draws[1 + word * (1 + _LETTERS) :][: 1 + _LETTERS]
        words.append("".join(LETTERS[int(draw * 16)] for draw in letters[: 1 + int(length * _LETTERS)]))
    return " ".join(words)


def wave_of(text: str, part: int, index: int, noise: float) -> Tensor:
    """Synthesise the audio samples of an utterance at 4 kHz, int16 ``[T]``; they depend only on the arguments.

    A letter takes 60 to 140 ms, of which the last eighth to quarter is silent; a space is a pause of that length. Tempo
    varies by a fifth in both directions, pitch by 2 % per utterance and 1 % per letter, loudness by a factor of 3.
    """
    tempo, pitch, loudness, *draws = uniforms(mix(_FIXED, 1), part, [index], 3 + 4 * len(text))[0].tolist()
    pieces = []
    for position, letter in enumerate(text):
        duration, rest, low, high = draws[4 * position :][:4]
        samples = int(RATE * (0.06 + 0.08 * duration) * (0.8 + 0.4 * tempo))
        pieces.append(torch.zeros(samples, dtype=torch.float64))
        if letter == " ":
            continue
        sounding = int(samples * (0.75 + 0.125 * rest))
        seconds = torch.arange(sounding, dtype=torch.float64) / RATE
        row, column = divmod(LETTERS.index(letter), 4)
        for tone, detuned in ((LOW[row], low), (HIGH[column], high)):
            frequency = tone * (0.98 + 0.04 * pitch) * (0.99 + 0.02 * detuned)
            pieces[-1][:sounding] += torch.sin(2 * torch.pi * frequency * seconds)
        pieces[-1][:sounding] *= torch.hann_window(sounding, dtype=torch.float64).sqrt()
    wave: Tensor = _AMPLITUDE * 3.0 ** (loudness - 1.0) * torch.cat(pieces)
    white = uniforms(mix(_FIXED, 2), part, [index], len(wave))[0] - 0.5
    wave += white * 12**0.5 * noise * _AMPLITUDE * 3.0**-0.5 * 0.7  # 0.7: RMS of two windowed sines
    return wave.clamp(-32768, 32767).round().to(torch.int16)
