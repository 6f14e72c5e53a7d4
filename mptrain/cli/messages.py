"""What goes to stderr: errors with their hints, warnings, bugs. Never a traceback unasked."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mptrain.errors import EXIT_BUG, EXIT_ENVIRONMENT, ConfigError, MptrainError, Preempted, StorageError
from mptrain.masking import masked

if TYPE_CHECKING:
    from rich.console import Console

#: Seconds between two signs of life on a terminal.
_TICK = 0.5

#: Characters of one line; a word of the user's may be of any length.
LONGEST = 1000

_COLOURS = {"error": "31", "stopped": "33", "warning": "33", "hint": "36"}


def report(error: BaseException) -> int:
    """Prints what went wrong, one ``error:`` line for each problem and a ``hint:`` line where there is one.

    A run that a signal has stopped in order has a ``stopped:`` line, since nothing went wrong.

    Returns:
        The exit code it calls for.
    """
    if wants_traceback():
        traceback.print_exception(error)
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _say("error", problem.what)
            if problem.hint:
                _say("hint", problem.hint)
        return error.exit_code
    if isinstance(error, MptrainError):
        stopped = isinstance(error, Preempted) and error.asked
        _say("stopped" if stopped else "error", str(error))
        if error.hint:
            _say("hint", error.hint)
        return error.exit_code
    if _broken_installation(error):
        _say("error", f"the installation is broken: {error}")
        _say("hint", "mptrain doctor says what is missing and how to mend it")
        return EXIT_ENVIRONMENT
    _say("error", f"this is a bug in mptrain: {type(error).__name__}: {error}")
    if not wants_traceback():
        _say("hint", "MPTRAIN_TRACEBACK=1 or --traceback shows where; please report it")
    return EXIT_BUG


def _broken_installation(error: BaseException) -> bool:
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "mptrain").startswith("mptrain")
    return "torchvision::nms does not exist" in str(error)


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
    """Whether the user asked to see tracebacks."""
    return os.environ.get("MPTRAIN_TRACEBACK", "") not in ("", "0")


def colourful(stream: object) -> bool:
    """Whether a stream shows colours: a terminal, neither NO_COLOR nor TERM=dumb."""
    isatty = getattr(stream, "isatty", lambda: False)
    return bool(isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def drawing_console(width: int | None) -> Console:
    """Return a console for drawing what `say` prints: with colours and bold text where standard output shows them, else plain.

    Args:
        width: Characters of a line; None for those of the terminal.
    """
    from rich.console import Console

    styled = colourful(sys.stdout)
    return Console(width=width, no_color=not styled, force_terminal=styled)


def printable(text: str) -> str:
    """One line without control characters and lone surrogates, whatever the user typed."""
    clean = harmless(" ".join(text.split()))
    return clean if len(clean) <= LONGEST else clean[:LONGEST] + "..."


#: Beginnings and ends of the colours and of the bold and dim text that are ours; no other sequence reaches a terminal.
_STYLES = re.compile(r"(\x1b\[(?:[0-3]|[39][0-7])(?:;(?:[0-3]|[39][0-7]))*m)")


def say(text: str, *, styled: bool = False) -> None:
    """Print lines in which nothing controls a terminal, and no secret of the environment stands.

    Args:
        text: Lines; words out of files may stand in it.
        styled: Where colours are shown, it may have such sequences as ours: whoever has others in a file gives at most colours.

    Raises:
        StorageError: Standard output takes no more.
    """
    styled = styled and colourful(sys.stdout)
    lines = []
    for line in text.split("\n"):
        parts = _STYLES.split(line) if styled else [line]
        lines.append("".join(part if place % 2 else harmless(part) for place, part in enumerate(parts)))
    with writing():
        print("\n".join(lines), flush=True)


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


def harmless(text: str) -> str:
    """Text without control characters and lone surrogates, so that nothing in it controls a terminal, and without secrets."""
    text = masked(text)
    if text.isprintable():
        return text
    clean = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return clean.encode("utf-8", "backslashreplace").decode()


def _say(kind: str, text: str) -> None:
    label = f"\x1b[{_COLOURS[kind]}m{kind}:\x1b[0m" if colourful(sys.stderr) else f"{kind}:"
    text = printable(text)
    if sys.stderr.isatty():
        text = _wrapped(text, len(kind) + 2, shutil.get_terminal_size().columns)
    with contextlib.suppress(OSError):  # nobody can be told that nobody can be told
        print(label, text, file=sys.stderr)


def _wrapped(text: str, left: int, width: int) -> str:
    """Return text in lines that leave room for a label in front of the first, and the same room before the others.

    Neither a word nor a command is broken over two lines, so that a command can be copied.
    """
    pieces: list[str] = []
    in_command = False
    for word in text.split(" "):
        if in_command:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
        in_command = (in_command or word in ("mptrain", "torchrun")) and not word.endswith((";", ",", "?", ":", ")"))
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if left + len(lines[-1]) + 1 + len(piece) > width:
            lines.append(piece)
        else:
            lines[-1] += f" {piece}"
    return f"\n{' ' * left}".join(lines)
