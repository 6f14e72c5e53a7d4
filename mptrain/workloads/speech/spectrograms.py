"""Inputs of speech networks: spectra on a logarithmic scale, computed on the device in float32, and letters."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveFloat, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.sound.recordings import Alphabet
from mptrain.workloads.text.subwords import lengths_mask

Kind = Literal["log_mel", "log_spectrogram"]

#: Smallest power that counts; a 16-bit sample that is off by one has 1e-9. Loudness is measured relative to this power,
#: so that silence has loudness 0. Otherwise only rounding errors would remain of silence after subtracting its mean.
FLOOR = 1e-10

#: Added to the standard deviation of an utterance, so that silence becomes all zeros.
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class SpectrogramFeatures:
    """Log-mel or log-spectrogram features of speech: one vector for each frame, a short window of audio.

    Attributes:
        kind: ``log_mel``: power in triangular bands of equal width in mel; ``log_spectrogram``: power of each frequency
            of the discrete Fourier transform.
        rate: Sample rate in hertz.
        window_ms: Length of a frame's Hann window in milliseconds.
        bands: Number of bands of ``log_mel``.

    Raises:
        ConfigError: The window has fewer than two samples, or the transform cannot resolve so many bands.
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
                "common values are 20 and 10",
            )
        if self.kind == "log_mel" and not self.filters().any(1).all():
            raise ConfigError(
                f"dataset.bands={self.bands}: some would be empty with {self.transform} samples at {self.rate} Hz",
                "choose fewer bands, or a longer dataset.window_ms",
            )

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> SpectrogramFeatures:
        """Return the features that a `card` describes; raise KeyError, TypeError or ValueError if it describes none."""
        if (kind := card["features"]) not in typing.get_args(Kind):
            raise ValueError(f"features are {kind!r}")
        return cls(
            kind, int(card["sample_rate"]), float(card["window_ms"]), float(card["hop_ms"]), int(card["numbers"])
        )

    @property
    def window(self) -> int:
        """Length of a frame's window in audio samples."""
        return round(self.rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Distance between frames in audio samples."""
        return round(self.rate * self.hop_ms / 1000)

    @property
    def transform(self) -> int:
        """Length of the Fourier transform in samples: that of the window, for mel bands zero-padded to a power of two.

        For bands the length is at least twice that of the window, because bands at low frequencies are narrower than
        the resolution of a short window.
        """
        return self.window if self.kind == "log_spectrogram" else 2 ** math.ceil(math.log2(2 * self.window))

    @property
    def size(self) -> int:
        """Number of features per frame: of mel bands, or of frequencies from 0 to half the sample rate."""
        return self.bands if self.kind == "log_mel" else self.transform // 2 + 1

    def frames(self, samples: int) -> int:
        """Return the number of frames of an utterance: one centred on its first sample and one after each hop."""
        return 1 + samples // self.hop

    def compute(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return features, float32 ``[N, T, size]``, zero-padded, and frames of each utterance, int64 ``[N]``.

        Samples are int16 ``[N, S]``. Each utterance is normalised to mean 0 and standard deviation 1 over all
        its frames and features. Frames treat samples beyond both ends as zeros. Other utterances of the batch
        have no effect.
        """
        waves = samples.float() / 32768.0
        window = torch.hann_window(self.window, device=waves.device)
        spectrum = torch.stft(
            waves, self.transform, self.hop, self.window, window, center=True, pad_mode="constant", return_complex=True
        )
        # The absolute value would have no gradient at 0, and its square root an infinite one.
        power = spectrum.real.square() + spectrum.imag.square()
        power = power.transpose(1, 2) / window.square().sum()
        if self.kind == "log_mel":
            power = power @ _filters_on(self, power.device).t()
        loudness = (power / FLOOR).clamp(min=1.0).log()
        frames = 1 + lengths // self.hop
        padding = ~lengths_mask(frames, loudness.shape[1])[:, :, None]
        count = (frames * loudness.shape[2])[:, None, None]
        mean = loudness.masked_fill(padding, 0.0).sum((1, 2), keepdim=True) / count
        centred = (loudness - mean).masked_fill(padding, 0.0)
        deviation = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
        return centred / (deviation + _LEAST_DEVIATION), frames

    def filters(self) -> Tensor:
        """Return the weight of each frequency in each mel band, float32 ``[bands, transform / 2 + 1]``.

        They are triangles equidistant in mel, on O'Shaughnessy's scale: 2595 log10(1 + f / 700 Hz).
        """
        highest = 2595.0 * math.log10(1.0 + self.rate / 2 / 700.0)
        corners = 700.0 * (10.0 ** (torch.linspace(0.0, highest, self.bands + 2, dtype=torch.float64) / 2595.0) - 1.0)
        frequencies = torch.linspace(0.0, self.rate / 2, self.transform // 2 + 1, dtype=torch.float64)
        width = corners.diff()
        rising = (frequencies - corners[:-2, None]) / width[:-1, None]
        falling = (corners[2:, None] - frequencies) / width[1:, None]
        return torch.minimum(rising, falling).clamp(min=0.0).float()

    def prepare(self, batch: Batch, device: torch.device) -> Batch:
        """Return a batch of samples with the features instead, as `compute` makes them, and ``lengths`` in frames."""
        batch = batch.to(device)
        features, frames = self.compute(batch.inputs, batch.extras["lengths"])
        return Batch(features, batch.targets, batch.counts, {**batch.extras, "lengths": frames})

    def card(self) -> dict[str, Any]:
        """Return the parameters of the features as JSON values."""
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
    """Format of a speech network's inputs and targets: features of the audio, and letters of the transcript.

    ``stride`` is the factor by which the network reduces the number of frames.
    """

    alphabet: Alphabet
    features: SpectrogramFeatures
    stride: int

    def problem(self, text: str, samples: int) -> str:
        """Return the reason why an utterance cannot be trained on or measured with CTC; empty if it can.

        CTC needs a frame for each letter, and one more between two equal letters. With fewer frames no path spells the
        transcript: its probability is 0 and the loss infinite, and in mixed precision every update with it would be
        skipped as an overflow. Setting such a loss to zero would hide the problem. Letters that the alphabet lacks are
        a reason too.
        """
        if foreign := self.alphabet.problem(text):
            return foreign
        given = -(-self.features.frames(samples) // self.stride)
        needed = len(text) + sum(letter == other for letter, other in pairwise(text))
        if needed > given:
            return f"its transcript of {len(text)} letters needs {needed} frames, but the network has {given}"
        return ""


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Options of speech data sets for converting audio, explained in `SpectrogramFeatures` and `InputFormat`."""

    features: Kind = "log_mel"
    window_ms: PositiveFloat = 20.0
    hop_ms: PositiveFloat = 10.0
    bands: PositiveInt = 40
    stride: PositiveInt = 2
    batch_size: PositiveInt = 16

    def input_format(self, alphabet: str, rate: int) -> InputFormat:
        """Return the input format for an alphabet and a sample rate in hertz, or raise ConfigError."""
        features = SpectrogramFeatures(self.features, rate, self.window_ms, self.hop_ms, self.bands)
        return InputFormat(Alphabet(alphabet), features, self.stride)


@functools.cache
def _filters_on(features: SpectrogramFeatures, device: torch.device) -> Tensor:
    """Return the weights of the mel bands on a device, copied once, without synchronisation."""
    return features.filters().to(device, non_blocking=True)
