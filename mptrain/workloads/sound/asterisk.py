"""The spoken prompts of the Asterisk telephone exchange: some 550 recordings of one speaker with what she says.

Debian has them in the packages ``asterisk-core-sounds-en-wav`` and ``asterisk-core-sounds-en``.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.sound.audio_files import RecordingError, read_recording

#: Where Debian's packages put the recordings (8 kHz, 16 bits, one channel) and the list of what is said.
SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
TRANSCRIPTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")

#: Samples a second of the recordings, in hertz.
RATE = 8000

_HINT = (
    "on Debian: apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en; or set dataset.sounds=FOLDER and "
    "dataset.transcripts=FILE"
)

#: Words about a recording rather than of it: ``[ascending tones]``, ``(1 second of silence)``, ``<beep>``.
_REMARK = re.compile(r"\[[^\]]*\]|\([^)]*\)|<[^>]*>")


def asterisk_prompts(sounds: Path = SOUNDS, transcripts: Path = TRANSCRIPTS) -> list[tuple[str, Path, str]]:
    """The prompts in which something is said, sorted by name.

    The list of transcripts has a line ``name: words`` for each prompt, and comments behind semicolons. Remarks in
    brackets are left out; a prompt with nothing else, such as a beep, silence or screaming monkeys, is no speech.
    Prompts that are listed without being there are passed over: the list has one.

    Args:
        sounds: Folder of WAV files; a name with a slash is one in a folder of it.
        transcripts: The list, plain or compressed by gzip.

    Returns:
        Name, file and words of each, the words as they are written: ``Please press 1 now.``

    Raises:
        DataError: The list or the recordings are not there, or the list cannot be read.
    """
    for place in (transcripts, sounds):
        if not place.exists():
            raise DataError(f"the Asterisk prompts were not found: looked for {place}", _HINT)
    try:
        content = transcripts.read_bytes()
        text = (gzip.decompress(content) if transcripts.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{transcripts} cannot be read: {error}", _HINT) from error
    prompts = []
    for line in text.splitlines():
        name, colon, words = line.partition(":")
        name, words = name.strip(), " ".join(_REMARK.sub(" ", words).split())
        path = sounds / f"{name}.wav"
        if colon and words and not name.startswith(";") and path.is_file():
            prompts.append((name, path, words))
    if not prompts:
        raise DataError(f"no recording of {transcripts} lies in {sounds}", _HINT)
    return sorted(prompts)


def read_prompts(prompts: Iterable[tuple[str, Path, str]], faults: Faults) -> list[tuple[str, Path, str, Tensor]]:
    """The prompts with their samples, int16 ``[T]``; ``faults`` takes those that cannot be read."""
    read = []
    for name, path, words in prompts:
        try:
            read.append((name, path, words, read_recording(path, RATE)))
        except RecordingError as error:
            faults.report({str(path): error.reason})
    return read
