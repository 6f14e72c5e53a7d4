"""All that a command prints: lines and rows on standard output, errors with their hints and warnings on standard error.

Nothing in it controls a terminal, no secret stands in it, and a traceback is printed only where the user asks for one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

from mptrain.errors import EXIT_BUG, EXIT_ENVIRONMENT, ConfigError, MptrainError, Preempted, Problem, StorageError
from mptrain.masking import masked

#: Seconds between two signs of life on a terminal.
_TICK = 0.5

#: Characters of one line; a word of the user's may be of any length.
LONGEST = 1000

#: Characters of a line of text at most, and at least.
WIDTH, NARROWEST = 110, 60

_COLOURS = {"error": "31", "stopped": "33", "warning": "33", "hint": "36"}


def report(error: BaseException) -> int:
    """Print what went wrong, one ``error:`` line for each problem and a ``hint:`` line where there is one.

    A run that a signal has stopped in order has a ``stopped:`` line, since nothing went wrong.

    Returns:
        The exit code it calls for.
    """
    if wants_traceback():
        traceback.print_exception(error)
    kind, code = "error", EXIT_BUG
    if isinstance(error, MptrainError):
        code = error.exit_code
        problems = error.problems if isinstance(error, ConfigError) else (Problem(str(error), error.hint),)
        if isinstance(error, Preempted) and error.asked:
            kind = "stopped"
    elif (
        isinstance(error, ModuleNotFoundError) and not (error.name or "mptrain").startswith("mptrain")
    ) or "torchvision::nms does not exist" in str(error):
        code = EXIT_ENVIRONMENT
        hint = "mptrain doctor says what is missing and how to mend it"
        problems = (Problem(f"the installation is broken: {error}", hint),)
    else:
        hint = "" if wants_traceback() else "MPTRAIN_TRACEBACK=1 or --traceback shows where; please report it"
        problems = (Problem(f"this is a bug in mptrain: {type(error).__name__}: {error}", hint),)
    for problem in problems:
        _say(kind, problem.what)
        if problem.hint:
            _say("hint", problem.hint)
    return code


_warned: set[str] | None = None


@contextlib.contextmanager
def each_warning_once() -> Iterator[None]:
    """Inside, a warning that was printed already is not printed again."""
    global _warned
    _warned = set()
    try:
        yield
    finally:
        _warned = None


def warn(sentences: Iterable[str]) -> None:
    """Prints warnings, each once."""
    for sentence in dict.fromkeys(sentences):
        if _warned is not None:
            if sentence in _warned:
                continue
            _warned.add(sentence)
        _say("warning", sentence)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turns a standard output that takes no more into an error for the user; one whose reader has gone stays what it is.

    Raises:
        StorageError: The disk is full, or the stream is broken otherwise.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(*unwritable(error)) from error


def unwritable(error: OSError) -> tuple[str, str]:
    """Message and hint about a standard output that takes no more."""
    return f"standard output: {(error.strerror or str(error)).lower()}", "send the output somewhere else"


def wants_traceback() -> bool:
    """Return whether the user asked to see tracebacks."""
    return os.environ.get("MPTRAIN_TRACEBACK", "") not in ("", "0")


def supports_colour(stream: object) -> bool:
    """Return whether a stream shows colours: a terminal, neither NO_COLOR nor TERM=dumb."""
    isatty = getattr(stream, "isatty", lambda: False)
    return bool(isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """One line without control characters and lone surrogates, whatever the user typed."""
    clean = without_control_characters(" ".join(text.split()))
    return clean if len(clean) <= LONGEST else clean[:LONGEST] + "..."


#: Beginnings and ends of the colours and of the bold and dim text that are ours; no other sequence reaches a terminal.
_STYLES = re.compile(r"(\x1b\[(?:[0-3]|[39][0-7])(?:;(?:[0-3]|[39][0-7]))*m)")


def say(text: str, *, styled: bool = False) -> None:
    """Print lines in which nothing controls a terminal, and no secret of the environment stands.

    Args:
        text: Lines; words out of files may stand in it.
        styled: Where colours are shown, it may have such sequences as ours: others, out of a file, give at most colours.

    Raises:
        StorageError: Standard output takes no more.
    """
    styled = styled and supports_colour(sys.stdout)
    lines = []
    for line in text.split("\n"):
        parts = _STYLES.split(line) if styled else [line]
        lines.append(
            "".join(part if place % 2 else without_control_characters(part) for place, part in enumerate(parts))
        )
    with writing():
        print("\n".join(lines), flush=True)


class KeyValues:
    """Printer of ``key=value`` lines; once the reader of the stream has gone, it prints nothing more.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._gone = False

    def say(self, fields: Mapping[str, object]) -> None:
        """Print one line."""
        if self._gone:
            return
        try:
            print(
                without_control_characters(" ".join(f"{key}={value}" for key, value in fields.items())),
                file=self._stream,
                flush=True,
            )
        except OSError:
            self._gone = True  # what is trained goes on without a reader


