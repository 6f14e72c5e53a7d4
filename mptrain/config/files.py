"""Says which configuration file cannot be read, and where in it.

Hydra reads the files and stops at the first that is wrong, often without its name. This reads them again, after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yaml import MarkedYAMLError, YAMLError, compose  # type: ignore[import-untyped]
from yaml.nodes import MappingNode  # type: ignore[import-untyped]

from mptrain.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def find_unreadable(paths: Iterable[Path]) -> Problem | None:
    """The problem of the first file that is no readable YAML mapping, with its line where there is one."""
    for path in dict.fromkeys(paths):
        if problem := _read(path):
            return problem
    return None


def _read(path: Path) -> Problem | None:
    try:
        text = path.read_bytes().decode("utf-8")
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


def _hint(text: str, line: int | None) -> str:
    lines = text.split("\n")
    if line is not None and line < len(lines) and "\t" in lines[line]:
        return "YAML is indented with spaces, not with tabs"
    return "a value that contains any of [ ] { } : # needs quotes, and what is opened must be closed above that line"
