"""Output of all commands: lines and rows on standard output; errors, hints and warnings on standard error.

The output must not contain control characters or secrets. A traceback is printed only if the user asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

from mptrain.system.errors import (
    EXIT_BUG,
    EXIT_ENVIRONMENT,
    ConfigError,
    MptrainError,
    Preempted,
    Problem,
    StorageError,
)
from mptrain.system.masking import masked, masker

#: Maximum length of a message in characters; text from the user may be of any length.
LONGEST = 1000

#: Maximum and minimum width of a line of text in characters.
WIDTH, NARROWEST = 110, 60

#: Wraps text to lines, at blanks only.
wrap_words = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)

_COLOURS = {"error": "31", "stopped": "33", "warning": "33", "hint": "36"}


def report(error: BaseException) -> int:
    """Print an exception for the user: an ``error:`` line for each of its problems, and a ``hint:`` line if it has one.

    For a run that a signal stopped in an orderly way, the line starts with ``stopped:``.

    Returns:
        The exit code for the exception.
    """
    if wants_traceback():
        print(masked("".join(traceback.format_exception(error))), end="", file=sys.stderr)
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
        hint = "mptrain doctor shows what is missing and how to fix it"
        problems = (Problem(f"the installation is broken: {error}", hint),)
    else:
        hint = "" if wants_traceback() else "MPTRAIN_TRACEBACK=1 or --traceback shows the traceback for a bug report"
        problems = (Problem(f"this is a bug in mptrain: {type(error).__name__}: {error}", hint),)
    for problem in problems:
        _say(kind, problem.what)
        if problem.hint:
            _say("hint", problem.hint)
    return code


_warned: set[str] | None = None


@contextlib.contextmanager
def each_warning_once() -> Iterator[None]:
    """Let `warn` print each distinct warning only once within this context, for example in a sweep of many runs."""
    global _warned
    _warned = set()
    try:
        yield
    finally:
        _warned = None


def warn(sentences: Iterable[str]) -> None:
    """Print ``warning:`` lines on standard error, without duplicates."""
    for sentence in dict.fromkeys(sentences):
        if _warned is not None:
            if sentence in _warned:
                continue
            _warned.add(sentence)
        _say("warning", sentence)


_outlives_reader = False


def outlive_reader(outlives: bool) -> None:
    """Choose if a command continues without output once the reader of its output has gone (``mptrain ... | head``).

    Args:
        outlives: True for commands that train; the others end, since nobody reads their output.
    """
    global _outlives_reader
    _outlives_reader = outlives


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Convert errors of writing to standard output to `StorageError` within this context.

    Raises:
        BrokenPipeError: The reader of the output has gone, and the command does not continue without (see
            `outlive_reader`).
        StorageError: The disk is full, or the stream fails in another way.
    """
    try:
        yield
    except BrokenPipeError:
        if not _outlives_reader:
            raise
        discard_output()
    except OSError as error:
        raise StorageError(*unwritable(error)) from error


def unwritable(error: OSError) -> tuple[str, str]:
    """Return the message and the hint for the user if writing to standard output failed."""
    return f"standard output: {(error.strerror or str(error)).lower()}", "send the output somewhere else"


def discard_output() -> None:
    """Send the rest of standard output nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nothing to discard
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wants_traceback() -> bool:
    """Return whether the user asked for tracebacks of errors (``--traceback``, ``MPTRAIN_TRACEBACK=1``)."""
    return os.environ.get("MPTRAIN_TRACEBACK", "") not in ("", "0")


def supports_colour(stream: object) -> bool:
    """Return whether a stream is a terminal that shows colours, and neither NO_COLOR nor TERM=dumb is set."""
    isatty = getattr(stream, "isatty", lambda: False)
    return bool(isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str, mask: Callable[[str], str] = masked) -> str:
    """Return text from a user or file as one safe line: no control characters, lone surrogates or secrets.

    It is truncated to `LONGEST` characters. ``mask`` is as in `without_control_characters`.
    """
    clean = without_control_characters(" ".join(text.split()), mask)
    return clean if len(clean) <= LONGEST else clean[:LONGEST] + "..."


#: Escape sequences for colours, bold and dim text that mptrain uses; no other sequence reaches a terminal.
_STYLES = re.compile(r"(\x1b\[(?:[0-3]|[39][0-7])(?:;(?:[0-3]|[39][0-7]))*m)")


def say(text: str, *, styled: bool = False) -> None:
    """Print lines on standard output, without control characters and without secrets of the environment.

    Args:
        text: Lines to print; may contain text from files.
        styled: Whether to keep the escape sequences of `_STYLES` if colours are supported. Text from files can then at
            most change colours.

    Raises:
        StorageError: Standard output cannot be written.
    """
    styled, mask = styled and supports_colour(sys.stdout), masker()
    lines = []
    for line in text.split("\n"):
        parts = _STYLES.split(line) if styled else [line]
        lines.append(
            "".join(part if index % 2 else without_control_characters(part, mask) for index, part in enumerate(parts))
        )
    with writing():
        print("\n".join(lines), flush=True)


class KeyValues:
    """Printer of ``key=value`` lines, for output that is not a terminal; after a write error it prints nothing more.

    Args:
        stream: Output stream.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._gone = False

    def say(self, fields: Mapping[str, object]) -> None:
        """Print one line ``key=value key=value ...``, without control characters and secrets.

        Args:
            fields: Values by key, in order.
        """
        if self._gone:
            return
        try:
            print(
                without_control_characters(" ".join(f"{key}={value}" for key, value in fields.items())),
                file=self._stream,
                flush=True,
            )
        except OSError:
            self._gone = True  # training continues without output


