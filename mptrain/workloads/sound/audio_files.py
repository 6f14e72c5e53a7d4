"""Reading recordings: any rate, any number of channels, to 16-bit samples of one channel at one rate.

WAV files are read with scipy, which mptrain has anyway; FLAC, OGG and compressed WAV need the extra ``speech``. Nothing
here knows what the recordings are for.
"""

from __future__ import annotations

import math
import os
import struct
import warnings
import wave
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.extras import load_extra

#: Names of recordings end so.
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")

#: Rates that a file may claim to have, in hertz; others are taken for a broken header.
RATES = range(1_000, 768_001)

_FULL_SCALE = 32768.0  # the 16-bit sample that would stand for 1


class RecordingError(DataError):
    """A recording cannot be used.

    Args:
        path: The file.
        reason: What is wrong with it, as `mptrain.workloads.base.faulty_samples.Faults` takes it.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}", "mend or remove it, or set dataset.on_error=skip to leave out and count such"
        )
        self.reason = reason


def read_recording(path: str | Path, rate: int | None = None) -> Tensor:
    """The samples of a recording.

    Several channels become their mean. 16-bit files of one channel at the rate asked for are not changed at all; other
    rates are converted by a polyphase filter (`scipy.signal.resample_poly`), and what leaves 16 bits is clipped.

    Args:
        path: A WAV file, or with the extra ``speech`` a file of any format that libsndfile reads.
        rate: Samples a second to convert to, in hertz; None leaves the file's own.

    Returns:
        int16 ``[T]``, T at least 1.

    Raises:
        RecordingError: The file is missing, broken, cut short, empty or holds values that are not finite.
        EnvironmentRefused: The format needs the extra ``speech``, which is not installed.
    """
    import numpy as np
    from scipy.signal import resample_poly

    own_rate, samples = _decoded(Path(path))
    _require_sound(path, own_rate, len(samples))
    wanted = rate or own_rate
    if samples.dtype == np.int16 and samples.ndim == 1 and own_rate == wanted:
        return torch.from_numpy(samples.copy())
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


def recording_seconds(path: str | Path) -> float:
    """How long a recording is, in seconds, from its header where that says so; more than 0.

    Raises:
        RecordingError: The file is missing, broken or holds no samples.
        EnvironmentRefused: The format needs the extra ``speech``, which is not installed.
    """
    path = Path(path)
    if path.suffix.lower() == ".wav":
        try:
            with wave.open(str(path), "rb") as file:
                rate, samples = file.getframerate(), file.getnframes()
        except (wave.Error, EOFError, OSError, RuntimeError, ValueError):  # no plain PCM, or broken: reading it tells
            rate, content = _decoded(path)
            samples = len(content)
    else:
        about = _from_soundfile("info", path)
        rate, samples = about.samplerate, about.frames
    _require_sound(path, rate, samples)
    return float(samples / rate)


def _require_sound(path: str | Path, rate: int, samples: int) -> None:
    if rate not in RATES:
        raise RecordingError(path, f"its header says {rate} samples a second")
    if samples <= 0:
        raise RecordingError(path, "holds no samples")


def _decoded(path: Path) -> tuple[int, Any]:
    """Rate and samples ``[T]`` or ``[T, channels]`` as the file has them."""
    if path.suffix.lower() == ".wav":
        from scipy.io import wavfile

        try:
            with warnings.catch_warnings():
                # Chunks that scipy does not know are none of ours; a file that ends too early is.
                warnings.simplefilter("ignore", wavfile.WavFileWarning)
                warnings.filterwarnings("error", message="Reached EOF", category=wavfile.WavFileWarning)
                rate, samples = wavfile.read(path)
        except (
            OSError,
            ValueError,
            EOFError,
            ArithmeticError,
            struct.error,
            wavfile.WavFileWarning,
            UnboundLocalError,
        ) as error:
            if "Unknown wave file format" not in str(error):
                raise RecordingError(path, _reason(path, error)) from error
        else:
            return int(rate), samples
    samples, rate = _from_soundfile("read", path, dtype="int16")
    return int(rate), samples


def _from_soundfile(function: str, path: Path, **options: str) -> Any:
    """The answer of soundfile's function of that name."""
    library = load_extra("soundfile", "speech", f"reading {path.suffix or path.name} files")
    try:
        return getattr(library, function)(str(path), **options)
    except (library.LibsndfileError, OSError, ValueError) as error:
        raise RecordingError(path, _reason(path, error)) from error


def _reason(path: Path, error: Exception) -> str:
    """What is wrong with a recording, in words of ours; those of the library stand behind them."""
    if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises for names that no file can have)
        return "there is no such file"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    words = " ".join(str(error).split()) or type(error).__name__
    if "Reached EOF" in words:
        return f"is cut short: its header promises more than there is ({words})"
    kind = path.suffix.lstrip(".").upper() or "sound"
    return f"is not a {kind} file that can be read ({words})"


def _as_floats(samples: Any) -> Any:
    """Samples from -1 to 1, float64; unsigned ones lie around the middle of their range."""
    import numpy as np

    if np.issubdtype(samples.dtype, np.floating):
        return samples.astype(np.float64)
    limits = np.iinfo(samples.dtype)
    half = (int(limits.max) - int(limits.min) + 1) / 2
    return (samples.astype(np.float64) - (half if limits.min == 0 else 0.0)) / half
