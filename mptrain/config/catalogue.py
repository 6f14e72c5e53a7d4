"""Folders of configuration files and recipes, and the catalogue of groups, options, keys and comments in them.

Help and listing must be much faster than composing, so this module reads lines instead of building configurations, and
imports nothing heavier than the standard library. It understands the block style of the files in ``configs/``. It skips
lines that it does not understand, because its results are only displayed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mptrain.system.errors import EnvironmentRefused
from mptrain.system.files import read_text

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
    """A key with a value in a YAML configuration file.

    ``key`` is dotted and relative to the file, ``value`` is as written, and ``comment`` is that on the
    line, without ``#``.
    """

    key: str
    value: str
    comment: str


#: Keys that every option of a group has besides those in its file.
SHARED = {
    "model": (
        Entry("model.weights", "null", "initial weights: a weights file, or a run"),
        Entry("model.freeze", "[]", "patterns of parameters that are not trained, such as [conv1.*,layer1.*]"),
        Entry("model.facts", "null", "facts of the data set for a function with **kwargs, such as [num_classes]"),
    ),
    "optimizer": (
        Entry("optimizer.groups", "[]", 'own rates and decays: [{match: "head.*", lr_factor: 10, weight_decay: 0}]'),
        Entry("optimizer.layer_decay", "null", "factor of the rate from one layer to the one before, above 0, up to 1"),
    ),
}


@dataclass(frozen=True)
class ConfigOption:
    """An option of a configuration group: one YAML file, such as ``model/resnet50.yaml``.

    ``group`` is the folder, with ``/`` between nested folders; empty for a top-level file.
    """

    group: str
    name: str
    path: Path

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Lines of the YAML file; empty if it cannot be read, an error that composing the configuration reports."""
        try:
            return tuple(read_text(self.path).splitlines())
        except (OSError, UnicodeDecodeError):
            return ()

    @cached_property
    def summary(self) -> str:
        """One-line description of the option: the first line of the comment at the top of the file; empty for none."""
        for line in self.lines:
            if not line.startswith("#"):
                return ""
            if "@package" not in line:
                return line.lstrip("# ").strip()
        return ""

    @cached_property
    def facts(self) -> dict[str, str]:
        """Lines ``Size:``, ``Needs:`` and ``Tasks:`` of the comment at the top of the file, by lower-case name."""
        facts: dict[str, str] = {}
        for line in self.lines:
            if not line.startswith("#"):
                break
            if match := _FACT.match(line):
                facts[match["name"].lower()] = match["words"].rstrip(". ")
        return facts

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that a data set or a model is for, from its comment or else its defaults list."""
        if tasks := self.facts.get("tasks", ""):
            return tuple(tasks.split(", "))
        return tuple(match["option"] for line in self.lines if (match := _TASK.match(line)))

    @cached_property
    def is_global(self) -> bool:
        """True if the file's keys are relative to the top of the configuration, not to its group."""
        return any(re.match(r"#\s*@package\s+_global_", line) for line in self.lines[:5])

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every key of the file that has a value, in order, with its full dotted path in the configuration."""
        prefix = "" if self.is_global or not self.group else self.group.replace("/", ".") + "."
        entries = read_entries(self.lines)
        return tuple(Entry(prefix + entry.key, entry.value, entry.comment) for entry in entries)

    @cached_property
    def keys(self) -> set[str]:
        """Full dotted paths, in the configuration, of all keys of the file that have a value."""
        return {entry.key for entry in self.entries}


class Catalogue:
    """All configuration groups and their options in one or more folders of YAML files.

    Of files with the same name in the same group, the first folder's is used. The folders are laid out like
    ``configs/``: top-level files, and a folder per group with a file per option. ``root`` is the top-level file with
    the defaults list.
    """

    def __init__(self, folders: Sequence[Path], root: str = "train") -> None:
        options: dict[str, dict[str, ConfigOption]] = {}
        for folder in folders:
            for path in sorted(folder.rglob("*.yaml")):
                group = path.parent.relative_to(folder).as_posix()
                group = "" if group == "." else group
                if group.split("/")[0] != "hydra":
                    options.setdefault(group, {}).setdefault(path.stem, ConfigOption(group, path.stem, path))
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
        self.groups: dict[str, dict[str, ConfigOption]] = {group: options[group] for group in order}

    def root_entries(self) -> tuple[Entry, ...]:
        """Return the keys of the top-level file that have a value, without its defaults list, and those of `SHARED`."""
        shared = (entry for group in SHARED if group in self.groups for entry in SHARED[group])
        return (*(self.root.entries if self.root else ()), *shared)

    def options(self, name: str) -> list[ConfigOption]:
        """Return the options named ``NAME`` in any group, possibly several, or ``GROUP=NAME``."""
        group, equals, option = name.rpartition("=")
        return [
            options[option]
            for other, options in self.groups.items()
            if option in options and (not equals or other == group)
        ]

    def options_with(self, key: str) -> list[ConfigOption]:
        """Return the options of a key's group, its first component, whose file defines the dotted key."""
        group = key.split(".")[0]
        return [option for option in self.groups.get(group, {}).values() if key in option.keys]

    def usual_keys(self) -> list[str]:
        """Return the names of all groups, then the dotted keys of a run with all default options."""
        chosen = [self.groups[group].get(name or "") for group, name in self.defaults.items() if group in self.groups]
        entries = [*self.root_entries(), *(entry for option in chosen if option for entry in option.entries)]
        keys = [entry.key for entry in entries if "._target_" not in entry.key and ".defaults." not in entry.key]
        return [*self.groups, *dict.fromkeys(keys)]

    def about(self, key: str, chosen: Mapping[str, str]) -> str:
        """Return the description of a dotted key: the comment on its line in the chosen file; empty for none."""
        group = key.split(".")[0]
        option = self.groups.get(group, {}).get(chosen.get(group, ""))
        entries = (*(option.entries if option else ()), *self.root_entries())
        return next((entry.comment for entry in entries if entry.key == key), "")

    def comment(self, group: str) -> str:
        """Return the description of a group: the comment on its line in the defaults list; empty for none."""
        for line in self.root.lines if self.root else ():
            match = _CHOICE.match(line)
            if match and match["group"] == group and (comment := _COMMENT.search(line)):
                return comment["text"].strip()
        return ""


def read_entries(lines: Sequence[str]) -> list[Entry]:
    """Return the keys of a YAML text that have a value, with dotted paths; the ``defaults`` list is left out.

    Lines that are not in block style are skipped.
    """
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
    """Split a line of YAML into its content and its comment without ``#``; a ``#`` inside quotes starts no comment."""
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


_PACKAGE = Path(__file__).resolve().parent.parent


def configs_folder() -> Path:
    """Return mptrain's folder of configuration files, which holds ``train.yaml`` and one folder per group.

    Raise EnvironmentRefused if the installation has no such folder.
    """
    return _find("configs", "train.yaml")


def recipes_folder() -> Path:
    """Return mptrain's folder of recipes (reproductions of published results), one folder per recipe.

    Raise EnvironmentRefused if the installation has no such folder.
    """
    return _find("recipes", "")


def _find(folder: str, inside: str) -> Path:
    # A wheel has a copy in the package; a checkout, and so an editable install, has it in the top folder.
    candidates = (_PACKAGE / "_data" / folder, _PACKAGE.parent / folder)
    for candidate in candidates:
        if (candidate / inside).exists():
            return candidate
    raise EnvironmentRefused(
        f"the folder {folder}/ of mptrain is missing; searched {' and '.join(map(str, candidates))}",
        "the installation is damaged: install mptrain again",
    )
