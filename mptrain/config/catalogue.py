"""Catalogue of groups, options, keys and their comments, read from the YAML files as text.

Help and listing must be much faster than composing, so this module reads lines instead of building configurations,
and imports nothing heavier than the standard library. It understands the block style of the files in ``configs/``.
It skips lines that it does not understand, because its results are only displayed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mptrain.files import read_text

#: Groups whose option may change when a run resumes; each maps to the groups that are reset with it.
RECHOSEN: dict[str, tuple[str, ...]] = {
    "precision": ("scaler",),
    "scaler": (),
    "optimizer": (),
    "schedule": (),
    "logger": (),
    "diagnostics": (),
    "distributed": (),
}

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w.$-]+):(?:\s+(?P<value>.*))?$")
_CHOICE = re.compile(r"^\s*- (?P<group>[\w/]+): *(?P<option>\S+)")
_FACT = re.compile(r"^# (?P<name>Size|Needs|Tasks): (?P<words>.+)$")
_TASK = re.compile(r"^\s*- override /task: *(?P<option>[\w.-]+)")
_COMMENT = re.compile(r"\s+#\s?(?P<text>.*)$")


@dataclass(frozen=True)
class Entry:
    """A key in a file: its dotted path inside the file, its value as written, and the comment on its line."""

    key: str
    value: str
    comment: str


@dataclass(frozen=True)
class Option:
    """An option: one YAML file of a group.

    Attributes:
        group: The folder, with ``/`` between nested folders; empty for a top-level file.
        name: The file's name without ``.yaml``.
        path: Path of the file.
    """

    group: str
    name: str
    path: Path

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Lines of the file; empty if the file cannot be read, which composing reports."""
        try:
            return tuple(read_text(self.path).splitlines())
        except (OSError, UnicodeDecodeError):
            return ()

    @cached_property
    def summary(self) -> str:
        """The first line of the comment at the top of the file."""
        for line in self.lines:
            if not line.startswith("#"):
                return ""
            if "@package" not in line:
                return line.lstrip("# ").strip()
        return ""

    @cached_property
    def facts(self) -> dict[str, str]:
        """Lines ``NAME: WORDS`` of the comment at the top of the file, by name: ``size``, ``needs``, ``tasks``."""
        found: dict[str, str] = {}
        for line in self.lines:
            if not line.startswith("#"):
                break
            if match := _FACT.match(line):
                found[match["name"].lower()] = match["words"].rstrip(". ")
        return found

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that a data set or a model is for: those in its comment, else those in its defaults list."""
        if said := self.facts.get("tasks", ""):
            return tuple(said.split(", "))
        return tuple(match["option"] for line in self.lines if (match := _TASK.match(line)))

    @cached_property
    def is_global(self) -> bool:
        """True if the file's keys are relative to the top of the configuration, not to its group."""
        return any(re.match(r"#\s*@package\s+_global_", line) for line in self.lines[:5])

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every key that has a value, with its full dotted path, in the order of the file."""
        prefix = "" if self.is_global or not self.group else self.group.replace("/", ".") + "."
        entries = read_entries(self.lines)
        return tuple(Entry(prefix + entry.key, entry.value, entry.comment) for entry in entries)

    @cached_property
    def keys(self) -> set[str]:
        """Full dotted paths of all keys that have a value."""
        return {entry.key for entry in self.entries}


class Catalogue:
    """All groups and options in one or more folders; of files with the same name, the first folder's is used.

    Args:
        folders: Folders laid out like ``configs/``.
        root: Name of the top-level file with the defaults list.
    """

    def __init__(self, folders: Sequence[Path], root: str = "train") -> None:
        options: dict[str, dict[str, Option]] = {}
        for folder in folders:
            for path in sorted(folder.rglob("*.yaml")):
                group = path.parent.relative_to(folder).as_posix()
                group = "" if group == "." else group
                if group.split("/")[0] != "hydra":
                    options.setdefault(group, {}).setdefault(path.stem, Option(group, path.stem, path))
        tops = options.pop("", {})
        self.tops = tops
        self.root = tops.get(root)
        lines = self.root.lines if self.root else ()
        #: Maps group to its default option in the top-level file, None for ``null``; in the order of the file.
        self.defaults: dict[str, str | None] = {}
        for line in lines:
            if match := _CHOICE.match(line):
                option = match["option"]
                self.defaults[match["group"]] = None if option == "null" else option
        order = [group for group in self.defaults if group in options]
        order += [group for group in sorted(options) if group not in self.defaults]
        #: True if a folder of the user's own is among the folders.
        self.has_own_folders = len(folders) > 1
        #: Maps group to its options by name.
        self.groups: dict[str, dict[str, Option]] = {group: options[group] for group in order}

    def root_entries(self) -> tuple[Entry, ...]:
        """Return the keys of the top-level file, without its defaults list."""
        return self.root.entries if self.root else ()

    def options(self, name: str) -> list[Option]:
        """Return the options that match ``NAME`` or ``GROUP=NAME``; several if several groups have an option NAME."""
        group, equals, option = name.rpartition("=")
        return [
            options[option]
            for other, options in self.groups.items()
            if option in options and (not equals or other == group)
        ]

    def options_with(self, key: str) -> list[Option]:
        """Return the options, in the group of this full dotted key, whose file defines the key."""
        group = key.split(".")[0]
        return [option for option in self.groups.get(group, {}).values() if key in option.keys]

    def usual_keys(self) -> list[str]:
        """Return the groups, and the keys of a run with all default options."""
        chosen = [self.groups[group].get(name or "") for group, name in self.defaults.items() if group in self.groups]
        entries = [*self.root_entries(), *(entry for option in chosen if option for entry in option.entries)]
        keys = [entry.key for entry in entries if "._target_" not in entry.key and ".defaults." not in entry.key]
        return [*self.groups, *dict.fromkeys(keys)]

    def about(self, key: str, chosen: Mapping[str, str]) -> str:
        """Return the comment on the line of a key.

        Args:
            key: Dotted key of the configuration.
            chosen: Maps group to option.
        """
        group = key.split(".")[0]
        option = self.groups.get(group, {}).get(chosen.get(group, ""))
        entries = option.entries if option else self.root_entries()
        return next((entry.comment for entry in entries if entry.key == key), "")

    def comment(self, group: str) -> str:
        """Return the comment on the line of a group in the defaults list."""
        for line in self.root.lines if self.root else ():
            match = _CHOICE.match(line)
            if match and match["group"] == group and (comment := _COMMENT.search(line)):
                return comment["text"].strip()
        return ""


def read_entries(lines: Sequence[str]) -> list[Entry]:
    """Return the keys of a YAML text that have a value, with dotted paths; the ``defaults`` list is left out."""
    entries: list[Entry] = []
    parents: list[tuple[int, str]] = []
    for line in lines:
        bare, comment = split_comment(line)
        match = _KEY.match(bare)
        if not match:
            continue
        indent = len(match["indent"])
        while parents and parents[-1][0] >= indent:
            parents.pop()
        value = (match["value"] or "").strip()
        path = [name for _, name in parents] + [match["key"]]
        if value and path[0] != "defaults":
            entries.append(Entry(".".join(path), value, comment))
        else:
            parents.append((indent, match["key"]))
    return entries


def split_comment(line: str) -> tuple[str, str]:
    """Split a line of YAML into its content and its comment; a ``#`` inside quotes starts no comment."""
    if line.lstrip().startswith("#"):
        return "", line.lstrip("# ").strip()
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and line[index - 1].isspace():
            return line[:index].rstrip(), line[index + 1 :].strip()
    return line.rstrip(), ""
