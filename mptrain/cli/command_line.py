"""Parsing of the command line by the table of commands, the folders that it names, and hints for mistyped arguments.

It imports nothing heavy, so that usage errors appear at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.cli.command import GENERAL, TRAINING, Command, read_options
from mptrain.cli.commands import COMMANDS
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.synonyms import guess_word, translate_command
from mptrain.system.errors import ConfigError, Problem, UsageError, did_you_mean, either, near_names

if TYPE_CHECKING:
    from argparse import Namespace


#: Hints for options of Hydra that mptrain does not have.
_INSTEAD = {
    **dict.fromkeys(("--config-path", "-cp"), "--config-dir adds a folder of groups and options"),
    **dict.fromkeys(("--shell-completion", "-sc"), "mptrain completion SHELL prints a completion script"),
    "--hydra-help": "mptrain --help lists the options",
}


def parse(command: Command, words: Sequence[str]) -> Namespace:
    """Parse the arguments of a command.

    Args:
        command: The command.
        words: Its arguments.

    Returns:
        The value of each option by its name; ``overrides``, the arguments ``KEY=VALUE``; and ``words``, the others.

    Raises:
        UsageError: An option lacks its value or has an invalid one, or the command needs an argument.
        ConfigError: There are unknown options or unexpected arguments. The error also lists the problems of the
            overrides.
    """
    arguments, rest = read_options(command.options, words)
    arguments.words, arguments.overrides = [], []
    problems: list[Problem] = []
    meant: list[str] = []
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and not (word == "-" and command.reads_input):
            value = word.partition("=")[2]
            if "=" not in word and rest and "=" not in rest[0] and not rest[0].startswith(("-", "~")):
                value = rest.pop(0)
            guess = _guess(word, value or "VALUE", command)
            problems.append(Problem(f"unknown option '{word}'", _option_hint(word, guess, command)))
            meant += [override for override in guess.split() if "=" in override and value and ", " not in guess]
        elif command.takes_overrides and _is_override(word, command, arguments.words):
            arguments.overrides.append(word)
        elif command.composes and arguments.overrides:  # a new configuration, so no run follows
            problems.append(_unexpected(word, command))
        elif len(arguments.words) < command.most and not _is_no_run(word, command):
            arguments.words.append(word)
        else:
            problems.append(_unexpected(word, command))
    if problems:
        sweeps = getattr(arguments, "multirun", "-m" in words or "--multirun" in words)
        if command.composes and not arguments.words and not sweeps:
            problems += _problems_of(arguments, [*arguments.overrides, *meant])
        raise ConfigError(problems)
    if command.needed and not arguments.words:
        raise UsageError(f"{command.name} needs {command.needed.noun}", f"write {command.form}; {command.needed.hint}")
    return arguments


def command_first(words: list[str]) -> list[str]:
    """Return the command line with the command in front, if training options precede it: ``--jobs 2 compare ...``."""
    names = {name for option in TRAINING for name in (option.name, option.short) if name}
    if words and words[0].partition("=")[0] in names:
        rest = read_options(TRAINING, words)[1]
        if rest and rest[0] in COMMANDS:
            words = list(words)
            words.remove(rest[0])
            return [rest[0], *words]
    return words


def refuse_blanks(words: Sequence[str], command: Command) -> None:
    """Reject overrides with blanks: ``KEY = VALUE``, ``KEY= VALUE``, ``KEY =VALUE`` and ``KEY VALUE``.

    A shell splits them into several words.

    Args:
        words: Arguments after the program's name.
        command: The command. Unless it takes them, a key followed by a plain word is not taken for ``KEY VALUE``.

    Raises:
        ConfigError: At least one such form was found; the error lists all of them.
    """
    problems = []
    rest = list(words)
    flag = ""  # the option before the current two words
    while len(rest) > 1:
        before, word = rest[0], rest[1]
        plain = "=" not in word and word[:1] not in ("-", "~", "")
        used, what = 2, ""
        if word.startswith("=") and "=" not in before and not before.startswith("-"):
            used, what = 3 if word == "=" else 2, "no spaces around '='"
        elif before.endswith("=") and before != "=" and plain:
            what = "no spaces around '='"
        elif command.takes_keys and not flag and "=" not in before and plain and _is_key(before):
            what = "no '=' between key and value"
        else:
            used = 1
        if what:
            meant = "".join(rest[:used]) if "=" in before + word else f"{before}={word}"
            problems.append(Problem(f"'{' '.join(rest[:used])}': {what}", f"write {meant}"))
        flag = before if before.startswith("--") and before != "--multirun" else ""  # may take a value
        del rest[:used]
    if problems:
        raise ConfigError(problems)


def command_hint(word: str) -> str:
    """Return the hint for a first argument that is not a command, such as ``did you mean mptrain compare?``.

    It may be a group, a key, an option, a run directory or another program's name of a command.
    """
    from mptrain.runlog.run_paths import RUN_JSON

    catalogue = Catalogue([configs_folder()])
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
        return f"did you mean mptrain {command}?" + " mptrain help sweep explains sweeps" * (command == "-m")
    if near := near_names(word, COMMANDS):
        return f"did you mean {either(near)}?"
    return f"commands are {', '.join(COMMANDS)}; configuration is KEY=VALUE"


def _is_key(word: str) -> bool:
    if word in COMMANDS or os.path.exists(word):  # noqa: PTH110
        return False
    return word in Catalogue([configs_folder()]).usual_keys()


def _is_place(word: str) -> bool:
    """Return whether a word with ``=`` exists; sweeps name the folders and log files of runs after overrides."""
    return any(os.path.exists(path) for path in (word, os.path.join("outputs", word)))  # noqa: PTH110, PTH118


def _is_override(word: str, command: Command, before: Sequence[str]) -> bool:
    """Return whether an argument is ``KEY=VALUE`` or, unless it follows a run, ``~KEY``."""
    if word.startswith("~"):
        return not (before and command.takes_run)
    return "=" in word and (len(before) >= command.most or not _is_place(word))


def _is_no_run(word: str, command: Command) -> bool:
    """Return whether a command takes runs, and an argument looks like ``KEY=VALUE``."""
    return command.takes_run and "=" in word and not _is_place(word)


def _unexpected(word: str, command: Command) -> Problem:
    """Return the problem of an argument that a command does not take."""
    if command.takes_keys:
        return Problem(f"'{word}' is not of the form KEY=VALUE", f"write {command.form}, such as train.epochs=3")
    if _is_no_run(word, command):
        replayed = f"; to simulate another scaler, write mptrain replay RUN {word}" * ("scaler" in word)
        return Problem(f"{command.name} takes no KEY=VALUE, but got '{word}'", f"write {command.form}{replayed}")
    takes = "one argument" if command.most == 1 else f"{command.most} arguments"
    return Problem(f"{command.name} takes {takes}, but '{word}' is given too", f"write {command.form}")


def _guess(word: str, value: str, command: Command) -> str:
    """Return the override that an unknown option and its value probably mean: ``train.epochs=3`` for ``--epochs 3``.

    The text is empty if there is no guess, or if the option resembles one of the command.
    """
    if not command.takes_keys:
        return ""
    catalogue = Catalogue([configs_folder()])
    flag, equals, _ = word.partition("=")
    name = flag.lstrip("-")
    known = {option.name: option for option in (*command.options, *GENERAL)}
    like = known.get(did_you_mean(flag, known))
    another = not flag.startswith("--") or (like and (like.value or not equals)) or _commands_with(flag)
    return guess_word(name, value, catalogue, exact=True) or ("" if another else guess_word(name, value, catalogue))


def _option_hint(word: str, guess: str, command: Command) -> str:
    """Return the hint for an unknown option, given the override that it probably means."""
    flag = word.partition("=")[0]
    options = [option.name for option in (*command.options, *GENERAL)]
    if flag in ("--version", "-v", "-V"):
        return "use it alone: mptrain --version" if flag != "-v" else "did you mean --version?"
    if flag in _INSTEAD:
        return _INSTEAD[flag]
    if word.removeprefix("--") in COMMANDS:
        return f"did you mean mptrain {word.removeprefix('--')}?"
    if guess:
        return f"did you mean {guess}? KEY=VALUE takes no leading dashes"
    own = ", ".join(option.name for option in command.options)
    listed = f"options of {command.name} are {own}" if own else f"{command.name} has no options"
    if others := _commands_with(flag):
        return f"{flag} is an option of {', '.join(others)}; {listed}"
    if like := did_you_mean(flag, options):
        return f"did you mean {like}?"
    return listed if command.name != "train" else "configuration is KEY=VALUE; mptrain --help shows the options"


def _commands_with(flag: str) -> list[str]:
    """Return the names of the commands that have an option."""
    return [
        name
        for name, command in COMMANDS.items()
        if any(flag in (option.name, option.short) for option in command.options)
    ]


def _problems_of(arguments: Namespace, overrides: Sequence[str]) -> Sequence[Problem]:
    """Return the problems of the overrides next to unknown options, so that one error reports everything."""
    if not overrides:
        return ()
    from mptrain.config.compose import compose

    try:
        compose(overrides, config_dirs=arguments.config_dir, config_name=getattr(arguments, "config_name", "train"))
    except ConfigError as error:
        return error.problems
    return ()
