"""The entry point: first word, command, exit code. Everything that fails ends here, as lines and a number.

Nothing is imported before the command that needs it is known: help and usage errors answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from typing import TYPE_CHECKING

from mptrain.cli.messages import report, unwritable, wants_traceback, warn, writing
from mptrain.config.synonyms import translate_command
from mptrain.distributed.torchrun import begun_by_torchrun
from mptrain.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    MptrainError,
    Preempted,
    Problem,
    StorageError,
    UsageError,
    either,
    near_names,
    out_of_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    except SystemExit as leaving:  # argparse inside Hydra
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
    words = _command_first(words)
    first = words[0] if words else ""
    command = COMMANDS.get(first)
    _refuse_blanks(
        words, keys=command in (None, _train, _doctor, _diagnose, _compare, _resume, _eval, _replay, _reproduce)
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
    raise UsageError(f"'{first}' is not a command", _what_was_meant(first))


def _what_was_meant(word: str) -> str:
    """Return the hint for a first word that is no command."""
    from mptrain.config import location
    from mptrain.config.catalogue import Catalogue
    from mptrain.runlog.layout import RUN_JSON

    catalogue = Catalogue([location.configs()])
    if word in catalogue.groups:
        return f"write {word}=OPTION; mptrain help {word} shows the options"
    if word in catalogue.usual_keys():
        return f"write {word}=VALUE"
    if options := catalogue.options(word):
        return f"write {options[0].group}={word}"
    key, colon, value = word.partition(":")
    if colon and key in catalogue.usual_keys():
        return f"write {key}={value}"
    if os.path.isfile(os.path.join(word, RUN_JSON)):  # noqa: PTH113, PTH118
        return f"write mptrain resume {word}, or mptrain report {word}"
    if command := translate_command(word):
        return f"did you mean mptrain {command}?" + " mptrain help sweep says how to sweep" * (command == "-m")
    if near := near_names(word, COMMANDS):
        return f"did you mean {either(near)}?"
    return f"commands are {', '.join(COMMANDS)}; configuration is KEY=VALUE"


def _refuse_torchrun(what: str) -> None:
    """Refuse what every rank that torchrun has begun would do for itself."""
    if begun_by_torchrun() is not None:
        raise UsageError(
            f"torchrun begins the ranks of one run, and {what} is none",
            "leave torchrun out; in a sweep, distributed.procs=2 gives each run two ranks",
        )


def _refuse_blanks(words: list[str], *, keys: bool) -> None:
    """Refuse ``KEY = VALUE``, ``KEY= VALUE``, ``KEY =VALUE`` and ``KEY VALUE``, which a shell makes several words of.

    Args:
        words: The command line.
        keys: Whether a key without ``=`` in front of a plain word is meant as ``KEY VALUE`` in this command.

    Raises:
        ConfigError: Names them all.
    """
    problems = []
    rest = list(words)
    flag = ""  # before these two
    while len(rest) > 1:
        before, word = rest[0], rest[1]
        used = 2
        if word.startswith("=") and "=" not in before and not before.startswith("-"):
            used = 3 if word == "=" else 2
            problems.append(
                Problem(f"'{' '.join(rest[:used])}': no spaces around '='", f"write {''.join(rest[:used])}")
            )
        elif before.endswith("=") and before != "=" and "=" not in word and word[:1] not in ("-", "~", ""):
            problems.append(Problem(f"'{before} {word}': no spaces around '='", f"write {before}{word}"))
        elif keys and not flag and "=" not in before + word and word[:1] not in ("-", "~", "") and _is_key(before):
            problems.append(Problem(f"'{before} {word}': no '=' between key and value", f"write {before}={word}"))
        else:
            used = 1
        flag = before if before.startswith("--") and before != "--multirun" else ""  # which may have a value
        del rest[:used]
    if problems:
        raise ConfigError(problems)


def _is_key(word: str) -> bool:
    from mptrain.config import location
    from mptrain.config.catalogue import Catalogue

    if word in COMMANDS or os.path.exists(word):  # noqa: PTH110
        return False
    return word in Catalogue([location.configs()]).usual_keys()


#: Flags that may stand before a command, and whether a value follows.
_BEFORE = {
    "--config-dir": True, "-cd": True, "--config-name": True, "-cn": True, "--jobs": True, "--launcher": True, "-m": False, "--multirun": False
}  # fmt: skip


def _command_first(words: list[str]) -> list[str]:
    """The words with a command that stands behind some flags before them."""
    place = 0
    while place < len(words) and (flag := words[place].partition("=")[0]) in _BEFORE:
        place += 2 if _BEFORE[flag] and "=" not in words[place] else 1
    if place < len(words) and words[place] in COMMANDS:
        return [words[place], *words[:place], *words[place + 1 :]]
    return words


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

    with ending_at_once():
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
    from mptrain.cli.flags import take_jobs

    words, jobs, launcher = take_jobs(words)
    run, overrides = _run_and_overrides("resume", words)
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
    run, overrides = _run_and_overrides("eval", [word for word in words if word not in ("--best", "--raw")])
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
    run, overrides = _run_and_overrides("replay", words)
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


def _run_and_overrides(command: str, words: list[str]) -> tuple[str, list[str]]:
    if not words or words[0].startswith("-") or ("=" in words[0] and not _is_place(words[0])):
        raise UsageError(f"{command} needs a run directory", f"write mptrain {command} last, or its path")
    problems = []
    rest = words[1:]
    while rest:
        word = rest.pop(0)
        if "=" in word and not word.startswith("-"):
            continue
        meant = ""
        if word.startswith("--"):
            from mptrain.cli.flags import meant_by

            value = word.partition("=")[2]
            if "=" not in word and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
            meant = meant_by(word, value or "VALUE")
        hint = f"did you mean {meant}? configuration is written without dashes" if meant else ""
        problems.append(
            Problem(f"'{word}' is not of the form KEY=VALUE", hint or f"mptrain {command} RUN KEY=VALUE ...")
        )
    if problems:
        raise ConfigError(problems)
    return words[0], words[1:]


def _is_place(word: str) -> bool:
    """Whether a word with ``=`` in it is a folder: those of a sweep's runs are named after overrides."""
    return any(os.path.isdir(place) for place in (word, os.path.join("outputs", word)))  # noqa: PTH112, PTH118


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
