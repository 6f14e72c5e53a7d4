"""Shell completion of ``KEY=VALUE``: groups and their options, keys of the chosen options, and enumerated values.

Enumerated values come from type annotations in mptrain's sources, which are parsed and not imported, because an import
would load torch. Supported annotations are ``Literal``, ``bool``, unions of them, aliases, and names imported from
another module of mptrain.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from mptrain.config.catalogue import RECHOSEN, Catalogue, Entry, Option, read_entries
from mptrain.files import read_text


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

_ROOT = Path(__file__).resolve().parents[2]

#: Module that maps each section of a configuration to the dataclass that checks it.
_SCHEMA = "mptrain.config.schema"

#: Maximum number of imports and aliases that are followed for a name.
_DEPTH = 8

#: Values of keys that are annotated with patterns.
_KNOWN = {"device": ("auto", "cpu", "cuda", "mps", "xpu")}


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
        if name in self._groups:
            earlier, comma, _ = typed.rpartition(",")
            options = [Candidate(option.name, option.summary) for option in self._catalogue.groups[name].values()]
            if name in self._catalogue.defaults and self._catalogue.defaults[name] is None:
                options.append(Candidate("null", "none of them"))
            for text, about in options:
                if text not in earlier.split(","):
                    yield Candidate(earlier + comma + text, about)
            return
        listed = _KNOWN.get(name) or self._choices(name)
        if listed:
            earlier, comma, _ = typed.rpartition(",")
            for text in listed:
                if text not in earlier.split(","):
                    yield Candidate(earlier + comma + text)
        elif name.rpartition(".")[2] in _PATHS or typed.startswith(("/", "./", "../", "~/")):
            yield from paths(typed)

    def _choices(self, name: str) -> list[str]:
        section, _, field = name.rpartition(".")
        found = choices_in_section(section, field)
        target = self._targets.get(section)
        if not found and target:
            found = choices_of_target(target, field)
        if not found and name in self._entries and self._entries[name].value in ("true", "false"):
            found = ["true", "false"]
        return found

    @property
    def _groups(self) -> list[str]:
        """Groups that can be chosen."""
        return [group for group in self._catalogue.groups if self._saved is None or group in RECHOSEN]

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        """Keys of the chosen options, by dotted name; the first entry with a comment takes precedence."""
        found: dict[str, Entry] = {}
        for entry in self._all_entries:
            known = found.get(entry.key)
            if not _HIDDEN.search(entry.key):
                found[entry.key] = entry if known is None or not known.comment else known
        return found

    @cached_property
    def _targets(self) -> dict[str, str]:
        """The ``_target_`` of each group, where the chosen options give one."""
        suffix = "._target_"
        return {e.key.removesuffix(suffix): e.value for e in self._all_entries if e.key.endswith(suffix)}

    @cached_property
    def _all_entries(self) -> list[Entry]:
        if self._saved is None:
            defaults = {group: [option] for group, option in self._catalogue.defaults.items() if option}
            options = [option for group in self._chosen(defaults) for option in group]
            return [*self._catalogue.root_entries(), *(entry for option in options for entry in option.entries)]
        asked = self._chosen({})
        replaced = {option.group for options in asked for option in options}
        try:
            lines = read_text(self._saved).splitlines()
        except (OSError, UnicodeDecodeError):
            lines = []
        kept = [entry for entry in read_entries(lines) if entry.key.split(".")[0] not in replaced]
        return [*kept, *(entry for options in asked for option in options for entry in option.entries)]

    def _chosen(self, chosen: dict[str, list[str]]) -> list[list[Option]]:
        """Return the options of each group: given on the line, selected by those options, or else from ``chosen``."""
        words = [word.lstrip("+").partition("=") for word in self._before]
        asked = {name: value.split(",") for name, equals, value in words if equals and name in self._catalogue.groups}
        found = dict(chosen)
        order = [*asked, *(group for group in chosen if group not in asked)]
        for group in order:
            for name in asked.get(group) or chosen[group]:
                self._follow(group, name, asked, found)
        found |= asked
        groups = self._catalogue.groups
        return [
            [groups[group][name] for name in dict.fromkeys(names) if name in groups[group]]
            for group, names in found.items()
            if group in groups
        ]

    def _follow(self, group: str, name: str, asked: dict[str, list[str]], found: dict[str, list[str]]) -> None:
        """Add the options that an option selects in other groups, unless the line sets those groups."""
        option = self._catalogue.groups.get(group, {}).get(name)
        for line in option.lines if option else ():
            match = _CHOOSES.match(line)
            if match and match["group"] not in asked and found.get(match["group"]) != [match["option"]]:
                found[match["group"]] = [match["option"]]
                self._follow(match["group"], match["option"], asked, found)


def paths(typed: str, *, folders_only: bool = False) -> Iterator[Candidate]:
    """Yield the files and folders that complete a path for the shell; a folder ends with a slash.

    Args:
        typed: The part of the path that is typed; hidden files need a leading dot.
        folders_only: Whether to leave out files.
    """
    folder, slash, start = typed.rpartition("/")
    place = Path(folder + slash).expanduser() if folder or slash else Path()
    try:
        inside = sorted(place.iterdir())
    except OSError:
        return
    for path in inside:
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            if path.is_dir():
                yield Candidate(f"{folder}{slash}{path.name}/")
            elif not folders_only:
                yield Candidate(f"{folder}{slash}{path.name}")


def choices_in_section(section: str, field: str) -> list[str]:
    """Return the enumerated values of a key in a section of the configuration, for shell completion.

    Args:
        section: Name of the section, such as ``train``; empty for the top-level keys.
        field: Name of the key in the section.

    Returns:
        The values as text; empty if the key is not an enumeration.
    """
    name = "" if section else "GeneralOptions"
    for node in _module(_SCHEMA).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id="SECTIONS"), value=ast.Dict(keys=keys, values=values)):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == section and isinstance(value, ast.Name):
                        name = value.id
    return choices_of_target(f"{_SCHEMA}.{name}", field) if name else []


def choices_of_target(target: str, field: str) -> list[str]:
    """Return the enumerated values of a parameter of an mptrain class or function, for shell completion.

    Args:
        target: Dotted path of the class or function; its source is parsed, not imported.
        field: Name of the parameter or dataclass field.

    Returns:
        The values as text; empty if the annotation is not an enumeration.
    """
    module, _, name = target.rpartition(".")
    annotation = _annotation(module, name, field)
    return list(dict.fromkeys(_values(*annotation, _DEPTH))) if annotation else []


def _annotation(module: str, name: str, field: str) -> tuple[str, ast.expr] | None:
    """Return the annotation of a class's field or a function's parameter, and the module that contains it."""
    match _definition(module, name):
        case home, ast.Name(id=other):  # another name of a class
            return _annotation(home, other, field)
        case home, ast.ClassDef(body=body, bases=bases):
            for item in body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == field:
                    return home, item.annotation
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return _annotation_of_parameter(home, item, field)
            inherited = (_annotation(home, base.id, field) for base in bases if isinstance(base, ast.Name))
            return next(filter(None, inherited), None)
        case home, ast.FunctionDef() as function:
            return _annotation_of_parameter(home, function, field)
    return None


def _annotation_of_parameter(module: str, function: ast.FunctionDef, field: str) -> tuple[str, ast.expr] | None:
    """Return the annotation of a parameter; if ``options`` is the only parameter, that of a field of its class."""
    arguments = [a for a in (*function.args.args, *function.args.kwonlyargs) if a.annotation]
    match arguments:
        case [ast.arg(arg="options", annotation=ast.Name(id=options))]:
            return _annotation(module, options, field)
    return next(((module, a.annotation) for a in arguments if a.arg == field and a.annotation), None)


def _values(module: str, node: ast.expr, depth: int) -> list[str]:
    """Return the values that an annotation allows."""
    match node:
        case ast.BinOp(left=left, right=right):
            return [*_values(module, left, depth), *_values(module, right, depth)]
        case ast.Constant(value=None):
            return ["null"]
        case ast.Name(id="bool"):
            return ["true", "false"]
        case ast.Subscript(value=ast.Name(id="Literal" | "Annotated" as kind), slice=inside):
            parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
            if kind == "Annotated":
                return _values(module, parts[0], depth)
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            return [
                str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
                for value in values
            ]
        case ast.Name(id=name) if depth:
            found = _definition(module, name)
            if found and isinstance(found[1], ast.expr):
                return _values(found[0], found[1], depth - 1)
    return []


def _definition(module: str, name: str, depth: int = _DEPTH) -> tuple[str, ast.expr | ast.stmt] | None:
    """Return the class, function or value that a name refers to in a module, and the module that defines it."""
    for node in _module(module).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return module, value
            case ast.ImportFrom(module=str(source), level=0) if depth:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _definition(source, alias.name, depth - 1)
    return None


@lru_cache(maxsize=64)
def _module(name: str) -> ast.Module:
    """Return the syntax tree of an mptrain module; an empty tree for other modules and unreadable files."""
    path = _ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if name.split(".")[0] != "mptrain":
        return ast.Module([], [])
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])
