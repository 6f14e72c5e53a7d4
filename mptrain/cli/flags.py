"""Sorts the words after ``mptrain`` or ``mptrain train`` into flags and overrides.

Hydra's own flags keep their names. Those that ask Hydra to show something are answered by it
(`mptrain.cli.hydra_app`); the others are understood here, because training does not go through Hydra's main.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mptrain.cli.help import DESCRIPTIONS
from mptrain.config.synonyms import guess_word
from mptrain.errors import ConfigError, Problem, UsageError, did_you_mean

#: Flags with a value that Hydra answers, and those without.
_SHOWING = ("--cfg", "-c", "--package", "-p")
_SHOWING_ALONE = ("--resolve", "--info", "-i", "--hydra-help")
_COMPLETION = ("--shell-completion", "-sc")
_SUGGESTED = (
    "--help",
    "--version",
    "--multirun",
    "--config-dir",
    "--config-name",
    "--jobs",
    "--launcher",
    "--cfg",
    "--resolve",
    "--package",
    "--info",
    "--shell-completion",
    "--traceback",
)

_WITH_VALUE = ("--config-dir", "--config-name", "--jobs", "--launcher", "--cfg", "--package")


@dataclass(frozen=True)
class Flags:
    """What the flags of a training command ask for.

    Attributes:
        overrides: The words that are no flags.
        multirun: Sweep over words with several values.
        config_dirs: Further folders of groups and options.
        config_name: The file at the top.
        jobs: How many points of a sweep run at a time; None where nothing is said.
        launcher: Where they run instead of here: a file, or the name of an executor; None for here.
        show: Hydra is asked to show something.
        completion: The shell whose script is asked for in Hydra's way; empty where none is.
        given: The flags with their values, as they were written.
    """

    overrides: tuple[str, ...]
    multirun: bool
    config_dirs: tuple[str, ...]
    config_name: str
    jobs: int | None
    launcher: str | None
    show: bool
    completion: str
    given: tuple[str, ...]


def read_flags(words: Sequence[str]) -> Flags:
    """The flags and overrides of a training command.

    Raises:
        UsageError: A flag without its value, or with a wrong one.
        ConfigError: Unknown flags; what else is wrong with the overrides is said with them.
    """
    problems: list[Problem] = []
    meant_words: list[str] = []
    overrides: list[str] = []
    given: list[str] = []
    folders: list[str] = []
    name, multirun, show = "train", False, False
    jobs: int | None = None
    launcher: str | None = None
    rest = list(words)
    while rest:
        here = len(words) - len(rest)
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
            continue
        if word in ("-m", "--multirun"):
            multirun = True
        elif word in ("-r", "--run"):
            multirun = False
        elif flag in ("--config-dir", "-cd", "--config-name", "-cn"):
            value = value if equals else _value(flag, rest)
            if flag in ("--config-dir", "-cd"):
                folders.append(value)
            else:
                name = value
        elif flag == "--jobs":
            jobs = read_jobs(value if equals else _value(flag, rest))
            continue  # Hydra knows no such flag
        elif flag == "--launcher":
            launcher = value if equals else _value(flag, rest)
            continue
        elif flag in _SHOWING:
            show = True
            value = value if equals else _value(flag, rest)
            if flag in ("--cfg", "-c") and value not in _CFG:
                raise UsageError(f"{flag} {value}: there is no such configuration", f"it shows {', '.join(_CFG)}")
        elif flag in _SHOWING_ALONE:
            show = True
            if flag in ("--info", "-i") and rest and is_asked_of_info(rest[0]):
                rest.pop(0)
        elif word not in _COMPLETION:
            after = rest.pop(0) if not equals and rest and "=" not in rest[0] and not rest[0].startswith("-") else ""
            meant = meant_by(word, value or after or "VALUE")
            problems.append(Problem(f"unknown option '{word}'", _hint(word, meant)))
            if value or after:
                meant_words += [one for one in meant.split() if "=" in one and not meant.startswith("mptrain")]
            continue
        given += words[here : len(words) - len(rest)]
    if problems:
        raise ConfigError([*problems, *([] if multirun else _problems_of([*overrides, *meant_words], folders, name))])
    if jobs is not None and not multirun:
        raise UsageError("--jobs is about the points of a sweep", "add -m, or leave it out")
    if launcher is not None and not multirun:
        raise UsageError("--launcher is about the points of a sweep", "add -m, or leave it out")
    shell = _shell(overrides) if any(flag in _COMPLETION for flag in given) else ""
    return Flags(tuple(overrides), multirun, tuple(folders), name, jobs, launcher, show, shell, tuple(given))


def take_jobs(words: Sequence[str]) -> tuple[list[str], int | None, str | None]:
    """The words without ``--jobs N`` and ``--launcher FILE``, and their values where they are there.

    Raises:
        UsageError: One lacks its value, or the first is no number.
    """
    rest, kept, jobs, launcher = list(words), [], None, None
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--jobs":
            jobs = read_jobs(value if equals else _value(flag, rest))
        elif flag == "--launcher":
            launcher = value if equals else _value(flag, rest)
        else:
            kept.append(word)
    return kept, jobs, launcher


def read_jobs(text: str) -> int:
    """The number of ``--jobs``.

    Raises:
        UsageError: It is none.
    """
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        raise UsageError(f"--jobs {text}: must be a whole number, at least 1", "write for example --jobs 2")
    return int(text)


#: What ``--cfg`` and ``--info`` can be asked for.
_CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def is_asked_of_info(word: str) -> bool:
    """Return whether a word behind ``--info`` says what to show: it is neither an override nor a flag."""
    return "=" not in word and not word.startswith(("-", "~"))


def _value(flag: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{flag} needs a value", f"write {flag} VALUE")
    return rest.pop(0)


def _shell(words: Sequence[str]) -> str:
    """The shell of ``-sc install=SHELL``; whether there is such a one, the command ``completion`` says."""
    if len(words) != 1 or not words[0].startswith("install="):
        raise UsageError("-sc takes install=SHELL and nothing else", "write mptrain completion SHELL")
    return words[0].removeprefix("install=")


def meant_by(word: str, value: str, flags: Sequence[str] = _SUGGESTED) -> str:
    """Return the words that an unknown flag and its value stand for, without dashes; empty where it is like another flag.

    Args:
        word: The flag as it was written.
        value: What follows it, or stands for that.
        flags: Those of the command.
    """
    from mptrain.config import location
    from mptrain.config.catalogue import Catalogue

    catalogue = Catalogue([location.configs()])
    flag, equals, _ = word.partition("=")
    name = flag.lstrip("-")
    if not equals and name in DESCRIPTIONS:
        return f"mptrain {name}"
    like = did_you_mean(flag, flags)
    another_flag = like and (not equals or like in _WITH_VALUE or flags is not _SUGGESTED)
    return guess_word(name, value, catalogue, exact=True) or (
        "" if another_flag else guess_word(name, value, catalogue)
    )


def _hint(word: str, meant: str) -> str:
    """Return the hint for an unknown flag that stands for these words."""
    flag = word.partition("=")[0]
    if flag == "--version":
        return "it stands alone: mptrain --version"
    if flag in ("--config-path", "-cp"):
        return "--config-dir adds a folder of groups and options"
    if meant.startswith("mptrain "):
        return f"did you mean {meant}?"
    if meant:
        return f"did you mean {meant}? configuration is written without dashes"
    guess = "--version" if flag == "-v" else did_you_mean(flag, _SUGGESTED)
    return f"did you mean {guess}?" if guess else "configuration is KEY=VALUE; mptrain --help shows the options"


def _problems_of(overrides: Sequence[str], folders: Sequence[str], name: str) -> Sequence[Problem]:
    """Return what is wrong with words that stand beside unknown flags, so that all is said at once."""
    if not overrides or not all("=" in word for word in overrides):  # those of another command
        return ()
    from mptrain.config.compose import compose

    try:
        compose(overrides, config_dirs=folders, config_name=name)
    except ConfigError as error:
        return error.problems
    return ()
