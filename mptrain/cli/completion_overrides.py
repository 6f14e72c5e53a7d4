"""Shell completion of ``KEY=VALUE``: groups and their options, keys of the chosen options, and enumerated values.

Everything comes from the catalogue of YAML files. The values of a key are those that its comment lists as ``a|b|c``;
or true and false, if its value is one of them; or null, if its value or its comment is or mentions it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mptrain.config.catalogue import RECHOSEN, Catalogue, Entry, Option, read_entries
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
            for found in self._values(name, value):
                yield Candidate(f"{prefix}{name}={found.text}", found.about)
            return
        for found in self._names(name, "" if prefix == "~" else "="):
            yield Candidate(prefix + found.text, found.about)

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
            found = _LISTED.search(entry.comment)
            if found:
                return found[0].split("|")
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
        others = self._catalogue.root_entries() if self._saved is None else self._kept({one.group for one in options})
        found: dict[str, Entry] = {}
        for entry in (*others, *(entry for option in options for entry in option.entries)):
            known = found.get(entry.key)
            if not _HIDDEN.search(entry.key):
                found[entry.key] = entry if known is None or not known.comment else known
        return found

    def _kept(self, replaced: set[str]) -> list[Entry]:
        """Return the keys of the saved run, without those of groups that the line replaces."""
        try:
            lines = read_text(self._saved).splitlines() if self._saved else []
        except (OSError, UnicodeDecodeError):
            lines = []
        return [entry for entry in read_entries(lines) if entry.key.split(".")[0] not in replaced]

    def _chosen(self) -> list[Option]:
        """Return the options that the line gives, for a new run the default ones, and those that they select."""
        groups = self._catalogue.groups
        words = [word.lstrip("+").partition("=") for word in self._before]
        asked = {name: value.split(",") for name, equals, value in words if equals and name in groups}
        defaults = {group: [name] for group, name in self._catalogue.defaults.items() if name and not self._saved}
        found = defaults | asked
        rest = [(group, name) for group in asked | defaults for name in found[group]]
        followed = set(rest)
        while rest:
            group, name = rest.pop(0)
            option = groups.get(group, {}).get(name)
            for match in filter(None, map(_CHOOSES.match, option.lines if option else ())):
                chosen = match["group"], match["option"]
                if match["group"] not in asked and chosen not in followed:
                    found[match["group"]] = [match["option"]]
                    followed.add(chosen)
                    rest.append(chosen)
        return [
            groups[group][name]
            for group, names in found.items()
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
    place = expanded(folder + slash) if folder or slash else Path()
    try:
        inside = sorted(place.iterdir())
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
