"""Readers of audio files: convert any sample rate and number of channels to 16-bit mono samples at one rate.

scipy reads WAV files; FLAC, OGG and compressed WAV files need the extra ``speech``.
"""

from __future__ import annotations

import math
import os
import warnings
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.system.errors import DataError
from mptrain.system.files import open_to_read
from mptrain.system.machine import load_extra

#: Suffixes of recordings.
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")

#: Plausible sample rates in hertz; other values mean a broken header.
RATES = range(1_000, 768_001)

#: libsndfile's names of the formats that are read, whatever the name of the file.
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")

_FULL_SCALE = 32768.0  # 16-bit value that corresponds to 1.0


class RecordingError(DataError):
    """Error for a recording that cannot be used; ``reason`` is its description without the file name, for `Faults`."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}", "fix or remove it, or set dataset.on_error=skip to skip and count such samples"
        )
        self.reason = reason


def read_recording(path: str | Path, rate: int | None = None) -> Tensor:
    """Read an audio file as 16-bit mono samples, int16 ``[T]``, T at least 1, converted to a sample rate in hertz.

    Several channels are averaged. 16-bit mono files at the requested rate are returned unchanged. Other rates are
    converted by a polyphase filter (`scipy.signal.resample_poly`), and values outside the 16-bit range are clipped.
    ``rate`` None keeps that of the file.

    Raises:
        RecordingError: The file is missing, broken, truncated or empty, or has values that are not finite.
        EnvironmentRefused: The format needs the extra ``speech``, which is not installed.
    """
    import numpy as np
    from scipy.signal import resample_poly

    own_rate, samples = _decoded(Path(path))
    _require_sound(path, own_rate, len(samples))
    wanted = rate or own_rate
    if samples.dtype == np.int16 and samples.ndim == 1 and own_rate == wanted:
        return torch.from_numpy(samples.copy())
    try:
        values = _as_floats(samples)
        if not np.isfinite(values).all():
            raise RecordingError(path, "holds NaN or inf")
        if values.ndim > 1:
            values = values.mean(axis=1)
        if own_rate != wanted:
            divisor = math.gcd(wanted, own_rate)
            values = resample_poly(values, wanted // divisor, own_rate // divisor)
        whole = np.clip(np.rint(values * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1)
        return torch.from_numpy(whole.astype(np.int16))
    except MemoryError:
        raise RecordingError(path, f"has {len(samples):,} samples, too many for the memory") from None


def recording_seconds(path: str | Path) -> float:
    """Return the duration of an audio file in seconds, above 0, from its header if possible.

    The errors are those of `read_recording`.
    """
    path = Path(path)
    if path.suffix.lower() == ".wav":
        try:
            with open_to_read(path) as content, wave.open(content, "rb") as file:
                rate, samples = file.getframerate(), file.getnframes()
        except (wave.Error, EOFError, OSError, RuntimeError, ValueError):  # not plain PCM, or broken: read the file
            rate, decoded = _decoded(path)
            samples = len(decoded)
    else:
        rate, samples = _from_soundfile(path, lambda sound: sound.frames)
    _require_sound(path, rate, samples)
    return float(samples / rate)


def _require_sound(path: str | Path, rate: int, samples: int) -> None:
    if rate not in RATES:
        raise RecordingError(path, f"its header gives a sample rate of {rate} Hz")
    if samples <= 0:
        raise RecordingError(path, "holds no samples")


def _decoded(path: Path) -> tuple[int, Any]:
    """Return the sample rate in hertz and the samples ``[T]`` or ``[T, channels]``, in the file's number format."""
    if path.suffix.lower() == ".wav":
        from scipy.io import wavfile

        try:
            with open_to_read(path) as content, warnings.catch_warnings():
                # Ignore chunks that scipy does not know, but not a file that ends too early.
                warnings.simplefilter("ignore", wavfile.WavFileWarning)
                warnings.filterwarnings("error", message="Reached EOF", category=wavfile.WavFileWarning)
                rate, samples = wavfile.read(content)
        except Exception as error:  # scipy has no fixed set of them for damaged files; memory for a header's lie is one
            if "Unknown wave file format" not in str(error):
                raise RecordingError(path, _reason(path, error)) from error
        else:
            return int(rate), samples
    return _from_soundfile(path, lambda sound: sound.read(dtype="int16"))


def _from_soundfile(path: Path, of: Callable[[Any], Any]) -> tuple[int, Any]:
    """Return the sample rate in hertz, and something of an open ``soundfile.SoundFile``; convert the errors."""
    library = load_extra("soundfile", "speech", f"reading {path.suffix or path.name} files")
    try:
        with open_to_read(path) as content, library.SoundFile(content.fileno(), closefd=False) as sound:
            if sound.format not in _FORMATS:
                raise ValueError(f"it has the format {sound.format}")
            return int(sound.samplerate), of(sound)
    except (library.LibsndfileError, OSError, ValueError, RuntimeError, TypeError, MemoryError) as error:
        raise RecordingError(path, _reason(path, error)) from error


def _reason(path: Path, error: Exception) -> str:
    if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises for names that no file can have)
        return "there is no such file"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    words = " ".join(str(error).split()) or type(error).__name__
    if "Reached EOF" in words:
        return f"is truncated: its header announces more data than there is ({words})"
    kind = path.suffix.lstrip(".").upper() or "sound"
    return f"is not a {kind} file that can be read ({words})"


def _as_floats(samples: Any) -> Any:
    """Return samples as float64 from -1 to 1; unsigned ones are centred on the middle of their range."""
    import numpy as np

    if np.issubdtype(samples.dtype, np.floating):
        return samples.astype(np.float64)
    limits = np.iinfo(samples.dtype)
    half = (int(limits.max) - int(limits.min) + 1) / 2
    return (samples.astype(np.float64) - (half if limits.min == 0 else 0.0)) / half