def line_width(stream: IO[str]) -> int:
    """Return the width of text lines in characters: the terminal's, from `NARROWEST` to `WIDTH`.

    Without a terminal it is `WIDTH`.
    """
    if not stream.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST), WIDTH)


def wrapped(text: str, head: str, indent: str) -> list[str]:
    """Wrap text to lines of the terminal's width without breaking words, so that paths stay whole.

    Args:
        text: Text, possibly from the user or a file; control characters are removed and secrets masked.
        head: Prefix of the first line.
        indent: Prefix of every line except the first.
    """
    return wrap_words(f"{head}{printable(text)}", line_width(sys.stdout), subsequent_indent=indent)


def print_rows(title: str, rows: Sequence[tuple[str, str]], stream: IO[str] | None = None) -> None:
    """Print a title and below it two columns of names and texts; rows without text are omitted.

    Bold and dim text appear only on a terminal. Commands (``mptrain ...``) are not wrapped, so that they can be copied.

    Args:
        title: Heading above the rows.
        rows: Pairs of name and text.
        stream: Output stream; standard output if not given.

    Raises:
        StorageError: The stream cannot be written.
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
        width = len(text) if _COMMAND.match(text) else max(line_width(stream) - left - 2, NARROWEST // 3)
        first, *more = wrap_words(text, width)
        lines.append(f"  {dim}{name.ljust(left)}{plain}{first}")
        lines += [" " * (left + 2) + line for line in more]
    with writing():
        print("\n".join(lines), file=stream, flush=True)


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current activity on a temporary line of a terminal, and else does nothing."""
    shows = supports_colour(sys.stderr)

    def tell(what: str) -> None:
        if shows:
            print(f"\r\x1b[2K{what}", end="", file=sys.stderr, flush=True)

    try:
        yield lambda what: tell(f"{what} ...")
    finally:
        tell("")


def without_control_characters(text: str, mask: Callable[[str], str] = masked) -> str:
    """Return text that is safe to print: control characters and lone surrogates are escaped, and secrets masked.

    ``mask`` masks them: a `masker` for many texts, because making one reads the environment.
    """
    text = mask(text)
    if text.isprintable():
        return text
    clean = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return clean.encode("utf-8", "backslashreplace").decode()


def _say(kind: str, text: str) -> None:
    label = f"\x1b[{_COLOURS[kind]}m{kind}:\x1b[0m" if supports_colour(sys.stderr) else f"{kind}:"
    text = printable(text)
    if sys.stderr.isatty():
        text = _wrapped(text, len(kind) + 2, shutil.get_terminal_size().columns)
    with contextlib.suppress(OSError):  # an error of standard error cannot be reported
        print(label, text, file=sys.stderr)


#: Pattern of a command within a sentence.
_COMMAND = re.compile(r"(?<!\S)(?:PYTHONPATH=(?:'[^']*'|\S)+ )?(?:mptrain|torchrun)(?!\S).*?(?:[;,?:)](?!\S)|$)")


def _wrapped(text: str, left: int, width: int) -> str:
    """Wrap text with a hanging indent of ``left`` characters, the length of the label before the first line.

    Words and commands are not broken, so that commands can be copied.
    """
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = wrap_words(whole, max(width - left, 1))
    return f"\n{' ' * left}".join(lines).replace("\0", " ")
