"""Data set ``made_up_sounds``, for machines without recordings: plucked strings, two vowels and bells, synthesised.

Results on these sounds say little about the quality of a network on speech.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.audio_generation.audio_dataset import Clip, SoundDataset, SoundSplit, WindowOptions
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.base.random_streams import mix, uniforms

#: Sample rate in hertz.
RATE = 8000

#: Length of a sound in samples: half a second.
LENGTH = 4000

_FIXED = 19830601  # seed of the sounds, the same in every run
_LOUDEST = 0.7  # largest amplitude, relative to the 16-bit range

#: The first three formants of two vowels of a man, in hertz (Peterson and Barney 1952, table II).
_FORMANTS = {"vowel ah": (730.0, 1090.0, 2440.0), "vowel ee": (270.0, 2290.0, 3010.0)}
_BANDWIDTHS = (60.0, 90.0, 150.0)

#: Partials of a bell: multiple of its strike note and decay rate in 1/s.
_PARTIALS = ((0.5, 2.0), (1.0, 4.0), (1.2, 5.0), (1.5, 7.0), (2.0, 9.0), (2.6, 14.0))


@dataclass(frozen=True, kw_only=True)
class SyntheticSoundOptions(WindowOptions):
    """Options of the data set ``made_up_sounds`` of synthetic sounds, besides those of `WindowOptions`.

    A smaller training set is a prefix of a larger one; 0 ``val_samples`` or ``test_samples`` make no such part.
    """

    train_samples: PositiveInt = 160
    val_samples: NonNegativeInt = 24
    test_samples: NonNegativeInt = 48


@takes_fields_of(SyntheticSoundOptions)
def make_sounds(options: SyntheticSoundOptions) -> SoundDataset:
    """Synthesise half-second sounds of four kinds at 8 kHz, the same in every run.

    The kinds are a string, two vowels and a bell; they take the place of speakers that condition a network.
    """
    counts = {"train": options.train_samples, "val": options.val_samples, "test": options.test_samples}
    parts: dict[str, SoundSplit] = {}
    for number, (part, count) in enumerate(counts.items()):
        waves, clips = {}, []
        for index in range(count):
            kind = index % len(KINDS)
            name = f"made_up_sounds {part} {index}: {list(KINDS)[kind]}"
            waves[name] = sound(kind, number, index)
            clips.append(Clip(name, LENGTH, kind))
        if count:
            parts[part] = SoundSplit(
                f"made_up_sounds {part}", clips, waves.__getitem__, options, Faults(), in_memory=True
            )
    return SoundDataset(name="made_up_sounds", splits=parts, rate=RATE, levels=options.levels, speakers=tuple(KINDS))


def sound(kind: int, part: int, index: int) -> Tensor:
    """Synthesise one sound of half a second, int16 ``[LENGTH]``, by kind, split (0, 1 or 2) and index.

    Pitch, loudness, onset and noise differ from sound to sound.
    """
    pitch, loudness, onset, *draws = uniforms(_FIXED, part, [index], 3 + RATE)[0].tolist()
    begin = int(onset * LENGTH / 8)
    make = KINDS[list(KINDS)[kind]]
    wave = make(100.0 * 3.0**pitch, LENGTH - begin, torch.tensor(draws, dtype=torch.float64))
    wave = wave / wave.abs().max() * _LOUDEST * 3.0 ** (loudness - 1.0)
    breath = (uniforms(mix(_FIXED, 1), part, [index], LENGTH)[0] - 0.5) * 0.0008
    breath[begin:] += wave
    return (breath * 32767).round().to(torch.int16)


def _string(frequency: float, length: int, draws: Tensor) -> Tensor:
    """Return the sound of a plucked string: noise that a loop smooths repeatedly (Karplus and Strong 1983)."""
    loop = max(2, round(RATE / frequency - 0.5))
    rounds = [draws[:loop] * 2 - 1]
    # The sample before the first one of the last round. The first round is taken to follow a copy of itself.
    before = rounds[0][-1:]
    for _ in range(length // loop + 1):
        last = rounds[-1]
        rounds.append((last + torch.cat([before, last[:-1]])) / 2 * 0.996)
        before = last[-1:]
    return torch.cat(rounds)[:length]


def _vowel(formants: tuple[float, ...]) -> Callable[[float, int, Tensor], Tensor]:
    """Return a maker of sung vowels: harmonics that fall by 6 dB an octave and are louder near a formant (in hertz)."""

    def make(frequency: float, length: int, draws: Tensor) -> Tensor:
        seconds = torch.arange(length, dtype=torch.float64) / RATE
        # Vibrato: the pitch varies by 1 % six times a second.
        phase = 2 * math.pi * frequency * (seconds - 0.01 / (12 * math.pi) * torch.cos(12 * math.pi * seconds))
        wave = torch.zeros(length, dtype=torch.float64)
        for harmonic in range(1, int(0.47 * RATE / frequency) + 1):
            at = harmonic * frequency
            gain = sum(1 / (1 + ((at - f) / b) ** 2) for f, b in zip(formants, _BANDWIDTHS, strict=True))
            wave += (gain + 0.01) / harmonic * torch.sin(harmonic * phase + 2 * math.pi * draws[harmonic])
        return wave * torch.hann_window(length, periodic=False, dtype=torch.float64).sqrt()

    return make


def _bell(frequency: float, length: int, draws: Tensor) -> Tensor:
    """Return the sound of a bell: inharmonic partials, each with its own decay rate."""
    seconds = torch.arange(length, dtype=torch.float64) / RATE
    wave = torch.zeros(length, dtype=torch.float64)
    for number, (ratio, fading) in enumerate(_PARTIALS):
        strength = 0.5 + 0.5 * draws[number]
        wave += strength * torch.exp(-fading * seconds) * torch.sin(2 * math.pi * ratio * 2 * frequency * seconds)
    return wave


#: Kinds of sound in the order of their numbers: function of pitch in hertz, number of samples and random draws.
KINDS: dict[str, Callable[[float, int, Tensor], Tensor]] = {
    "string": _string,
    **{name: _vowel(formants) for name, formants in _FORMANTS.items()},
    "bell": _bell,
}
