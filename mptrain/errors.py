"""The exception tree: every failure that a user can meet, and the exit code it ends the process with.

    MptrainError (1)
    ├── UsageError (2)          the command line is wrong: unknown command, malformed override
    ├── ConfigError (2)         the configuration is wrong; carries *all* problems found
    │   └── FirstBatchError (2) model and task do not get through their first batch
    ├── EnvironmentRefused (3)  this machine cannot do what was asked for
    ├── NumericsError (4)       training cannot go on: only overflows, a diverged loss
    ├── DataError (6)           data missing, damaged or inconsistent with the model
    ├── StorageError (6)        run directory, records or disk
    │   ├── CheckpointError (6) no usable checkpoint
    │   └── OlderLayout (6)     an older mptrain wrote it, and this one does not read that
    └── Preempted (75 / 130)    a signal, or a lost rank, ended the run; it can go on

Messages are written for the person at the terminal: ``str(error)`` says what and where, ``hint`` says what to do.
Nothing here imports anything heavier than the standard library.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mptrain import __version__

EXIT_OK = 0
EXIT_BUG = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_NUMERICS = 4
EXIT_EXPECTATION = 5
EXIT_DATA = 6
EXIT_SWEEP = 7
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class MptrainError(Exception):
    """Base of all errors that end a command with a message instead of a traceback.

    Args:
        message: What went wrong and where, one sentence, no trailing full stop.
        hint: What the user can do about it; empty when there is nothing to say.
    """

    exit_code: ClassVar[int] = EXIT_BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(MptrainError):
    """The command line itself is wrong."""

    exit_code = EXIT_CONFIG


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration: ``what`` and where, and a ``hint`` how to mend it.

    Attributes:
        what: What is wrong, and where.
        hint: What the user can do about it; empty when there is nothing to say.
        key: The dotted key whose value does not fit; empty where the problem is another one.
    """

    what: str
    hint: str = ""
    key: str = field(default="", compare=False)


