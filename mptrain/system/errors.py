"""Exceptions of mptrain, with the exit code of each.

    MptrainError (1)
    ├── UsageError (2)          the command line is wrong: unknown command, malformed override
    ├── ConfigError (2)         the configuration is wrong; carries *all* problems found
    │   └── FirstBatchError (2) model or task fails on the first batch
    ├── EnvironmentRefused (3)  this machine does not support the request
    ├── NumericsError (4)       training cannot continue: only overflows, or a diverged loss
    ├── DataError (6)           data missing, damaged or inconsistent with the model
    │   └── UnusableSample (6)  a file or sample that training cannot use
    ├── StorageError (6)        run directory, records or disk
    │   ├── CheckpointError (6) no usable checkpoint
    │   └── OtherVersion (6)    written by another version of mptrain in a format that this one does not read
    └── Preempted (75 / 130)    a signal or a lost rank stopped the run, which can be resumed

Messages are for the user at the terminal: ``str(error)`` says what and where, ``hint`` says what to do. This module
imports only the standard library.
"""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

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
    """Base class of all errors that are reported with a message instead of a traceback.

    Args:
        message: What went wrong and where: one sentence without a full stop.
        hint: What the user can do; may be empty.

    Attributes:
        run: The run that failed, of `mptrain.train` and `Run.resume`; None if there is none.
    """

    run: Any = None

    exit_code: ClassVar[int] = EXIT_BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """Lines that a traceback shows below the message (from Python 3.11 on): the hints, then notes of others.

        A property, as a hint may change after the error was made. It returns the list to which ``add_note`` adds.
        """
        notes: list[str] = vars(self).setdefault("notes", [])
        hints = [*(problem.hint for problem in getattr(self, "problems", ())), self.hint]
        hints = [hint for hint in dict.fromkeys(hints) if hint and hint not in self.hint[:-1]]
        notes[:] = [*(f"hint: {hint}" for hint in hints), *(note for note in notes if not note.startswith("hint: "))]
        return notes


class UsageError(MptrainError):
    """Error in the command line: an unknown command, or a malformed override."""

    exit_code = EXIT_CONFIG


@dataclass(frozen=True)
class Problem:
    """One invalid thing in a configuration, with a hint how to fix it; a `ConfigError` carries all that were found.

    Attributes:
        what: Description of the error and its place, for the user.
        hint: Suggestion for the user; may be empty.
        key: The dotted key whose value is invalid; empty if the problem concerns no single value.
    """

    what: str
    hint: str = ""
    key: str = field(default="", compare=False)


