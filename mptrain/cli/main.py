"""The entry point: first word, command, exit code. Everything that fails ends here, as lines and a number.

Nothing is imported before the command that needs it is known: help and usage errors answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mptrain.cli.command_line import command_first, refuse_blanks, run_and_overrides, what_was_meant
from mptrain.cli.messages import report, unwritable, wants_traceback, warn, writing
from mptrain.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    MptrainError,
    Preempted,
    StorageError,
    UsageError,
    out_of_memory,
)
from mptrain.parallel.torchrun import begun_by_torchrun

if TYPE_CHECKING:
    Command = Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None, at_end: Callable[[], None] = lambda: None) -> int:
    """Runs one command line.

    Args:
        argv: The words after the program's name; those of this process when not given.
        at_end: Called when all is done, and a run that a signal has ended has only to say so.

    Returns:
        The exit code (see `mptrain.errors`).
    """
    # Threads that spin while they wait make a step 20 times slower as soon as another process wants the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
    # What torch's C++ warns of outside of Python is for people who mend torch: that ranks try again to meet, and the like.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    completing = words[:2] == ["completion", "query"]  # then the other words are those of some other command line
    if "--traceback" in words and not completing:
        words.remove("--traceback")
        os.environ["MPTRAIN_TRACEBACK"] = "1"
    code = _guarded(lambda: _completion(words[1:]) if completing else _dispatch(words), at_end)
    # What is left is written here, not while the interpreter ends, when nobody can be told that it failed.
    if code == EXIT_OK:
        code = _guarded(_flush)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_output()
    at_end()
    return code


def _be_silent_on_other_ranks() -> None:
    """Of the ranks that torchrun has begun, the first one speaks for all; the first on each other machine says its errors."""
    begun = begun_by_torchrun()
    if begun is None or begun.rank == 0:
        return
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if not begun.speaks and "MPTRAIN_TRACEBACK" not in os.environ:
        os.dup2(quiet, 2)
    os.close(quiet)


def _guarded(action: Callable[[], int], at_end: Callable[[], None] = lambda: None) -> int:
    """The exit code of an action, whatever it raises."""
    try:
        return action()
    except KeyboardInterrupt as interrupt:
        if wants_traceback():
            report(interrupt)
        else:
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`mptrain list | head`); what it wanted it has.
        _discard_output()
        return EXIT_OK
    except MptrainError as error:
        if isinstance(error, Preempted):
            at_end()
        return report(error)
    except SystemExit as leaving:  # of what a sweeper calls, for one
        return EXIT_OK if leaving.code in (None, 0) else EXIT_CONFIG
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            return report(StorageError(*unwritable(error)))
        return report(out_of_memory(error) or error)


#: What print() raises when standard output takes no more; errors about files name them, or are StorageErrors.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def _flush() -> int:
    with writing():
        sys.stdout.flush()
    return EXIT_OK


def _discard_output() -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor holds nothing back
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    _be_silent_on_other_ranks()
    words = command_first(words, COMMANDS)
    first = words[0] if words else ""
    command = COMMANDS.get(first)
    refuse_blanks(
        words,
        COMMANDS,
        keys=command in (None, _train, _doctor, _diagnose, _compare, _resume, _eval, _replay, _reproduce),
    )
    if "-h" in words or "--help" in words:
        return _help(
            [first] if command else [word for word in words if "=" not in word and word[:1] not in ("-", "~", "")]
        )
    if command:
        if command not in (_train, _resume):
            _refuse_torchrun(f"mptrain {first}")
        return command(words[1:])
    if first in ("--version", "-V"):
        return _version(words[1:])
    if not words or "=" in first or first.startswith(("-", "~")):
        return _train(words)
    raise UsageError(f"'{first}' is not a command", what_was_meant(first, COMMANDS))


def _refuse_torchrun(what: str) -> None:
    """Refuse what every rank that torchrun has begun would do for itself."""
    if begun_by_torchrun() is not None:
        raise UsageError(
            f"torchrun begins the ranks of one run, and {what} is none",
            "leave torchrun out; in a sweep, distributed.procs=2 gives each run two ranks",
        )


def _train(words: list[str]) -> int:
    from mptrain.cli.flags import read_flags

    flags = read_flags(words)
    if flags.completion:
        return _completion([flags.completion])
    if flags.show:
        from mptrain.cli.hydra_app import show

        return show(flags)
    if flags.multirun:
        _refuse_torchrun("a sweep")
        from mptrain.cli.sweep import sweep

        return sweep(flags)
    from mptrain.engine.interrupt import ending_at_once
    from mptrain.machine import dropping_nothing

    with ending_at_once():
        with dropping_nothing():
            from mptrain.config.compose import compose

            config = compose(flags.overrides, config_dirs=flags.config_dirs, config_name=flags.config_name)
            warn(config.warnings)
            from mptrain.cli.train import train
        return train(config)


def _resume(words: list[str]) -> int:
    from mptrain.cli.flags import take_jobs

    words, jobs, launcher = take_jobs(words)
    run, overrides = run_and_overrides("resume", words)
    from mptrain.config.trust import is_trust, let_in

    trusted = [word for word in overrides if is_trust(word)]
    from mptrain.cli.sweep import find_sweep, resume_sweep

    sweep = find_sweep(run, [word for word in overrides if word not in trusted], jobs, launcher)
    if sweep is not None:
        _refuse_torchrun("a sweep")
        return resume_sweep(sweep, jobs, let_in(trusted), launcher)
    from mptrain.engine.interrupt import ending_at_once

    with ending_at_once():
        from mptrain.cli.train import resume

        return resume(run, overrides)


def _eval(words: list[str]) -> int:
    run, overrides = run_and_overrides("eval", [word for word in words if word not in ("--best", "--raw")])
    from mptrain.cli.train import evaluate

    return evaluate(run, overrides, "best" if "--best" in words else "last", average="--raw" not in words)


def _export(words: list[str]) -> int:
    from mptrain.cli.export import export

    return export(words)


def _compare(words: list[str]) -> int:
    from mptrain.cli.compare import compare

    return compare(words)


def _report(words: list[str]) -> int:
    from mptrain.cli.report import report_folders

    return report_folders(words)


def _diagnose(words: list[str]) -> int:
    from mptrain.cli.diagnose import diagnose

    return diagnose(words)


def _replay(words: list[str]) -> int:
    from mptrain.machine import dropping_nothing

    run, overrides = run_and_overrides("replay", words)
    with dropping_nothing():
        from mptrain.cli.replay import replay

    return replay(run, overrides)


def _recommend(words: list[str]) -> int:
    from mptrain.cli.recommend import recommend_scale

    return recommend_scale(words)


def _reproduce(words: list[str]) -> int:
    from mptrain.cli.reproduce import reproduce

    return reproduce(words)


def _list(words: list[str]) -> int:
    from mptrain.cli.list import list_groups

    return list_groups(words)


def _doctor(words: list[str]) -> int:
    if not words:
        from mptrain.cli.doctor import doctor

        return doctor()
    from mptrain.cli.flags import read_flags

    flags = read_flags(words)
    if plain := [word for word in flags.overrides if "=" not in word and not word.startswith("~")]:
        raise UsageError(f"doctor takes KEY=VALUE, but there is '{plain[0]}'", "write mptrain doctor model=resnet18")
    if flags.multirun or flags.show:
        raise UsageError(
            f"doctor knows no {flags.given[0]}", "it looks at one configuration: mptrain doctor KEY=VALUE ..."
        )
    from mptrain.config.compose import compose

    config = compose(flags.overrides, config_dirs=flags.config_dirs, config_name=flags.config_name)
    warn(config.warnings)
    from mptrain.cli.doctor_model import doctor_model

    return doctor_model(config)


def _completion(words: list[str]) -> int:
    from mptrain.cli.completion import completion

    return completion(words)


def _help(words: list[str]) -> int:
    from mptrain.cli.help import print_help

    return print_help(words)


def _version(words: list[str]) -> int:
    if words:
        raise UsageError(f"--version takes no words, but there is '{words[0]}'")
    from mptrain import __version__

    print(f"mptrain {__version__}")
    return EXIT_OK


COMMANDS: dict[str, Command] = {
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "export": _export,
    "compare": _compare,
    "report": _report,
    "recommend": _recommend,
    "diagnose": _diagnose,
    "replay": _replay,
    "reproduce": _reproduce,
    "list": _list,
    "doctor": _doctor,
    "completion": _completion,
    "help": _help,
}
