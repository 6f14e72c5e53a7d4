"""The entry point: first word, command, exit code. Everything that fails ends here, as lines and a number.

Nothing is imported before the command that needs it is known: help and usage errors answer at once.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

from mptrain.cli.messages import report, wants_traceback, warn
from mptrain.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, MptrainError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command = Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: The words after the program's name; those of this process when not given.

    Returns:
        The exit code (see `mptrain.errors`).
    """
    # Threads that spin while they wait make a step 20 times slower as soon as another process wants the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
    words = list(sys.argv[1:] if argv is None else argv)
    if "--traceback" in words:
        words.remove("--traceback")
        os.environ["MPTRAIN_TRACEBACK"] = "1"
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        if wants_traceback():
            report(interrupt)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`mptrain list | head`); what it wanted it has.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except MptrainError as error:
        return report(error)
    except SystemExit as leaving:  # argparse inside Hydra
        return EXIT_OK if leaving.code in (None, 0) else EXIT_CONFIG
    except Exception as error:
        return report(error)


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    command = COMMANDS.get(first)
    if "-h" in words or "--help" in words:
        return _help([first] if command else [])
    if command:
        return command(words[1:])
    if first in ("--version", "-V"):
        return _version(words[1:])
    if not words or "=" in first or first.startswith(("-", "~")):
        return _train(words)
    guess = did_you_mean(first, COMMANDS)
    listed = f"commands are {', '.join(COMMANDS)}; configuration is KEY=VALUE"
    raise UsageError(f"'{first}' is not a command", f"did you mean {guess}?" if guess else listed)


def _train(words: list[str]) -> int:
    from mptrain.cli.flags import read_flags

    flags = read_flags(words)
    if flags.show:
        from mptrain.cli.hydra_app import show

        return show(flags)
    if flags.multirun:
        from mptrain.cli.sweep import sweep

        return sweep(flags)
    gc.disable()  # importing makes many objects and drops none: looking for garbage costs 0.2 s of torch's 1.7
    try:
        from mptrain.config.compose import compose

        config = compose(flags.overrides, config_dirs=flags.config_dirs, config_name=flags.config_name)
        warn(config.warnings)
        from mptrain.cli.train import train
    finally:
        gc.enable()
    return train(config)


def _resume(words: list[str]) -> int:
    run, overrides = _run_and_overrides("resume", words)
    from mptrain.cli.train import resume

    return resume(run, overrides)


def _eval(words: list[str]) -> int:
    run, overrides = _run_and_overrides("eval", [word for word in words if word != "--best"])
    from mptrain.cli.train import evaluate

    return evaluate(run, overrides, "best" if "--best" in words else "last")


def _list(words: list[str]) -> int:
    from mptrain.cli.list import list_groups

    return list_groups(words)


def _doctor(words: list[str]) -> int:
    if words:
        raise UsageError(f"doctor takes no words, but there is '{words[0]}'", "write mptrain doctor")
    from mptrain.cli.doctor import doctor

    return doctor()


def _help(words: list[str]) -> int:
    from mptrain.cli.help import print_help

    return print_help(words)


def _version(words: list[str]) -> int:
    if words:
        raise UsageError(f"--version takes no words, but there is '{words[0]}'")
    from mptrain import __version__

    print(f"mptrain {__version__}")
    return EXIT_OK


def _run_and_overrides(command: str, words: list[str]) -> tuple[str, list[str]]:
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise UsageError(f"{command} needs a run directory", f"write mptrain {command} last, or its path")
    for word in words[1:]:
        if "=" not in word or word.startswith("-"):
            raise UsageError(f"'{word}' is not of the form KEY=VALUE", f"mptrain {command} RUN KEY=VALUE ...")
    return words[0], words[1:]


COMMANDS: dict[str, Command] = {
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "list": _list,
    "doctor": _doctor,
    "help": _help,
}