class ConfigError(MptrainError):
    """Error in the configuration of a run; carries all problems that were found, not only the first.

    A string is the ``what`` of a single problem, and ``hint`` its hint.
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
    """Error raised if the model or the task fails on the first batch; their exception is the ``__cause__``."""


class EnvironmentRefused(MptrainError):
    """Error raised if the device, the installation or the operating system does not support what the user requested."""

    exit_code = EXIT_ENVIRONMENT


class NumericsError(MptrainError):
    """Error raised if training cannot continue: every recent step overflowed, or the loss diverged."""

    exit_code = EXIT_NUMERICS


class DataError(MptrainError):
    """Error in the training or evaluation data: missing, damaged, or inconsistent with the model."""

    exit_code = EXIT_DATA


class UnusableSample(DataError):
    """Error for a file or sample that training cannot use; ``mptrain doctor`` lists all such files of a data set."""


class StorageError(MptrainError):
    """Error of the run directory: it cannot be created, written, locked or parsed."""

    exit_code = EXIT_DATA


class CheckpointError(StorageError):
    """Error raised if a run has no checkpoint that can be loaded."""


class OtherVersion(StorageError):
    """Error for a run or sweep that another version of mptrain wrote in a format that this one does not read."""


class Preempted(MptrainError):
    """Error raised if a signal or the loss of another rank stops a run; the run can be resumed.

    Args:
        message: The cause (such as the signal) and the step, for the user.
        hint: The command that resumes the run.
        exit_code: 130 after Ctrl-C, 75 (run again) after SIGTERM and SIGUSR1.
        saved: Whether the run has finished its step and saved a checkpoint. Otherwise the steps after the last
            checkpoint are repeated.
        asked: Whether a signal requested the stop, which is not an error. Otherwise another rank was lost.
    """

    def __init__(self, message: str, hint: str, exit_code: int, *, saved: bool = True, asked: bool = True) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code  # type: ignore[misc]
        self.saved = saved
        self.asked = asked


#: Out-of-memory messages of torch, C++ and the dynamic loader, which do not always raise a MemoryError.
_NO_MEMORY = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "Cannot allocate memory",
    "failed to map segment",
    "not enough memory",
    "can't start new thread",
)


def out_of_memory(error: BaseException, doing: str = "") -> EnvironmentRefused | None:
    """Return the error to raise for an out-of-memory exception of the device or the host; None for any other.

    ``doing`` is the activity that needed the memory, such as "building the model"; may be empty.
    """
    message, where = str(error), f" while {doing}" if doing else ""
    lines = message.splitlines() or [type(error).__name__]
    smaller = "use a smaller train.batch_size, the same one with train.accumulate=2, or a smaller model"
    if type(error).__name__ == "OutOfMemoryError":  # by name, to avoid importing torch
        return EnvironmentRefused(f"the device is out of memory{where}: {lines[0]}", smaller)
    by_words = isinstance(error, (RuntimeError, ImportError)) and any(words in message for words in _NO_MEMORY)
    by_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or by_words or by_number):
        return None
    asked = re.search(r"allocate (\d+) bytes", message)
    what = f"cannot allocate {int(asked[1]):,} bytes" if asked else lines[0]
    limit = _address_space()
    if limit is None:
        return EnvironmentRefused(f"this machine is out of memory{where}: {what}", smaller)
    return EnvironmentRefused(
        f"out of memory{where}: {what}; this process is limited to {limit / 2**30:.3g} GiB of address space",
        f"raise the limit (ulimit -v), or {smaller}",
    )


def kernel_refusal(error: BaseException) -> MptrainError | None:
    """Return the error to raise for what a check in torch's kernels says; None for any other exception.

    Covered are an index out of range on a CUDA device and an operator that ``train.deterministic`` forbids.
    """
    message = str(error) if isinstance(error, RuntimeError) else ""
    if "device-side assert" in message:
        return DataError(
            "a check in a kernel of the device failed (device-side assert): usually an index is out of range, such "
            "as a label beyond the number of classes or a token beyond the vocabulary, or a probability is NaN",
            "device=cpu names the operator, and so does CUDA_LAUNCH_BLOCKING=1 with --traceback; mptrain doctor "
            "dataset=... checks the data",
        )
    if match := re.match(r"(\S+) does not have a deterministic impl", message):
        return EnvironmentRefused(
            f"train.deterministic=true: {match[1]} of torch may give other bits each time on this device",
            "set train.deterministic=false, or use another operator; --traceback shows where it is called",
        )
    return None


#: Packages and modules that look at what other code computes; a shelf that does adds its own.
OBSERVERS = {"mptrain.engine.histograms", "mptrain.engine.module_trail", "mptrain.engine.observer", "mptrain.precision"}

#: First names of the packages that ``extensions.allow`` has permitted in this command.
user_packages: set[str] = set()


def error_in_user_code(
    error: BaseException, packages: Collection[str] = user_packages, more: str = ""
) -> ConfigError | None:
    """Return an error that blames a user's own package for an exception that was raised in it.

    It names the innermost line in one of ``packages``, given by first names; None if the traceback passes through none,
    or from there into code that observes it, which is not the user's. ``more`` is the end of its hint.
    """
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in packages:
            location = f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
        elif (
            module.startswith(tuple(OBSERVERS)) and frame.f_code.co_name != "__torch_dispatch__"
        ):  # which calls operators
            location = None
    if location is None:
        return None
    return ConfigError(
        f"{location}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
        "this code is allowed by extensions.allow; --traceback shows the full traceback, and a run "
        f"keeps it in its failure folder{more}",
    )


def _address_space() -> int | None:
    try:
        import resource  # not available on every system
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return the candidate closest in spelling to a mistyped word, or an empty string if none is close."""
    names = near_names(word, candidates)
    return max(names, key=lambda name: difflib.SequenceMatcher(None, word, name).ratio(), default="")


def suggest(word: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return the hint ``did you mean NAME?`` for a mistyped word, or another hint if no candidate is close."""
    near = did_you_mean(word, candidates)
    return f"did you mean {near}?" if near else otherwise


def near_names(word: str, candidates: Iterable[str], likeness: float = 0.6) -> list[str]:
    """Return the candidates that a mistyped word may mean, in their order, by the first of these rules with a match.

    1. Equal except for case and separators: ``AdamW`` for ``adamw``.
    2. The same parts in another order: ``bf16_amp`` for ``amp_bf16``.
    3. Each part of the word is a prefix of a part of the name: ``fp16`` for ``fp16_static`` and ``fp16_dynamic``.
    4. The closest spelling, one name; ``likeness`` from 0 to 1 is the least, that of `difflib.get_close_matches`.
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
    return next(filter(None, rules), difflib.get_close_matches(word, names, n=1, cutoff=likeness))


def either(words: Sequence[str]) -> str:
    """Join one or more words for a message as ``a, b or c``; of more than seven, six and ``one of N more``."""
    shown = [*words[:6], f"one of {len(words) - 6} more"] if words[7:] else words
    return " or ".join([*filter(None, [", ".join(shown[:-1])]), shown[-1]])


def instance(value: object) -> str:
    """Return the name of a value's type with its article, for a message: ``an int``, ``a list``."""
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeioAEIO')} {name}"


def _parts(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())
