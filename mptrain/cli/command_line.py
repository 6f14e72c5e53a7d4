"""Checks of a command line's words, and hints for those that mean something else, before a command reads them.

Nothing heavy is imported here, since usage errors answer at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from mptrain.config.synonyms import translate_command
from mptrain.errors import ConfigError, Problem, UsageError, either, near_names

#: Flags that may stand before a command: True for those that a value follows.
_BEFORE = {
    "--config-dir": True, "-cd": True, "--config-name": True, "-cn": True, "--jobs": True, "--launcher": True, "-m": False, "--multirun": False
}  # fmt: skip


def command_first(words: list[str], commands: Collection[str]) -> list[str]:
    """Return the words with the command first where it stands behind flags."""
    place = 0
    while place < len(words) and (flag := words[place].partition("=")[0]) in _BEFORE:
        place += 2 if _BEFORE[flag] and "=" not in words[place] else 1
    if place < len(words) and words[place] in commands:
        return [words[place], *words[:place], *words[place + 1 :]]
    return words


def refuse_blanks(words: list[str], commands: Collection[str], *, keys: bool) -> None:
    """Refuse ``KEY = VALUE``, ``KEY= VALUE``, ``KEY =VALUE`` and ``KEY VALUE``, which a shell makes several words of.

    Args:
        words: The command line.
        commands: The names of all commands, which are no keys.
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
        elif (
            keys
            and not flag
            and "=" not in before + word
            and word[:1] not in ("-", "~", "")
            and _is_key(before, commands)
        ):
            problems.append(Problem(f"'{before} {word}': no '=' between key and value", f"write {before}={word}"))
        else:
            used = 1
        flag = before if before.startswith("--") and before != "--multirun" else ""  # which may have a value
        del rest[:used]
    if problems:
        raise ConfigError(problems)


def what_was_meant(word: str, commands: Collection[str]) -> str:
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
    if near := near_names(word, commands):
        return f"did you mean {either(near)}?"
    return f"commands are {', '.join(commands)}; configuration is KEY=VALUE"


def run_and_overrides(command: str, words: list[str]) -> tuple[str, list[str]]:
    """Return the run and the overrides of a command that takes both.

    Raises:
        UsageError: There is no run.
        ConfigError: Names all words behind it that are not of the form KEY=VALUE.
    """
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


def _is_key(word: str, commands: Collection[str]) -> bool:
    from mptrain.config import location
    from mptrain.config.catalogue import Catalogue

    if word in commands or os.path.exists(word):  # noqa: PTH110
        return False
    return word in Catalogue([location.configs()]).usual_keys()


def _is_place(word: str) -> bool:
    """Return whether a word with ``=`` in it is a folder: those of a sweep's runs are named after overrides."""
    return any(os.path.isdir(place) for place in (word, os.path.join("outputs", word)))  # noqa: PTH112, PTH118
