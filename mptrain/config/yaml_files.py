"""Reading of YAML that may be untrusted, and search for unreadable configuration files, with the line of the error.

Hydra stops at the first invalid file, often without naming it. This module then reads the files again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]
from typing_extensions import override
from yaml import MarkedYAMLError, YAMLError, compose, parse
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent  # type: ignore[import-untyped]
from yaml.nodes import MappingNode  # type: ignore[import-untyped]

from mptrain.system.errors import ConfigError, Problem
from mptrain.system.fields import show
from mptrain.system.files import read_bytes

#: Largest number of values in a file after its aliases are expanded.
_MOST_VALUES: Final = 20_000

#: Largest number of characters of a file; the parser takes seconds for more.
_LONGEST: Final = 40_000

#: Largest depth of nesting.
_DEEPEST: Final = 100

#: A number that Python converts slowly, or cannot convert to text.
_LONG_NUMBER: Final = re.compile(r"(?:\d|0[xX])[\d_a-fA-F:]{1000}")

_TOO_DEEP: Final = "it is nested too deeply"
_SHORTEN: Final = "shorten it, nest its values less deeply, and replace its aliases (*NAME) with their values"


def find_unreadable(paths: Iterable[Path]) -> Problem | None:
    """Return the problem, with the line if known, of the first file that is not a readable YAML mapping."""
    for path in dict.fromkeys(paths):
        if problem := _read(path):
            return problem
    return None


def _read(path: Path) -> Problem | None:
    try:
        text = read_bytes(path).decode("utf-8")
    except OSError as error:
        return Problem(f"{path} cannot be read: {error.strerror or error}", "check that it exists and its permissions")
    except UnicodeDecodeError as error:
        return Problem(f"{path} is not UTF-8 text: byte {error.start} ({error.reason})", "save it as UTF-8")
    try:
        if excess := _excess(text):
            return Problem(f"{path}: {excess}", _SHORTEN)
        node = compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{path}, line {mark.line + 1}" if mark else str(path)
        what = ": ".join(part for part in (error.context, error.problem) if part)
        return Problem(f"{location} is not YAML: {what}", _hint(text, mark.line if mark else None))
    except (YAMLError, ValueError, RecursionError) as error:
        return Problem(f"{path} is not YAML: {error}", "see the files that mptrain list names for the format")
    if node is not None and not isinstance(node, MappingNode):
        return Problem(f"{path} is a list or a single value, not a mapping", "write lines of the form KEY: VALUE")
    return None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader with OmegaConf's rules, which takes a twentieth of its time: `mptrain runs` reads thousands of files.

    ``1e-3`` is a number, a date is text, and a mapping has each key once.
    """

    @override
    def construct_mapping(self, node: MappingNode, deep: bool = False) -> Any:
        keys = Counter(key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str")
        if twice := [key for key, count in keys.items() if count > 1]:
            raise MarkedYAMLError(problem=f"found duplicate key {twice[0]}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(":timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_EXPONENT = re.compile(r"[-+]?\d+(_\d+)*(\.[\d_]*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """Parse YAML text into plain dicts and lists as OmegaConf does; interpolations (``${...}``) are not resolved.

    Raise ConfigError if the text is not YAML, or too large or too deeply nested to parse.
    """
    try:
        if excess := _excess(text):
            raise ConfigError(excess, _SHORTEN)
        tree = yaml.load(text, Loader=_Loader)
        tree = {} if tree is None else tree
        json.dumps(tree, ensure_ascii=False, default=str).encode()
        return tree
    except ConfigError:
        raise
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(f"{escape} is half of a character", "write the character itself") from error
    except Exception as error:  # PyYAML does not document which errors invalid text raises
        mark = getattr(error, "problem_mark", None)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{where}{show(getattr(error, 'problem', None) or lines[0])}") from error


def find_endless(folders: Iterable[Path]) -> Problem | None:
    """Return the problem of the first YAML file whose size, nesting, aliases or numbers would take too long to parse.

    All ``*.yaml`` files below the folders are checked. Those unreadable in other ways are reported when chosen.
    """
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            if excess := _excess(read_bytes(path).decode("utf-8")):
                return Problem(f"{path}: {excess}", _SHORTEN)
        except (OSError, UnicodeDecodeError, YAMLError, ValueError):  # reported when the file is chosen
            continue
    return None


def _excess(text: str) -> str:
    """Return the reason not to parse YAML text; empty if it is short, flat, and its aliases expand to few values."""
    too_long = f"it has more than {_LONGEST:,} characters" if len(text) > _LONGEST else ""
    if len(text) > 20 * _LONGEST:  # the other reasons are not looked for
        return too_long
    if _LONG_NUMBER.search(text):
        return "it has a number of more than 1,000 digits"
    brackets = accumulate(1 if letter in "[{" else -1 for letter in re.findall(r"[][{}]", text))
    if max(brackets, default=0) > _DEEPEST:  # the scanner's time grows with the square of this depth
        return _TOO_DEEP
    indents = max(len(line) - len(line.lstrip(" -?")) for line in text.split("\n"))
    if indents > 4 * _DEEPEST:
        return _TOO_DEEP
    if too_long:
        return too_long
    return _of_events(text) if indents > _DEEPEST or ("&" in text and "*" in text) else ""


def _of_events(text: str) -> str:
    """Return the reason not to expand the values of YAML text, from its events, which are parsed without recursion."""
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = [(None, 0)]  # anchor and number of values of each open mapping or sequence
    for event in parse(text):
        if isinstance(event, CollectionStartEvent):
            opened.append((event.anchor, 1))
            if len(opened) > _DEEPEST:
                return _TOO_DEEP
            continue
        if isinstance(event, CollectionEndEvent):
            anchor, size = opened.pop()
        elif isinstance(event, ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, AliasEvent):  # inside itself, it has no end
            inside = any(event.anchor == name for name, _ in opened)
            anchor, size = None, _MOST_VALUES if inside else sizes.get(event.anchor, 1)
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        opened[-1] = (opened[-1][0], opened[-1][1] + size)
        if opened[-1][1] > _MOST_VALUES:
            return f"its aliases expand to more than {_MOST_VALUES:,} values"
    return ""


def _hint(text: str, line: int | None) -> str:
    lines = text.split("\n")
    if line is not None and line < len(lines) and "\t" in lines[line]:
        return "YAML is indented with spaces, not with tabs"
    return "quote values that contain any of [ ] { } : #, and close brackets and quotes opened above that line"
