"""``mptrain completion SHELL``: command-line completion for bash, zsh and fish.

The scripts in ``shells/`` call ``mptrain completion query SHELL ...`` on every TAB. The answer must come within a tenth
of a second, so this module and everything that it imports must not import torch or Hydra. The arguments and options of
a command are those of the table (`mptrain.cli.commands`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mptrain.cli.command import GENERAL, Command, Option, read_options
from mptrain.cli.completion_overrides import Candidate, Overrides, paths
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.catalogue import Option as ConfigOption
from mptrain.system.errors import EXIT_OK, MptrainError, UsageError, suggest
from mptrain.system.files import expanded

SHELLS = ("bash", "zsh", "fish")

#: Prefixes of the overrides that ``replay RUN`` accepts.
_REPLAYED = ("scaler", "learners")

#: Maximum number of runs that are offered, newest first.
_MOST_RUNS = 200

#: Characters that mean something inside quotes of bash, where nothing that has one is offered.
_ALIVE = frozenset("'\"`$\\!")

#: Characters that are special to bash.
_ESCAPED = frozenset(" \t\n\\'\"`$&|;<>()[]{}*?!#")


def script(shell: str) -> str:
    """Return the text of the script that sets up TAB completion of ``mptrain`` in a shell.

    Args:
        shell: One of `SHELLS`.
    """
    return (Path(__file__).parent / "shells" / f"completion.{shell}").read_text(encoding="utf-8")


def print_script(shell: str) -> int:
    """Print the script that sets up TAB completion in a shell, and return the exit code 0.

    Raises:
        UsageError: The shell is not one of `SHELLS`.
    """
    if shell not in SHELLS:
        hint = suggest(shell, SHELLS, f"supported shells are {', '.join(SHELLS)}")
        raise UsageError(f"there is no completion for '{shell}'", hint)
    print(script(shell), end="")
    return EXIT_OK


def query(words: Sequence[str], commands: Mapping[str, Command]) -> int:
    """Print the completions of a command line, as the scripts ask at every TAB; return the exit code 0.

    There is one completion per line; for zsh and fish, its description follows after a tab.

    Args:
        words: The shell. For bash, two arguments follow: the line up to the cursor, and the characters at which
            readline starts a new word. For zsh and fish, the words before the cursor and the word at the cursor follow.
            In fish that word follows the last ``--``, includes its quotes, and is missing if it is empty.
        commands: All commands by name.

    Raises:
        UsageError: There is no shell, or it is not one of `SHELLS`.
    """
    shell, *rest = words or [""]
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for '{shell}'", f"supported shells are {', '.join(SHELLS)}")
    if shell == "bash":  # readline replaces only the text after the last = or :
        line = split(rest[0], rest[1])
        rest = [one.text[line.kept :] for one in answers(line.words[1:], line.current, commands)]
        found = [text for text in rest if _ALIVE.isdisjoint(text)] if line.quote else [*map(escaped, rest)]
    else:
        before, current = rest[:-1], rest[-1]
        if shell == "fish":
            place = len(rest) - 1 - rest[::-1].index("--")
            before, current = rest[:place], split("".join(rest[place + 1 :]), "").current
        found = [f"{one.text}\t{one.about}" for one in answers(before, current, commands)]
    print("".join(f"{one}\n" for one in found), end="")
    return EXIT_OK


@dataclass
class Line:
    """A shell command line up to the cursor, split into words, for completion.

    Attributes:
        words: Words before the cursor's word, without quotes.
        current: Word at the cursor, without quotes; empty after a space.
        kept: Number of leading characters of ``current`` that readline keeps; it replaces the rest.
        quote: Quote character that is open at the cursor; empty for none.
    """

    words: list[str] = field(default_factory=list)
    current: str = ""
    kept: int = 0
    quote: str = ""


def split(text: str, breaks: str) -> Line:
    """Split a shell command line up to the cursor into words, as bash does.

    Args:
        text: The line up to the cursor; quotes may be open.
        breaks: Characters at which readline starts a new word, ``COMP_WORDBREAKS``.
    """
    line = Line()
    inside = False  # inside a word, which may be an empty quoted one
    letters = iter(text)
    for letter in letters:
        if line.quote:
            if letter == line.quote:
                line.quote, line.kept = "", len(line.current)
            elif letter == "\\" and line.quote == '"':
                line.current += next(letters, "")
            else:
                line.current += letter
        elif letter in "'\"":
            line.quote, line.kept, inside = letter, len(line.current), True
        elif letter in " \t\n":
            if inside:
                line.words.append(line.current)
            line.current, line.kept, inside = "", 0, False
        else:
            inside = True
            line.current += next(letters, "") if letter == "\\" else letter
            if letter in breaks:
                line.kept = len(line.current)
    return line


def escaped(text: str) -> str:
    """Escape characters of a completion that are special to bash outside of quotes with backslashes."""
    return "".join(f"\\{letter}" if letter in _ESCAPED else letter for letter in text)


def answers(before: Sequence[str], current: str, commands: Mapping[str, Command]) -> list[Candidate]:
    """Return the shell completions of the word at the cursor of an ``mptrain`` command line.

    Args:
        before: Words before it, without the program's name.
        current: The part of the word that is typed.
        commands: All commands by name.
    """
    try:
        found = list(_Words(before, commands).candidates(current))
    except (MptrainError, OSError):  # a damaged run or installation; completion cannot print errors
        return []
    fitting = [one for one in dict.fromkeys(found) if one.text.startswith(current) and one.text.isprintable()]
    # Lines and tabs part the answers to the shell.
    return [Candidate(one.text, "".join(c if c.isprintable() else " " for c in one.about)) for one in fitting]


class _Words:
    """Completer of a command line: the words before the cursor, parsed into command, options and other arguments."""

    def __init__(self, before: Sequence[str], commands: Mapping[str, Command]) -> None:
        self.commands = commands
        valued = {one.name: one for command in commands.values() for one in command.options if one.value}
        self.valued = {name: one for one in valued.values() for name in (one.name, one.short) if name and not one.alone}
        self.awaited = self.valued.get(before[-1]) if before else None  # option whose value is being typed
        self.options, rest = read_options(tuple(valued.values()), before[:-1] if self.awaited else before)
        plain = [word for word in rest if not word.startswith("-")]
        self.begins = not plain
        named = bool(plain) and plain[0] in commands
        self.command = commands[plain[0] if named else "train"]
        self.taken = plain[1:] if named else plain

    def candidates(self, current: str) -> Iterator[Candidate]:
        """Yield the completions of the word at the cursor, not yet filtered by the part that is typed."""
        name, equals, value = current.partition("=")
        if self.awaited is not None:
            yield from self._values(self.awaited, current)
        elif equals and name in self.valued:
            for found in self._values(self.valued[name], value):
                yield Candidate(f"{name}={found.text}", found.about)
        elif current.startswith("-"):
            yield from self._names()
        else:
            if self.begins:
                yield from self._of_value("COMMAND", current)
            yield from self._arguments(current)

    def _arguments(self, current: str) -> Iterator[Candidate]:
        """Yield the arguments that the usage lines of the command have at this position."""
        first, *others = (usage.arguments for usage in self.command.usages)
        has_run = self.command.takes_run
        if others and has_run:  # KEY=VALUE is allowed in place of the run
            if self.taken and "=" in self.taken[0]:
                first, has_run = others[0], False
            elif not self.taken:
                yield from Overrides(self._catalogue(), self.taken, None).candidates(current)
        place = len(self.taken)
        argument = first[min(place, len(first) - 1)]
        if argument.key and self.command.takes_keys:
            saved = _saved(self.taken[0]) if has_run else None
            for found in Overrides(self._catalogue(), self.taken, saved).candidates(current):
                if self.command.name != "replay" or found.text.startswith(_REPLAYED):
                    yield found
        elif not argument.key and (place < len(first) or argument.repeats):
            yield from self._of_value(argument.value, current)

    def _values(self, option: Option, current: str) -> Iterator[Candidate]:
        """Yield the values of an option; NAME is that of a top-level config file."""
        yield from self._of_value("TOP" if option.name == "--config-name" else option.value, current)

    def _of_value(self, value: str, current: str) -> Iterator[Candidate]:
        """Yield the candidates of placeholders and words of the table of commands: ``RUN``, ``last``, ``GROUP``."""
        for part in value.split("|"):
            match part:
                case "RUN":
                    yield from _runs(current)
                case "SWEEP":
                    from mptrain.runlog.sweeps import SWEEP_JSON

                    yield from _newest_with(SWEEP_JSON, current)
                case "RECIPE":
                    yield from _recipes()
                    yield from paths(current, folders_only=True)
                case "GROUP":
                    catalogue = self._catalogue()
                    yield from (Candidate(group, catalogue.comment(group)) for group in catalogue.groups)
                case "GROUP/OPTION":
                    for group, options in self._catalogue().groups.items():
                        if current.startswith(f"{group}/"):
                            yield from (Candidate(f"{group}/{one.name}", one.summary) for one in options.values())
                        else:
                            yield Candidate(f"{group}/", self._catalogue().comment(group))
                case "COMMAND":
                    yield from (Candidate(name, command.usages[0].about) for name, command in self.commands.items())
                case "TOP":
                    yield from (Candidate(name) for name in self._catalogue().tops)
                case "DIR" | "FOLDER" | "FILE" | "PATH":
                    yield from paths(current, folders_only=part in ("DIR", "FOLDER"))
                case _ if part.islower():
                    yield Candidate(part)

    def _catalogue(self) -> Catalogue:
        folders = [expanded(folder) for folder in self.options.config_dir]
        top = self.options.config_name.removesuffix(".yaml")
        return Catalogue([location.configs(), *(folder for folder in folders if folder.is_dir())], top)

    def _names(self) -> Iterator[Candidate]:
        """Yield the options of the command."""
        for option in (*self.command.options, *GENERAL):
            yield from (Candidate(name, option.about) for name in (option.short, option.name) if name)
        if self.begins:
            yield Candidate("--version", "show the version")


def _saved(run: str) -> Path:
    """Return the path of a run's saved configuration."""
    from mptrain.runlog.directory import find_run

    return find_run(str(expanded(run))).paths.config


