"""From utterances to what a speech network takes: spectra on a logarithmic scale, on the device in float32, and letters."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mptrain.errors import ConfigError
from mptrain.fields import PositiveFloat, PositiveInt
from mptrain.workloads.sound.alphabet import Alphabet

Kind = Literal["log_mel", "log_spectrogram"]

#: Power below which nothing is told apart: a 16-bit sample that is off by one has 1e-9. Loudness is measured from here,
#: so that silence is 0, and so is its mean: rounding errors of a mean would be all that is left of it.
FLOOR = 1e-10

#: Added to the standard deviation of an utterance, so that one which is all silence becomes all zeros.
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class SpectrogramFeatures:
    """How features are made.

    Attributes:
        kind: ``log_mel``: power in triangular bands, equally wide to the ear; ``log_spectrogram``: power of each
            frequency of the discrete transform.
        rate: Samples a second, in hertz.
        window_ms: Length of the Hann window that a frame looks through, in milliseconds.
        hop_ms: From frame to frame, in milliseconds.
        bands: Numbers of a frame of ``log_mel``.

    Raises:
        ConfigError: The window holds no sample, or more bands are asked for than the transform can tell apart.
    """

    kind: Kind
    rate: int
    window_ms: float
    hop_ms: float
    bands: int

    def __post_init__(self) -> None:
        if self.window < 2 or self.hop < 1:
            raise ConfigError(
                f"dataset.window_ms={self.window_ms} and dataset.hop_ms={self.hop_ms} are {self.window} and {self.hop} "
                f"samples at {self.rate} Hz",
                "20 and 10 are usual",
            )
        if self.kind == "log_mel" and not self.filters().any(1).all():
            raise ConfigError(
                f"dataset.bands={self.bands}: some would hold no frequency of {self.transform} samples at {self.rate} Hz",
                "choose fewer bands, or a longer dataset.window_ms",
            )

    @property
    def window(self) -> int:
        """Samples of the window."""
        return round(self.rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Samples from frame to frame."""
        return round(self.rate * self.hop_ms / 1000)

    @property
    def transform(self) -> int:
        """Samples of the transform: the window's, and for bands zeros up to a power of two of at least twice as many.

        The bands of low frequencies are narrower than what a short window tells apart.
        """
        return self.window if self.kind == "log_spectrogram" else 2 ** math.ceil(math.log2(2 * self.window))

    @property
    def size(self) -> int:
        """Numbers of a frame."""
        return self.bands if self.kind == "log_mel" else self.transform // 2 + 1

    def frames(self, samples: int) -> int:
        """Frames of an utterance: one around its first sample and one each hop on, so that there always is one."""
        return 1 + samples // self.hop

    def compute(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Features of a batch, each utterance with mean 0 and standard deviation 1 over all its numbers.

        Frames look past both ends of an utterance as if there was silence; what another utterance of the batch is like
        changes nothing.

        Args:
            samples: int16 ``[N, S]``, 0 where an utterance has ended.
            lengths: Samples of each, int64 ``[N]``.

        Returns:
            float32 ``[N, T, size]``, 0 behind the last frame of an utterance, and the frames of each, int64 ``[N]``.
        """
        waves = samples.float() / 32768.0
        window = torch.hann_window(self.window, device=waves.device)
        spectrum = torch.stft(
            waves, self.transform, self.hop, self.window, window, center=True, pad_mode="constant", return_complex=True
        )
        power = (
            spectrum.real.square() + spectrum.imag.square()
        )  # an absolute value has no gradient, and a root, to no end
        power = power.transpose(1, 2) / window.square().sum()
        if self.kind == "log_mel":
            power = power @ _filters_on(self, power.device).t()
        loudness = (power / FLOOR).clamp(min=1.0).log()
        frames = 1 + lengths // self.hop
        padding = (torch.arange(loudness.shape[1], device=frames.device) >= frames[:, None])[:, :, None]
        count = (frames * loudness.shape[2])[:, None, None]
        mean = loudness.masked_fill(padding, 0.0).sum((1, 2), keepdim=True) / count
        centred = (loudness - mean).masked_fill(padding, 0.0)
        deviation = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
        return centred / (deviation + _LEAST_DEVIATION), frames

    def filters(self) -> Tensor:
        """Weights of frequencies in bands, float32 ``[bands, transform / 2 + 1]``: triangles, equally spaced in mel.

        A mel is O'Shaughnessy's: 2595 log10(1 + f / 700 Hz).
        """
        highest = 2595.0 * math.log10(1.0 + self.rate / 2 / 700.0)
        corners = 700.0 * (10.0 ** (torch.linspace(0.0, highest, self.bands + 2, dtype=torch.float64) / 2595.0) - 1.0)
        frequencies = torch.linspace(0.0, self.rate / 2, self.transform // 2 + 1, dtype=torch.float64)
        width = corners.diff()
        rising = (frequencies - corners[:-2, None]) / width[:-1, None]
        falling = (corners[2:, None] - frequencies) / width[1:, None]
        return torch.minimum(rising, falling).clamp(min=0.0).float()

    def card(self) -> dict[str, Any]:
        """How features are made, as JSON values."""
        return {
            "features": self.kind,
            "sample_rate": self.rate,
            "window_ms": self.window_ms,
            "hop_ms": self.hop_ms,
            "numbers": self.size,
            "normalised": "each utterance to mean 0 and standard deviation 1",
        }


@dataclass(frozen=True)
class InputFormat:
    """What utterances become.

    Attributes:
        alphabet: Letters and their numbers.
        features: How samples become frames.
        stride: Frames that the network makes one of.
    """

    alphabet: Alphabet
    features: SpectrogramFeatures
    stride: int

    def problem(self, text: str, samples: int) -> str:
        """Why an utterance cannot be trained on or measured; empty for no reason.

        Connectionist temporal classification needs a frame for each letter, and one more between two equal letters.
        Where there are fewer, no path spells the transcript: its probability is 0, the loss is infinite, and in mixed
        precision every update with it would be refused as an overflow. A loss that is set to zero there hides it.
        """
        if foreign := self.alphabet.problem(text):
            return foreign
        given = -(-self.features.frames(samples) // self.stride)
        needed = len(text) + sum(one == other for one, other in pairwise(text))
        if needed > given:
            return f"its transcript of {len(text)} letters takes {needed} frames, and the network sees {given}"
        return ""


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Options of how utterances become frames.

    Attributes:
        features: ``log_mel`` or ``log_spectrogram``.
        window_ms: Length of the window of a frame, in milliseconds.
        hop_ms: From frame to frame, in milliseconds.
        bands: Numbers of a frame of ``log_mel``.
        stride: Frames that the network makes one of.
        batch_size: Of the run: batches are made of neighbours in length.
    """

    features: Kind = "log_mel"
    window_ms: PositiveFloat = 20.0
    hop_ms: PositiveFloat = 10.0
    bands: PositiveInt = 40
    stride: PositiveInt = 2
    batch_size: PositiveInt = 16

    def input_format(self, alphabet: str, rate: int) -> InputFormat:
        """The format of utterances with these letters, at a rate in hertz.

        Raises:
            ConfigError: The features cannot be made, or the alphabet is none.
        """
        features = SpectrogramFeatures(self.features, rate, self.window_ms, self.hop_ms, self.bands)
        return InputFormat(Alphabet(alphabet), features, self.stride)


@functools.cache
def _filters_on(features: SpectrogramFeatures, device: torch.device) -> Tensor:
    """The bands' weights on a device, copied there once, without waiting."""
    return features.filters().to(device, non_blocking=True)