def line_width(stream: IO[str]) -> int:
    """Return the characters of a line of text: as wide as a terminal within limits, the same everywhere else."""
    if not stream.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def wrapped(text: str, head: str = "", width: int | None = None, indent: str = "  ") -> list[str]:
    """Return text in lines of a terminal, without breaking words, so that paths and commands stay whole.

    Args:
        text: It may come from the user or a file.
        head: Stands before it.
        width: Characters of a line; None for those of standard output.
        indent: Before every line but the first.
    """
    return textwrap.wrap(
        f"{head}{printable(text)}",
        width or line_width(sys.stdout),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_rows(title: str, rows: Sequence[tuple[str, str]], stream: IO[str] | None = None) -> None:
    """Print a title and its rows; a row without text is left out. Control characters only on a terminal.

    Commands are not wrapped, so that they can be copied.

    Args:
        title: Of the whole.
        rows: Names and texts.
        stream: Standard output if not given.

    Raises:
        StorageError: The stream takes no more.
    """
    stream = stream or sys.stdout
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if supports_colour(stream) else ("", "", "")
    rows = [
        (without_control_characters(name), without_control_characters(re.sub(r"\s", " ", text)))
        for name, text in rows
        if text.strip()
    ]
    left = max((len(name) for name, _ in rows), default=0) + 2
    lines = [f"{bold}{without_control_characters(title)}{plain}"]
    for name, text in rows:
        width = len(text) if text.startswith("mptrain ") else max(line_width(stream) - left - 2, NARROWEST // 3)
        first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        lines.append(f"  {dim}{name.ljust(left)}{plain}{first}")
        lines += [" " * (left + 2) + line for line in more]
    with writing():
        print("\n".join(lines), file=stream, flush=True)


@contextlib.contextmanager
def checking(points: int) -> Iterator[None]:
    """Tell a terminal that points are being checked, and for how long: imports take seconds, and their data are loaded for it."""
    if not points or not sys.stdout.isatty():
        yield
        return
    line = f"checking {points:,} point{'s' if points > 1 else ''} ..."
    over, began = threading.Event(), time.monotonic()

    def tick() -> None:
        while not over.wait(_TICK):
            _print(f"\r{line} {time.monotonic() - began:.0f} s")

    ticking = threading.Thread(target=tick, daemon=True)
    _print(line)
    if os.environ.get("TERM") != "dumb":
        ticking.start()
    try:
        yield
    finally:  # nothing is drawn between what is said from here on
        over.set()
        if ticking.ident is not None:
            ticking.join()
        _print("\n")


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that has gone; who says more will hear of it
        print(text, end="", flush=True)


def without_control_characters(text: str) -> str:
    """Text without control characters and lone surrogates, so that nothing in it controls a terminal, and without secrets."""
    text = masked(text)
    if text.isprintable():
        return text
    clean = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return clean.encode("utf-8", "backslashreplace").decode()


def _say(kind: str, text: str) -> None:
    label = f"\x1b[{_COLOURS[kind]}m{kind}:\x1b[0m" if supports_colour(sys.stderr) else f"{kind}:"
    text = printable(text)
    if sys.stderr.isatty():
        text = _wrapped(text, len(kind) + 2, shutil.get_terminal_size().columns)
    with contextlib.suppress(OSError):  # nobody can be told that nobody can be told
        print(label, text, file=sys.stderr)


#: A command in a sentence.
_COMMAND = re.compile(r"(?<!\S)(?:mptrain|torchrun)(?!\S).*?(?:[;,?:)](?!\S)|$)")


def _wrapped(text: str, left: int, width: int) -> str:
    """Return text in lines that leave room for a label in front of the first, and the same room before the others.

    Neither a word nor a command is broken over two lines, so that a command can be copied.
    """
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, max(width - left, 1), break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * left}".join(lines).replace("\0", " ")
