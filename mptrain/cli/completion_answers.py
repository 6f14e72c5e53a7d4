"""What could stand at the end of a command line: commands, their flags, runs, and overrides.

Which words a command takes, its usage in the help says. Imports neither torch nor Hydra.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mptrain.cli.completion_overrides import Candidate, Overrides, paths
from mptrain.cli.help import DESCRIPTIONS, OPTIONS, USAGE
from mptrain.config import location
from mptrain.config.catalogue import Catalogue, Option
from mptrain.errors import MptrainError

#: Flags that take the next word, and what may stand there.
_TAKE = {
    "--config-dir": "FOLDER",
    "-cd": "FOLDER",
    "--config-name": "TOP",
    "-cn": "TOP",
    "--cfg": "job|hydra|all",
    "-c": "job|hydra|all",
    "--output": "PATH",
    "--sweep": "SWEEP",
    "--jobs": "",
    "--launcher": "PATH",
    "--step": "",
    "--learner": "",
    "--package": "",
    "-p": "",
}

#: What the words behind ``replay RUN`` are about.
_REPLAYED = ("scaler", "learners")

#: Runs that are offered at most: the newest.
_MOST_RUNS = 200


def answers(before: Sequence[str], current: str) -> list[Candidate]:
    """The words that the one at the cursor could become.

    Args:
        before: The words before it, without the program's name.
        current: What is typed of it.
    """
    try:
        found = list(_Line(before).candidates(current))
    except (MptrainError, OSError):  # a damaged run or installation: nothing can be said here
        return []
    return [candidate for candidate in dict.fromkeys(found) if candidate.text.startswith(current)]


class _Line:
    """The words before the cursor, sorted."""

    def __init__(self, before: Sequence[str]) -> None:
        self.folders: list[Path] = []
        self.top = "train"
        self.plain: list[str] = []
        self.awaited: str | None = None
        for word in before:
            flag, equals, value = word.partition("=")
            if self.awaited is not None:
                self._note(self.awaited, word)
                self.awaited = None
            elif flag in _TAKE and equals:
                self._note(flag, value)
            elif flag in _TAKE:
                self.awaited = flag
            elif not word.startswith("-"):
                self.plain.append(word)
        self.command = self.plain[0] if self.plain and self.plain[0] in DESCRIPTIONS else ""

    def _note(self, flag: str, value: str) -> None:
        if flag in ("--config-dir", "-cd"):
            self.folders.append(Path(value).expanduser())
        elif flag in ("--config-name", "-cn"):
            self.top = value.removesuffix(".yaml")

    def candidates(self, current: str) -> Iterator[Candidate]:
        """Unfiltered."""
        flag, equals, value = current.partition("=")
        if self.awaited is not None:
            yield from self._of_form(_TAKE[self.awaited], current)
        elif equals and flag in _TAKE:
            for found in self._of_form(_TAKE[flag], value):
                yield Candidate(f"{flag}={found.text}", found.about)
        elif current.startswith("-"):
            yield from _flags(self.command)
        else:
            if not self.plain:
                yield from (Candidate(name, about) for name, about in _summaries().items())
            yield from self._words(current)

    def _words(self, current: str) -> Iterator[Candidate]:
        """What the command's usage has at this place."""
        forms = _forms(self.command or "train")
        taken = self.plain[1:] if self.command else self.plain
        if not forms:
            return
        if forms[0].startswith("RUN") and _takes_configuration(self.command):  # one or the other
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
        """The words of one place: ``RUN|last``, ``GROUP``, ``job|hydra|all``."""
        for part in filter(None, form.split("|")):
            match part:
                case "RUN":
                    yield from _runs(current)
                case "SWEEP":
                    yield from _sweeps(current)
                case "RECIPE":
                    yield from _recipes()
                    yield from paths(current, folders_only=True)
                case "GROUP":
                    catalogue = self._catalogue()
                    yield from (Candidate(group, catalogue.comment(group)) for group in catalogue.groups)
                case "COMMAND":
                    yield from (Candidate(name, about) for name, about in _summaries().items())
                case "TOP":
                    yield from (Candidate(name) for name in self._catalogue().tops)
                case "FOLDER" | "PATH":
                    yield from paths(current, folders_only=part == "FOLDER")
                case _:
                    yield Candidate(part)

    def _catalogue(self) -> Catalogue:
        return Catalogue([location.configs(), *(folder for folder in self.folders if folder.is_dir())], self.top)


