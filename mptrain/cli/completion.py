"""``mptrain completion SHELL``: command-line completion for bash, zsh and fish, also of keys and values.

Everything comes from the catalogue of YAML files. The values of a key are those that its comment lists as ``a|b|c``;
or true and false, if its value is one of them; or null, if its value or its comment is or mentions it.

The scripts in ``shells/`` call ``mptrain completion query SHELL ...`` on every TAB. The answer must come within a tenth
of a second, so this module and everything that it imports must not import torch or Hydra. The arguments and options of
a command are those of the table (`mptrain.cli.commands`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mptrain.cli.command import GENERAL, Command, Option, read_options
from mptrain.config.catalogue import (
    RECHOSEN,
    Catalogue,
    ConfigOption,
    Entry,
    configs_folder,
    read_entries,
    recipes_folder,
)
from mptrain.system.errors import EXIT_OK, MptrainError, UsageError, suggest
from mptrain.system.files import expanded, read_text


class Candidate(NamedTuple):
    """A word that the shell can complete to, and its description.

    Attributes:
        text: The whole word; after one that ends with ``=``, ``.``, ``/`` or ``,`` the shell appends no space.
        about: Description that zsh and fish show; may be empty.
    """

    text: str
    about: str = ""


_CHOOSES = re.compile(r"^\s*- override /(?P<group>[\w/]+): *(?P<option>\S+)")
_HIDDEN = re.compile(r"(^|\.)_target_$|^model\.defaults\.|^chosen\.")

#: Last components of keys whose values are paths.
_PATHS = ("path", "root", "file", "folder", "weights")

#: Values of a key in its comment.
_LISTED = re.compile(r"(?<!\S)[\w-]+(?:\|[\w-]+)+(?![\w|-])")


class Overrides:
    """Shell completer of the ``KEY=VALUE`` overrides of a command line.

    Args:
        catalogue: Available groups and options.
        before: Overrides that the command line already contains.
        saved: ``config.yaml`` of the run that the overrides apply to; None for a new run.
    """

    def __init__(self, catalogue: Catalogue, before: Sequence[str], saved: Path | None = None) -> None:
        self._catalogue = catalogue
        self._before = before
        self._saved = saved

    def candidates(self, current: str) -> Iterator[Candidate]:
        """Yield the completions of an override: names of groups and keys, or values after ``=``.

        Args:
            current: The part of the override that is typed.
        """
        sign = re.match(r"[+~]*", current)
        prefix = sign[0] if sign else ""
        name, equals, value = current[len(prefix) :].partition("=")
        if equals:
            for candidate in self._values(name, value):
                yield Candidate(f"{prefix}{name}={candidate.text}", candidate.about)
            return
        for candidate in self._names(name, "" if prefix == "~" else "="):
            yield Candidate(prefix + candidate.text, candidate.about)

    def _names(self, typed: str, end: str) -> Iterator[Candidate]:
        """Yield groups, and keys up to their next dot."""
        for group in self._groups:
            if group.startswith(typed):
                yield Candidate(group + end, self._catalogue.comment(group))
        sections = set()
        for key, entry in self._entries.items():
            if not key.startswith(typed):
                continue
            section, dot, _ = key[len(typed) :].partition(".")
            if not dot:
                yield Candidate(key + end, "  ".join(filter(None, [entry.value, entry.comment])))
            elif section not in sections:
                sections.add(section)
                yield Candidate(f"{typed}{section}.")

    def _values(self, name: str, typed: str) -> Iterator[Candidate]:
        earlier, comma, _ = typed.rpartition(",")
        listed = list(self._options(name) if name in self._groups else map(Candidate, self._choices(name)))
        for text, about in listed:
            if text not in earlier.split(","):
                yield Candidate(earlier + comma + text, about)
        if name not in self._groups and (
            name.rpartition(".")[2] in _PATHS or typed.startswith(("/", "./", "../", "~/"))
        ):
            yield from paths(typed)

    def _options(self, group: str) -> Iterator[Candidate]:
        yield from (Candidate(option.name, option.summary) for option in self._catalogue.groups[group].values())
        if self._catalogue.defaults.get(group, "") is None:
            yield Candidate("null", "none of them")

    def _choices(self, name: str) -> list[str]:
        """Return the enumerated values of a key, by the comments of the chosen options or else of any option."""
        chosen = self._entries.get(name)
        others = self._catalogue.groups.get(name.partition(".")[0], {}).values()
        known = [*([chosen] if chosen else []), *(e for option in others for e in option.entries if e.key == name)]
        for entry in (*known, *(e for e in self._catalogue.root_entries() if e.key == name)):
            match = _LISTED.search(entry.comment)
            if match:
                return match[0].split("|")
            if entry.value in ("true", "false"):
                return ["true", "false"]
            if entry.value == "null" or re.search(r"\bnull\b", entry.comment):
                return ["null"]
        return []

    @property
    def _groups(self) -> list[str]:
        """Groups that can be chosen."""
        return [group for group in self._catalogue.groups if self._saved is None or group in RECHOSEN]

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        """Keys of the chosen options, by dotted name; the first entry with a comment takes precedence."""
        options = self._chosen()
        others = (
            self._catalogue.root_entries() if self._saved is None else self._kept({option.group for option in options})
        )
        entries: dict[str, Entry] = {}
        for entry in (*others, *(entry for option in options for entry in option.entries)):
            known = entries.get(entry.key)
            if not _HIDDEN.search(entry.key):
                entries[entry.key] = entry if known is None or not known.comment else known
        return entries

    def _kept(self, replaced: set[str]) -> list[Entry]:
        """Return the keys of the saved run, without those of groups that the line replaces."""
        try:
            lines = read_text(self._saved).splitlines() if self._saved else []
        except (OSError, UnicodeDecodeError):
            lines = []
        return [entry for entry in read_entries(lines) if entry.key.split(".")[0] not in replaced]

    def _chosen(self) -> list[ConfigOption]:
        """Return the options that the line gives, for a new run the default ones, and those that they select."""
        groups = self._catalogue.groups
        words = [word.lstrip("+").partition("=") for word in self._before]
        asked = {name: value.split(",") for name, equals, value in words if equals and name in groups}
        defaults = {group: [name] for group, name in self._catalogue.defaults.items() if name and not self._saved}
        selection = defaults | asked
        rest = [(group, name) for group in asked | defaults for name in selection[group]]
        followed = set(rest)
        while rest:
            group, name = rest.pop(0)
            option = groups.get(group, {}).get(name)
            for match in filter(None, map(_CHOOSES.match, option.lines if option else ())):
                chosen = match["group"], match["option"]
                if match["group"] not in asked and chosen not in followed:
                    selection[match["group"]] = [match["option"]]
                    followed.add(chosen)
                    rest.append(chosen)
        return [
            groups[group][name]
            for group, names in selection.items()
            for name in dict.fromkeys(names)
            if name in groups.get(group, {})
        ]


def paths(typed: str, *, folders_only: bool = False) -> Iterator[Candidate]:
    """Yield the files and folders that complete a path for the shell; a folder ends with a slash.

    Args:
        typed: The part of the path that is typed; hidden files need a leading dot.
        folders_only: Whether to leave out files.
    """
    folder, slash, start = typed.rpartition("/")
    directory = expanded(folder + slash) if folder or slash else Path()
    try:
        inside = sorted(directory.iterdir())
    except OSError:
        return
    for path in inside:
        if not slash and path.name.startswith("~"):  # which would be the home folder of somebody
            continue
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            if path.is_dir():
                yield Candidate(f"{folder}{slash}{path.name}/")
            elif not folders_only:
                yield Candidate(f"{folder}{slash}{path.name}")


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
        rest = [candidate.text[line.kept :] for candidate in answers(line.words[1:], line.current, commands)]
        completions = [text for text in rest if _ALIVE.isdisjoint(text)] if line.quote else [*map(escaped, rest)]
    else:
        before, current = rest[:-1], rest[-1]
        if shell == "fish":
            index = len(rest) - 1 - rest[::-1].index("--")
            before, current = rest[:index], split("".join(rest[index + 1 :]), "").current
        completions = [f"{candidate.text}\t{candidate.about}" for candidate in answers(before, current, commands)]
    print("".join(f"{completion}\n" for completion in completions), end="")
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
        candidates = list(_Words(before, commands).candidates(current))
    except (MptrainError, OSError):  # a damaged run or installation; completion cannot print errors
        return []
    fitting = [
        candidate
        for candidate in dict.fromkeys(candidates)
        if candidate.text.startswith(current) and candidate.text.isprintable()
    ]
    # Lines and tabs part the answers to the shell.
    return [
        Candidate(candidate.text, "".join(c if c.isprintable() else " " for c in candidate.about))
        for candidate in fitting
    ]


class _Words:
    """Completer of a command line: the words before the cursor, parsed into command, options and other arguments."""

    def __init__(self, before: Sequence[str], commands: Mapping[str, Command]) -> None:
        self.commands = commands
        valued = {option.name: option for command in commands.values() for option in command.options if option.value}
        self.valued = {
            name: option
            for option in valued.values()
            for name in (option.name, option.short)
            if name and not option.alone
        }
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
            for candidate in self._values(self.valued[name], value):
                yield Candidate(f"{name}={candidate.text}", candidate.about)
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
        position = len(self.taken)
        argument = first[min(position, len(first) - 1)]
        if argument.key and self.command.takes_keys:
            saved = _saved(self.taken[0]) if has_run else None
            for candidate in Overrides(self._catalogue(), self.taken, saved).candidates(current):
                if self.command.name != "replay" or candidate.text.startswith(_REPLAYED):
                    yield candidate
        elif not argument.key and (position < len(first) or argument.repeats):
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
                            yield from (
                                Candidate(f"{group}/{option.name}", option.summary) for option in options.values()
                            )
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
        return Catalogue([configs_folder(), *(folder for folder in folders if folder.is_dir())], top)

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
    for path in sorted(recipes_folder().glob("*/recipe.yaml")):
        entries = ConfigOption("recipes", path.parent.name, path).entries
        yield Candidate(path.parent.name, next((entry.value for entry in entries if entry.key == "recipes.title"), ""))


def _runs(typed: str) -> Iterator[Candidate]:
    """Yield the runs under ``outputs``, newest first; then folders, for runs stored elsewhere."""
    from mptrain.runlog.run_paths import RUN_JSON

    yield from _newest_with(RUN_JSON, typed)
    for folder in paths(typed, folders_only=True):
        inside = expanded(folder.text)
        yield Candidate(folder.text.rstrip("/")) if (inside / RUN_JSON).exists() else folder


def _newest_with(name: str, typed: str) -> Iterator[Candidate]:
    """Yield the outermost folders under ``outputs`` that contain a file of that name, newest first."""
    folders = []
    for folder, children, files in os.walk("outputs"):
        if name in files:
            children.clear()
            folders.append(folder)
        children[:] = [child for child in children if not child.startswith(".")]
    folders.sort(key=lambda folder: Path(folder).stat().st_mtime, reverse=True)
    yield from (Candidate(folder) for folder in folders[:_MOST_RUNS] if folder.startswith(typed))