class ConfigError(MptrainError):
    """The configuration is wrong. All problems found are reported together.

    Args:
        problems: At least one problem; a plain string stands for a problem without a hint.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, problems: Sequence[Problem] | Problem | str, hint: str = "") -> None:
        if isinstance(problems, str):
            problems = [Problem(problems, hint)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.what for problem in self.problems), self.problems[0].hint)


class FirstBatchError(ConfigError):
    """Model and task do not get through their first batch; the exception that they raised is its cause."""


class EnvironmentRefused(MptrainError):
    """The device, the installation or the operating system cannot do what was asked for."""

    exit_code = EXIT_ENVIRONMENT


class NumericsError(MptrainError):
    """Training cannot go on: every recent step overflowed, or the loss diverged."""

    exit_code = EXIT_NUMERICS


class DataError(MptrainError):
    """Data is missing, damaged, or does not fit the model."""

    exit_code = EXIT_DATA


class StorageError(MptrainError):
    """The run directory cannot be made, written, locked or understood."""

    exit_code = EXIT_DATA


class CheckpointError(StorageError):
    """No checkpoint of a run can be used."""


class OlderLayout(StorageError):
    """Folders that an older mptrain wrote, which this one does not read.

    Args:
        writers: Each folder with the version that wrote it.
    """

    def __init__(self, writers: Mapping[Path, str]) -> None:
        self.writers = writers
        shown = list(map(str, writers))
        shown[4:] = [f"{len(shown) - 4} more"] if shown[4:] else []
        versions = " and ".join(sorted(set(writers.values())))
        were, them = ("was", "it") if len(shown) == 1 else ("were", "them")
        places = " and ".join([*filter(None, [", ".join(shown[:-1])]), shown[-1]])
        super().__init__(
            f"{places} {were} written by mptrain {versions}, which mptrain {__version__} cannot read",
            f"read {them} with mptrain {versions}, or train again in another folder",
        )


class Preempted(MptrainError):
    """A signal asked the run to stop, or another rank of it has gone; it can go on.

    Args:
        message: Which signal, at which step.
        hint: The command that resumes the run.
        exit_code: 130 after Ctrl-C, 75 (run me again) after SIGTERM and SIGUSR1.
        saved: Whether it finished its step and saved itself; else the steps after the last checkpoint are repeated.
        asked: Whether a signal asked for the end, which then is no error; else another rank was lost.
    """

    def __init__(self, message: str, hint: str, exit_code: int, *, saved: bool = True, asked: bool = True) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code  # type: ignore[misc]
        self.saved = saved
        self.asked = asked


#: Messages of torch, C++ and the loader of libraries where memory runs out; not all of them come with a MemoryError.
_NO_MEMORY = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "Cannot allocate memory",
    "failed to map segment",
    "not enough memory",
    "can't start new thread",
)


def out_of_memory(error: BaseException, doing: str = "") -> EnvironmentRefused | None:
    """Return what to tell the user about an exception that means no memory, of the device or the machine; None for any other.

    Args:
        error: The exception.
        doing: What needed the memory, as in "building the model"; may be empty.
    """
    said, where = str(error), f" while {doing}" if doing else ""
    lines = said.splitlines() or [type(error).__name__]
    smaller = "use a smaller train.batch_size, the same one with train.accumulate=2, or a smaller model"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        return EnvironmentRefused(f"the device is out of memory{where}: {lines[0]}", smaller)
    by_words = isinstance(error, (RuntimeError, ImportError)) and any(words in said for words in _NO_MEMORY)
    by_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or by_words or by_number):
        return None
    asked = re.search(r"allocate (\d+) bytes", said)
    what = f"{int(asked[1]):,} bytes cannot be had" if asked else lines[0]
    limit = _address_space()
    if limit is None:
        return EnvironmentRefused(f"this machine is out of memory{where}: {what}", smaller)
    return EnvironmentRefused(
        f"out of memory{where}: {what}; this process is limited to {limit / 2**30:.3g} GiB of addresses",
        f"raise the limit (ulimit -v), or {smaller}",
    )


def _address_space() -> int | None:
    """Bytes of addresses that this process may have; None where that is not limited."""
    try:
        import resource  # not on every system
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return the candidate closest to a mistyped word, or an empty string when none is close."""
    names = near_names(word, candidates)
    return max(names, key=lambda name: difflib.SequenceMatcher(None, word, name).ratio(), default="")


def near_names(word: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates that a word may stand for, in their order, by the first of these rules that finds any.

    1. Equal but for capitals and separators: ``AdamW`` for ``adamw``.
    2. The same parts in another order: ``bf16_amp`` for ``amp_bf16``.
    3. Each part of the word is, or begins, a part of the name: ``fp16`` for ``fp16_static`` and ``fp16_dynamic``.
    4. The closest spelling, one name.
    """
    names = list(candidates)
    asked = _parts(word)
    if not asked:
        return []
    parts = {name: _parts(name) for name in names}
    rules = [
        [name for name in names if "".join(parts[name]) == "".join(asked)],
        [name for name in names if sorted(parts[name]) == sorted(asked)],
    ]
    if len("".join(asked)) > 1:
        rules.append(
            [name for name in names if all(any(own.startswith(part) for own in parts[name]) for part in asked)]
        )
    return next(filter(None, rules), difflib.get_close_matches(word, names, n=1, cutoff=0.6))


def either(words: Sequence[str]) -> str:
    """Return ``a, b or c``; of more than seven words the first six, and how many more there are."""
    shown = [*words[:6], f"one of {len(words) - 6} more"] if words[7:] else words
    return " or ".join([*filter(None, [", ".join(shown[:-1])]), shown[-1]])


def _parts(name: str) -> list[str]:
    """Return the words that a name is made of, in small letters."""
    return re.findall(r"[^\W_]+", name.lower())