def _forms(command: str) -> list[str]:
    """The places of a command's words as its usage names them, without flags: ``["RUN|last", "KEY=VALUE"]``."""
    for usage, _ in USAGE:
        match = re.match(rf"mptrain \[?{command}\]?(?: |$)(?P<rest>.*)", usage)
        if match:
            plain = re.sub(r"\[--[^]]*\]", "", match["rest"])
            return re.findall(r"[A-Za-z][\w|=]*", plain)
    return []


def _takes_configuration(command: str) -> bool:
    """Whether a command's usage begins, in one of its lines, with a configuration."""
    return any(usage.startswith(f"mptrain {command} KEY=VALUE") for usage, _ in USAGE)


def _summaries() -> dict[str, str]:
    """Each command with its line in the help."""
    found = dict.fromkeys(DESCRIPTIONS, "")
    for usage, about in USAGE:
        if (match := re.match(r"mptrain \[?(\w+)", usage)) and match[1] in found:
            found[match[1]] = about
    return found


def _flags(command: str) -> Iterator[Candidate]:
    """The flags that the help of a command names."""
    if command in ("", "train"):
        for names, about in OPTIONS:
            for name in names.split(", "):
                yield Candidate(name.split(" ")[0], about)
            yield from (Candidate(name) for name in re.findall(r"--[\w-]+", about))
    else:
        texts = [usage for usage, _ in USAGE if usage.startswith(f"mptrain {command} ")]
        for name in re.findall(r"--[\w-]+", " ".join([*texts, DESCRIPTIONS[command]])):
            yield Candidate(name)
        yield Candidate("--traceback")
    yield Candidate("--help")


def _saved(run: str) -> Path | None:
    """The saved configuration of a run."""
    from mptrain.runlog.directory import find_run

    return find_run(str(Path(run).expanduser())).paths.config


def _recipes() -> Iterator[Candidate]:
    """Those that come with mptrain, with their titles."""
    for path in sorted(location.recipes().glob("*/recipe.yaml")):
        entries = Option("recipes", path.parent.name, path).entries
        yield Candidate(path.parent.name, next((one.value for one in entries if one.key == "recipes.title"), ""))


def _runs(typed: str) -> Iterator[Candidate]:
    """Runs below ``outputs``, newest first; and folders, for those that are elsewhere."""
    from mptrain.runlog.layout import RUN_JSON

    yield from (Candidate(path) for path in _newest(_folders_with(RUN_JSON, "outputs")) if path.startswith(typed))
    for folder in paths(typed, folders_only=True):
        inside = Path(folder.text).expanduser()
        yield Candidate(folder.text.rstrip("/")) if (inside / RUN_JSON).exists() else folder


def _sweeps(typed: str) -> Iterator[Candidate]:
    """Sweeps below ``outputs``, newest first."""
    from mptrain.runlog.sweeps import SWEEP_JSON

    yield from (Candidate(path) for path in _newest(_folders_with(SWEEP_JSON, "outputs")) if path.startswith(typed))


def _folders_with(name: str, root: str) -> Iterator[str]:
    """The outermost folders that hold a file of that name."""
    for folder, children, files in os.walk(root):
        if name in files:
            children.clear()
            yield folder
        children[:] = [child for child in children if not child.startswith(".")]


def _newest(folders: Iterable[str]) -> list[str]:
    return sorted(folders, key=lambda folder: Path(folder).stat().st_mtime, reverse=True)[:_MOST_RUNS]
