"""Spoken prompts of the Asterisk telephone exchange: about 550 recordings of one speaker with transcripts.

Debian has them in the packages ``asterisk-core-sounds-en-wav`` and ``asterisk-core-sounds-en``.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mptrain.system.errors import DataError
from mptrain.system.files import expanded, read_bytes
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.sound.audio_files import RecordingError, read_recording

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
    for place in (transcripts, sounds):
        if not place.exists():
            raise DataError(f"Asterisk prompts not found: looked for {place}", _HINT)
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
