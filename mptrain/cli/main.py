"""Entry point of the command line: selection of the command, report of errors, and exit code.

Each command (`mptrain.cli.commands`) imports what it needs only when it runs, so that help and usage errors appear at
once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mptrain import __version__, shelves
from mptrain.cli.command import Command
from mptrain.cli.command_line import command_first, command_hint, parse, refuse_blanks
from mptrain.cli.commands import COMMANDS
from mptrain.cli.messages import discard_output, outlive_reader, report, unwritable, wants_traceback, writing
from mptrain.engine.interrupt import end_at_signals
from mptrain.parallel.torchrun import refuse_torchrun, speaks_for_first_rank, tell_refusal, torchrun_rank
from mptrain.system.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    MptrainError,
    Preempted,
    StorageError,
    UsageError,
    error_in_user_code,
    kernel_refusal,
    out_of_memory,
    user_packages,
)

if TYPE_CHECKING:
    from argparse import Namespace

#: Commands that go on if nobody reads their output any more.
_TRAINING = ("train", "resume", "compare", "reproduce")


def main(argv: Sequence[str] | None = None, at_end: Callable[[], None] = lambda: None) -> int:
    """Run a command line of mptrain, report errors on standard error, and return the exit code.

    Args:
        argv: Arguments after the program's name; those of this process if not given.
        at_end: Called when the work is done; for a run that a signal ended, before its message is printed.

    Returns:
        The exit code (see `mptrain.system.errors`).
    """
    user_packages.clear()
    # torch's C++ warnings, such as retries of the rendezvous, are meant for developers of torch.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    completing = words[:2] == ["completion", "query"]  # the other words are the command line to complete
    if "--traceback" in words and not completing:
        words.remove("--traceback")
        os.environ["MPTRAIN_TRACEBACK"] = "1"
    code = _guarded(lambda: _complete(words[2:]) if completing else _listening(words), at_end)
    # Flush here, because a failure during interpreter shutdown cannot be reported.
    if code == EXIT_OK:
        code = _guarded(_flush)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard_output()
    at_end()
    return code


#: Standard error of a rank that has been silenced.
_stderr: int | None = None


def _listening(words: list[str]) -> int:
    with end_at_signals():
        return _dispatch(words)


def _be_silent_on_other_ranks() -> None:
    """Silence all ranks of torchrun except rank 0; the first rank of each other machine still prints errors."""
    begun = torchrun_rank()
    if begun is None or begun.rank == 0:
        return
    global _stderr
    quiet, _stderr = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(quiet, 1)
    if not begun.speaks and "MPTRAIN_TRACEBACK" not in os.environ:
        os.dup2(quiet, 2)
    os.close(quiet)


def _guarded(action: Callable[[], int], at_end: Callable[[], None] = lambda: None) -> int:
    """Run an action, report any exception, and return the exit code."""
    try:
        return action()
    except KeyboardInterrupt as interrupt:
        if wants_traceback():
            report(interrupt)
        else:
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`mptrain list | head`); this is not an error.
        discard_output()
        return EXIT_OK
    except MptrainError as error:
        if isinstance(error, Preempted):
            at_end()
        tell_refusal(error)
        if _stderr is not None and speaks_for_first_rank():
            os.dup2(_stderr, 2)
        return report(error)
    except SystemExit as leaving:  # for example from code that a sweeper calls
        return EXIT_OK if leaving.code in (None, 0) else EXIT_CONFIG
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            return report(StorageError(*unwritable(error)))
        if isinstance(error, OSError) and error.errno in _NO_NAME:
            return report(StorageError(f"{error.filename}: {error.strerror}", "check the path"))
        return report(out_of_memory(error) or kernel_refusal(error) or error_in_user_code(error) or error)


#: Error numbers that print() raises if standard output cannot be written. Errors about files have a file name, or are
#: StorageErrors.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


#: Error numbers for paths that no file can have, because of their length or of links that lead to themselves.
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)


def _flush() -> int:
    with writing():
        sys.stdout.flush()
    return EXIT_OK


def _dispatch(words: list[str]) -> int:
    _be_silent_on_other_ranks()
    words = command_first(words)
    first = words[0] if words else ""
    command = COMMANDS.get(first)
    refuse_blanks(words, command or COMMANDS["train"])
    if "-h" in words or "--help" in words:
        from mptrain.cli.help import print_help

        plain = [word for word in words if "=" not in word and word[:1] not in ("-", "~", "")]
        return print_help(COMMANDS, [first] if command else plain)
    if first in ("--version", "-V"):
        if words[1:]:
            raise UsageError(f"--version takes no arguments, but got '{words[1]}'")
        print(f"mptrain {__version__}")
        return EXIT_OK
    if command is None and (shelf := shelves.of_command(first)):
        raise shelves.missing(shelf, f"mptrain {first}")
    if command is None and words and "=" not in first and not first.startswith(("-", "~")):
        raise UsageError(f"'{first}' is not a command", command_hint(first))
    words = words[1:] if command else words
    command = command or COMMANDS["train"]
    outlive_reader(command.name in _TRAINING)
    if command.name not in ("train", "resume"):
        refuse_torchrun(f"mptrain {first}")
    return _run(command, parse(command, words))


def _run(command: Command, arguments: Namespace) -> int:
    """Run a command and print its result; with ``--json``, all other output goes to standard error."""
    if not getattr(arguments, "json", False):
        outcome = command.run(arguments)
        if isinstance(outcome, int):
            return outcome
        outcome.show()
        return outcome.code
    with contextlib.redirect_stdout(sys.stderr):
        outcome = command.run(arguments)
        if isinstance(outcome, int):
            return outcome
        from mptrain.cli.answer import print_answer

        answer = outcome.data()
    print_answer(answer)
    return outcome.code


def _complete(words: list[str]) -> int:
    from mptrain.cli.completion import query

    return query(words, COMMANDS)