def _recipes() -> Iterator[Candidate]:
    """Yield the recipes included in mptrain, with their titles."""
    for path in sorted(location.recipes().glob("*/recipe.yaml")):
        entries = ConfigOption("recipes", path.parent.name, path).entries
        yield Candidate(path.parent.name, next((one.value for one in entries if one.key == "recipes.title"), ""))


def _runs(typed: str) -> Iterator[Candidate]:
    """Yield the runs under ``outputs``, newest first; then folders, for runs stored elsewhere."""
    from mptrain.runlog.run_paths import RUN_JSON

    yield from _newest_with(RUN_JSON, typed)
    for folder in paths(typed, folders_only=True):
        inside = expanded(folder.text)
        yield Candidate(folder.text.rstrip("/")) if (inside / RUN_JSON).exists() else folder


def _newest_with(name: str, typed: str) -> Iterator[Candidate]:
    """Yield the outermost folders under ``outputs`` that contain a file of that name, newest first."""
    found = []
    for folder, children, files in os.walk("outputs"):
        if name in files:
            children.clear()
            found.append(folder)
        children[:] = [child for child in children if not child.startswith(".")]
    found.sort(key=lambda folder: Path(folder).stat().st_mtime, reverse=True)
    yield from (Candidate(folder) for folder in found[:_MOST_RUNS] if folder.startswith(typed))
