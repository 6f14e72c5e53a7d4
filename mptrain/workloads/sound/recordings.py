"""Recordings and their transcripts: readers of audio files, spoken prompts of Asterisk, and alphabets.

scipy reads WAV files; FLAC, OGG and compressed WAV files need the extra ``speech``.

Debian has the prompts of Asterisk in the packages ``asterisk-core-sounds-en-wav`` and ``asterisk-core-sounds-en``.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import unicodedata
import warnings
import wave
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.system.errors import ConfigError, DataError
from mptrain.system.files import expanded, open_to_read, read_bytes
from mptrain.system.machine import load_extra
from mptrain.workloads.base.data_files import Faults

#: English lower-case letters; with the blank these are the 29 outputs of Deep Speech 2.
ENGLISH = "abcdefghijklmnopqrstuvwxyz' "

#: Label of the blank.
BLANK = "<blank>"

_DIGITS = dict(
    zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
)


@dataclass(frozen=True)
class Alphabet:
    """Letters of transcripts, numbered from 1 in the given order; number 0 is the CTC blank, or "no letter".

    ``len()`` counts the blank too, so it is the number of outputs of a network. ConfigError is raised if there is no
    letter, or one occurs twice.
    """

    letters: str = ENGLISH

    def __post_init__(self) -> None:
        if not self.letters or len(set(self.letters)) < len(self.letters):
            what = "has a letter twice" if self.letters else "is empty"
            raise ConfigError(f"dataset.alphabet={self.letters!r} {what}", f"the English one is {ENGLISH!r}")

    def __len__(self) -> int:
        return len(self.letters) + 1

    def spelled(self, text: str) -> str:
        """Normalise a transcript to the letters of the alphabet: ``Press 1, now!`` becomes ``press one now``.

        Capitals become lower case if the alphabet has no capitals. Typographic apostrophes become plain. Single
        digits become English words if the alphabet has no digits. Runs of punctuation and white space become one
        space. Characters of the alphabet stay as they are; letters and symbols outside it stay too, and `problem`
        reports them.
        """
        known = set(self.letters)
        if not any(letter.isupper() for letter in self.letters):
            text = text.lower()
        words = text.replace("\u2019", "'").split()
        spoken = [_DIGITS.get(word.strip(".,;:!?"), word) if not known & set("0123456789") else word for word in words]
        plain = (
            letter if letter in known or unicodedata.category(letter)[0] not in "PZ" else " "
            for letter in " ".join(spoken)
        )
        return " ".join("".join(plain).split())

    def problem(self, text: str) -> str:
        """Return a message with the letters of a `spelled` transcript that the alphabet lacks; empty for none."""
        foreign = sorted(set(text) - set(self.letters))
        return f"its transcript has {' '.join(map(repr, foreign))}, not in dataset.alphabet" if foreign else ""

    def numbers(self, text: str) -> list[int]:
        """Return the number of each letter of a `spelled` transcript, or raise KeyError if the alphabet lacks one."""
        places = {letter: number for number, letter in enumerate(self.letters, start=1)}
        return [places[letter] for letter in text]

    def known_numbers(self, text: str) -> tuple[int, ...]:
        """Normalise any text with `spelled` and return its letter numbers; letters not in the alphabet are left out."""
        return tuple(self.numbers("".join(letter for letter in self.spelled(text) if letter in self.letters)))

    def text(self, numbers: Sequence[int]) -> str:
        """Return the transcript that letter numbers spell; blanks (0) are left out, and repeated letters stay."""
        return "".join(self.letters[number - 1] for number in numbers if number > 0)

    def labels(self) -> list[str]:
        """Return the label of each number: `BLANK` for 0, then the letters."""
        return [BLANK, *self.letters]


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


#: Debian's locations of the recordings (8 kHz, 16 bits, one channel) and of the list of transcripts.
SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
TRANSCRIPTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")

#: Sample rate of the recordings in hertz.
RATE = 8000

_HINT = (
    "on Debian: apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en; or set dataset.sounds=FOLDER and "
    "dataset.transcripts=FILE"
)

#: Remarks about a recording that are not spoken: ``[ascending tones]``, ``(1 second of silence)``, ``<beep>``.
_REMARK = re.compile(r"\[[^\]]*\]|\([^)]*\)|<[^>]*>")


@dataclass(frozen=True, kw_only=True)
class AsteriskFiles:
    """Options of the data sets of Asterisk's prompts: the folder of the recordings, and the list of transcripts."""

    sounds: Path = SOUNDS
    transcripts: Path = TRANSCRIPTS

    def prompts(self) -> list[tuple[str, Path, str]]:
        """Find the prompts as `asterisk_prompts` does."""
        return asterisk_prompts(expanded(self.sounds), expanded(self.transcripts))


def asterisk_prompts(sounds: Path = SOUNDS, transcripts: Path = TRANSCRIPTS) -> list[tuple[str, Path, str]]:
    """Find the Asterisk prompts that contain speech, as name, file and words, sorted by name; no recording is read.

    The list of transcripts, plain or compressed with gzip, has a line ``name: words`` for each prompt, and comments
    after semicolons. A name with a slash refers to a subfolder. Remarks in brackets are removed; a prompt with nothing
    else, such as a beep, silence or screaming monkeys, has no speech. Listed prompts without a recording are skipped:
    the list has one. DataError is raised if the list or the recordings are missing, or the list cannot be read.
    """
    for source in (transcripts, sounds):
        if not source.exists():
            raise DataError(f"Asterisk prompts not found: looked for {source}", _HINT)
    try:
        content = read_bytes(transcripts)
        text = (gzip.decompress(content) if transcripts.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{transcripts} cannot be read: {error}", _HINT) from error
    prompts = []
    for line in text.splitlines():
        name, colon, words = line.partition(":")
        name, words = name.strip(), " ".join(_REMARK.sub(" ", words).split())
        path = sounds / f"{name}.wav"
        if colon and words and not name.startswith(";") and path.is_file():
            prompts.append((name, path, words))
    if not prompts:
        raise DataError(f"no recording of {transcripts} is in {sounds}", _HINT)
    return sorted(prompts)


def read_prompts(prompts: Iterable[tuple[str, Path, str]], faults: Faults) -> list[tuple[str, Path, str, Tensor]]:
    """Return name, file, words and samples, int16 ``[T]`` at 8 kHz, of Asterisk prompts.

    Those that cannot be read are left out and recorded, or raise DataError if ``faults.on_error`` is ``stop``.
    """
    read = []
    for name, path, words in prompts:
        try:
            read.append((name, path, words, read_recording(path, RATE)))
        except RecordingError as error:
            faults.report({str(path): error.reason})
    return read
