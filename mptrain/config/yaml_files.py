"""Says which configuration file cannot be read, and where in it; reads YAML that may be a stranger's.

Hydra reads the files and stops at the first that is wrong, often without its name. This reads them again, after that.
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

#: Values of a file once its aliases are followed.
_MOST_VALUES: Final = 100_000

#: Brackets, or blanks before a line, below which nothing is nested too deeply for a reader.
_DEEPEST: Final = 100

_NO_ALIASES: Final = "write out what its aliases (*NAME) stand for"


def find_unreadable(paths: Iterable[Path]) -> Problem | None:
    """The problem of the first file that is no readable YAML mapping, with its line where there is one."""
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
        return Problem(f"{path} is not YAML: {error}", "see a file that mptrain list names for the shape")
    if node is not None and not isinstance(node, MappingNode):
        return Problem(f"{path} must be a mapping, with lines of the form KEY: VALUE", "it holds a list or one value")
    return None


def read_yaml(text: str) -> Any:
    """What a text of YAML holds, as OmegaConf reads it: plain containers, interpolations as they are written.

    Raises:
        ConfigError: It is no YAML, or its aliases unfold to more than there is memory for.
    """
    try:
        if "&" in text and "*" in text and (too_large := _unfolded(compose(text))):
            raise ConfigError(too_large, _NO_ALIASES)
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf and PyYAML document no set of errors for what is no configuration
        mark = getattr(error, "problem_mark", None)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{where}{show(getattr(error, 'problem', None) or lines[0])}") from error


def find_endless(folders: Iterable[Path]) -> Problem | None:
    """The problem of the first file whose aliases, or brackets, would take all memory, or for ever, to follow."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*.yaml"))):
        try:
            text = read_bytes(path).decode("utf-8")
            indents = (len(line) - len(line.lstrip(" -?")) for line in text.split("\n"))
            if max(*map(text.count, "[{"), *indents) > _DEEPEST:
                compose(text)
            if "&" in text and "*" in text and (too_large := _unfolded(compose(text))):
                return Problem(f"{path}: {too_large}", _NO_ALIASES)
        except RecursionError:
            return Problem(f"{path} is nested too deeply", "no configuration needs that")
        except (OSError, UnicodeDecodeError, YAMLError, ValueError):  # said when it is chosen
            continue
    return None


def _unfolded(root: Node | None) -> str:
    """Why the aliases of a document must not be followed; empty where each is short, and none holds itself."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if isinstance(node, tuple):
            return size(node[0]) + size(node[1])
        if isinstance(node, ScalarNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_VALUES + 1  # while it is being counted: what holds itself has no end
            sizes[id(node)] = 1 + sum(map(size, node.value))
        return sizes[id(node)]

    if root is None or size(root) <= _MOST_VALUES:
        return ""
    return f"it unfolds to more than {_MOST_VALUES:,} values"


def _hint(text: str, line: int | None) -> str:
    lines = text.split("\n")
    if line is not None and line < len(lines) and "\t" in lines[line]:
        return "YAML is indented with spaces, not with tabs"
    return "a value that contains any of [ ] { } : # needs quotes, and what is opened must be closed above that line"
