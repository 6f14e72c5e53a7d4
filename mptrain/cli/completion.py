"""``mptrain completion SHELL``: command-line completion for bash, zsh and fish.

The scripts in ``shells/`` call ``mptrain completion query SHELL ...`` on every TAB. The answer must come within a tenth
of a second, so this module and everything that it imports must not import torch or Hydra. The arguments of a command
are taken from its usage line in the help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mptrain.cli.command_line import ALIASES, take_options
from mptrain.cli.completion_overrides import Candidate, Overrides, paths
from mptrain.cli.help import OPTIONS, USAGE
from mptrain.config import location
from mptrain.config.catalogue import Catalogue, Option
from mptrain.errors import EXIT_OK, MptrainError, UsageError, did_you_mean

SHELLS = ("bash", "zsh", "fish")

#: Flags with a value, and the form of the value.
_TAKE = {
    "--config-dir": "FOLDER",
    "--config-name": "TOP",
    "--cfg": "job|hydra|all",
    "--output": "PATH",
    "--sweep": "SWEEP",
    "--launcher": "PATH",
    **dict.fromkeys(("--jobs", "--step", "--learner", "--package"), ""),
}

#: Prefixes of the overrides that ``replay RUN`` accepts.
_REPLAYED = ("scaler", "learners")

#: Maximum number of runs that are offered, newest first.
_MOST_RUNS = 200

#: Characters that are special to bash.
_ESCAPED = frozenset(" \t\n\\'\"`$&|;<>()[]{}*?!#")


def script(shell: str) -> str:
    """Return the text of the script that sets up TAB completion of ``mptrain`` in a shell.

    Args:
        shell: One of `SHELLS`.
    """
    return (Path(__file__).parent / "shells" / f"completion.{shell}").read_text(encoding="utf-8")


def completion(words: Sequence[str], texts: Mapping[str, str]) -> int:
    """Print a shell's completion script, or answer ``query SHELL ...`` with the completions of a command line.

    The scripts send such a query at every TAB. The answer has one completion per line; for zsh and fish, its
    description follows after a tab.

    Args:
        words: ``bash``, ``zsh`` or ``fish``; or a query. For bash, a query has two more arguments: the line up to the
            cursor, and the characters at which readline starts a new word. For zsh and fish, it has the words before
            the cursor and the word at the cursor. In fish that word follows the last ``--``, includes its quotes, and
            is missing if it is empty.
        texts: Help text of each command.

    Returns:
        The exit code 0.

    Raises:
        UsageError: The shell is unknown.
    """
    if len(words) == 1 and words[0] in SHELLS:
        print(script(words[0]), end="")
        return EXIT_OK
    if len(words) < 2 or words[0] != "query" or words[1] not in SHELLS:
        what = "completion needs the name of a shell"
        if words:
            what = f"there is no completion for '{' '.join(words)}'"
        guess = did_you_mean(words[0], SHELLS) if words else ""
        raise UsageError(what, f"did you mean {guess}?" if guess else f"supported shells are {', '.join(SHELLS)}")
    _, shell, *rest = words
    if shell == "bash":  # readline replaces only the text after the last = or :
        line = split(rest[0], rest[1])
        found = [escaped(one.text[line.kept :], line.quote) for one in answers(line.words[1:], line.current, texts)]
    else:
        before, current = rest[:-1], rest[-1]
        if shell == "fish":
            place = len(rest) - 1 - rest[::-1].index("--")
            before, current = rest[:place], split("".join(rest[place + 1 :]), "").current
        found = [f"{one.text}\t{one.about}" for one in answers(before, current, texts)]
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


def escaped(text: str, quote: str) -> str:
    """Escape characters of a completion that are special to bash with backslashes.

    Args:
        text: The completion.
        quote: Quote character that is open at the cursor; the text is unchanged then.
    """
    if quote:
        return text
    return "".join(f"\\{letter}" if letter in _ESCAPED else letter for letter in text)


def answers(before: Sequence[str], current: str, texts: Mapping[str, str]) -> list[Candidate]:
    """Return the shell completions of the word at the cursor of an ``mptrain`` command line.

    Args:
        before: Words before it, without the program's name.
        current: The part of the word that is typed.
        texts: Help text of each command, in which its flags are found.
    """
    try:
        found = list(_Words(before, texts).candidates(current))
    except (MptrainError, OSError):  # a damaged run or installation; completion cannot print errors
        return []
    return [candidate for candidate in dict.fromkeys(found) if candidate.text.startswith(current)]


class _Words:
    """Completer of a command line: the words before the cursor, parsed into command, options and other arguments."""

    def __init__(self, before: Sequence[str], texts: Mapping[str, str]) -> None:
        self.texts = texts
        last = ALIASES.get(before[-1], before[-1]) if before else ""
        self.awaited = last if last in _TAKE else None  # option whose value is being typed
        rest, found = take_options(before[:-1] if self.awaited else before, _TAKE)
        self.folders = [Path(folder).expanduser() for folder in found.get("--config-dir", ())]
        self.top = found.get("--config-name", ["train"])[-1].removesuffix(".yaml")
        self.plain = [word for word in rest if not word.startswith("-")]
        self.command = self.plain[0] if self.plain and self.plain[0] in USAGE else ""

    def candidates(self, current: str) -> Iterator[Candidate]:
        """Yield the completions of the word at the cursor, not yet filtered by the part that is typed."""
        flag, equals, value = current.partition("=")
        if self.awaited is not None:
            yield from self._of_form(_TAKE[self.awaited], current)
        elif equals and (long := ALIASES.get(flag, flag)) in _TAKE:
            for found in self._of_form(_TAKE[long], value):
                yield Candidate(f"{flag}={found.text}", found.about)
        elif current.startswith("-"):
            yield from self._flags()
        else:
            if not self.plain:
                yield from self._of_form("COMMAND", current)
            yield from self._words(current)

    def _words(self, current: str) -> Iterator[Candidate]:
        """Yield the arguments that the command's usage line has at this position."""
        usage = USAGE[self.command or "train"]
        forms = _forms(usage[0][0])
        taken = self.plain[1:] if self.command else self.plain
        if not forms:
            return
        if forms[0].startswith("RUN") and len(usage) > 1:  # KEY=VALUE is allowed in place of the run
            if taken and "=" in taken[0]:
                forms = ["KEY=VALUE"]
            elif not taken:
                yield from Overrides(self._catalogue(), taken, None).candidates(current)
        form = forms[min(len(taken), len(forms) - 1)]
        if "KEY=VALUE" in form:
            run = taken[0] if forms[0].startswith("RUN") else None
            saved = _saved(run) if run else None
            for found in Overrides(self._catalogue(), taken, saved).candidates(current):
                if self.command != "replay" or found.text.startswith(_REPLAYED):
                    yield found
        elif len(taken) < len(forms):
            yield from self._of_form(form, current)

    def _of_form(self, form: str, current: str) -> Iterator[Candidate]:
        """Yield the candidates of one usage placeholder: ``RUN|last``, ``GROUP``, ``job|hydra|all``."""
        for part in filter(None, form.split("|")):
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
                    yield from (Candidate(name, lines[0][1]) for name, lines in USAGE.items())
                case "TOP":
                    yield from (Candidate(name) for name in self._catalogue().tops)
                case "FOLDER" | "PATH":
                    yield from paths(current, folders_only=part == "FOLDER")
                case _:
                    yield Candidate(part)

    def _catalogue(self) -> Catalogue:
        return Catalogue([location.configs(), *(folder for folder in self.folders if folder.is_dir())], self.top)

    def _flags(self) -> Iterator[Candidate]:
        """Yield the flags that appear in the help of the command."""
        if self.command in ("", "train"):
            for names, about in OPTIONS:
                for name in names.split(", "):
                    yield Candidate(name.split(" ")[0], about)
                yield from map(Candidate, re.findall(r"--[\w-]+", about))
        else:
            usage = (line for line, _ in USAGE[self.command])
            found = re.findall(r"--[\w-]+", " ".join([*usage, self.texts[self.command]]))
            yield from map(Candidate, [*found, "--traceback"])
        yield Candidate("--help")


def _forms(usage: str) -> list[str]:
    """Return the positional placeholders of a usage line: ``["RUN|last", "KEY=VALUE"]``."""
    words = re.sub(r"^mptrain \S+|\[--[^]]*\]", "", usage)
    return re.findall(r"[A-Za-z][\w|=/]*", words)


def _saved(run: str) -> Path:
    """Return the path of a run's saved configuration."""
    from mptrain.runlog.directory import find_run

    return find_run(str(Path(run).expanduser())).paths.config


def _recipes() -> Iterator[Candidate]:
    """Yield the recipes included in mptrain, with their titles."""
    for path in sorted(location.recipes().glob("*/recipe.yaml")):
        entries = Option("recipes", path.parent.name, path).entries
        yield Candidate(path.parent.name, next((one.value for one in entries if one.key == "recipes.title"), ""))


def _runs(typed: str) -> Iterator[Candidate]:
    """Yield the runs under ``outputs``, newest first; then folders, for runs stored elsewhere."""
    from mptrain.runlog.run_paths import RUN_JSON

    yield from _newest_with(RUN_JSON, typed)
    for folder in paths(typed, folders_only=True):
        inside = Path(folder.text).expanduser()
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
