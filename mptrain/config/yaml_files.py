"""Reading of YAML that may be untrusted, and search for unreadable configuration files, with the line of the error.

Hydra stops at the first invalid file, often without naming it. This module then reads the files again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf
from yaml import MarkedYAMLError, YAMLError, compose  # type: ignore[import-untyped]
from yaml.nodes import MappingNode, Node, ScalarNode  # type: ignore[import-untyped]

from mptrain.config.value_checks import show
from mptrain.errors import ConfigError, Problem
from mptrain.files import read_bytes

#: Largest number of values in a file after its aliases are expanded.
_MOST_VALUES: Final = 100_000

#: Number of brackets, or of leading blanks in a line, up to which a file cannot be nested too deeply to parse.
_DEEPEST: Final = 100

_NO_ALIASES: Final = "replace its aliases (*NAME) with their values"


def find_unreadable(paths: Iterable[Path]) -> Problem | None:
    """Return the problem of the first configuration file that is not a readable YAML mapping, with the line if known.

    Args:
        paths: Files in the order of the check; repeated ones are read once.
    """
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
        node = compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        what = ": ".join(part for part in (error.context, error.problem) if part)
        return Problem(f"{place} is not YAML: {what}", _hint(text, mark.line if mark else None))
    except (YAMLError, ValueError, RecursionError) as error:
        return Problem(f"{path} is not YAML: {error}", "see the files that mptrain list names for the format")
    if node is not None and not isinstance(node, MappingNode):
        return Problem(f"{path} is a list or a single value, not a mapping", "write lines of the form KEY: VALUE")
    return None


def read_yaml(text: str) -> Any:
    """Parse YAML text with OmegaConf into plain dicts and lists; interpolations (``${...}``) are not resolved.

    Raises:
        ConfigError: The text is not YAML, or its aliases expand to too many values.
    """
    try:
        if "&" in text and "*" in text and (too_large := _unfolded(compose(text))):
            raise ConfigError(too_large, _NO_ALIASES)
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf and PyYAML do not document which errors invalid text raises
        mark = getattr(error, "problem_mark", None)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{where}{show(getattr(error, 'problem', None) or lines[0])}") from error


def find_endless(folders: Iterable[Path]) -> Problem | None:
    """Return the problem of the first YAML file whose aliases or nesting would exhaust memory or never end.

    Args:
        folders: Folders whose ``*.yaml`` files are checked, with all subfolders.

    Returns:
        The problem, or None. Files that are unreadable in other ways are left out; they are reported when chosen.
    """
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            text = read_bytes(path).decode("utf-8")
            indents = (len(line) - len(line.lstrip(" -?")) for line in text.split("\n"))
            if max(*map(text.count, "[{"), *indents) > _DEEPEST:
                compose(text)
            if "&" in text and "*" in text and (too_large := _unfolded(compose(text))):
                return Problem(f"{path}: {too_large}", _NO_ALIASES)
        except RecursionError:
            return Problem(f"{path} is nested too deeply", "remove it from the folder, or nest its values less deeply")
        except (OSError, UnicodeDecodeError, YAMLError, ValueError):  # reported when the file is chosen
            continue
    return None


def _unfolded(root: Node | None) -> str:
    """Return the reason not to expand the aliases of a document; empty if they are few and none contains itself."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if isinstance(node, tuple):
            return size(node[0]) + size(node[1])
        if isinstance(node, ScalarNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_VALUES + 1  # until it is counted, so that a node inside itself counts as too large
            sizes[id(node)] = 1 + sum(map(size, node.value))
        return sizes[id(node)]

    if root is None or size(root) <= _MOST_VALUES:
        return ""
    return f"its aliases expand to more than {_MOST_VALUES:,} values"


def _hint(text: str, line: int | None) -> str:
    lines = text.split("\n")
    if line is not None and line < len(lines) and "\t" in lines[line]:
        return "YAML is indented with spaces, not with tabs"
    return "quote values that contain any of [ ] { } : #, and close brackets and quotes opened above that line"
