"""Conversion of parsed YAML and JSON to annotated types and dataclasses by pydantic, with all mismatches at once.

Numbers are never made from text, truth values or the other way round. JSON was written by mptrain: lists stand for
tuples, objects for dataclasses, text for integer keys, and nothing else is converted. YAML was written by people:
1e3 is also an integer, text also a path, a number in a list of names also a name, and numbers must be finite.

pydantic is imported at the first call, so that importing this module costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, SchemaValidator

Built = TypeVar("Built")
Node = dict[str, Any]
Rule = Callable[[Node], Node]

#: Exclusive limit of the magnitude of integers in JSON, such as numbers of steps or bytes.
_TOO_LARGE = 2**63

#: Maximum number of mismatches that a message names.
_MOST = 5


def build(kind: type[Built], given: Any, *, lenient: bool = False) -> Built:
    """Build a dataclass, including nested ones, from a parsed JSON object, checking every field.

    Args:
        kind: The dataclass; or a ``TypedDict``, to check a mapping.
        given: Parsed JSON, with its non-finite numbers restored.
        lenient: Ignore unknown fields, because later versions may write more.

    Raises:
        ValueError: Fields have invalid values, are missing or are unknown; the message names all of them.
    """
    from pydantic import ValidationError

    try:
        checker = validator(cast("Any", kind), "json", "ignore" if lenient else "forbid")
        return cast("Built", checker.validate_python(given))
    except ValidationError as error:
        problems = list(map(_in_words, error.errors(include_url=False)))
        more = [f"and {len(problems) - _MOST:,} more"] if problems[_MOST:] else []
        raise ValueError("; ".join([*problems[:_MOST], *more])) from None


def line_parser(kind: type[Built]) -> Callable[[str], Built | None]:
    """Return a parser of one line of JSON to a dataclass, three times as fast as `build`; see there.

    It returns None for a line that does not match, or that only Python's parser understands: `build` tells these apart.
    NaN and Infinity, which strict JSON lacks, are accepted.
    """
    from pydantic import ValidationError

    validate_json = validator(cast("Any", kind), "json").validate_json

    def parse(line: str) -> Built | None:
        try:
            return cast("Built", validate_json(line))
        except ValidationError:
            return None

    return parse


@lru_cache(maxsize=1024)
def validator(annotation: Any, language: Literal["yaml", "json"], extra: str = "forbid") -> SchemaValidator:
    """Return the pydantic validator of an annotation or dataclass, for values that are parsed from YAML or JSON.

    ``extra`` is the treatment of unknown fields: ``forbid`` or ``ignore``. Raise an error of pydantic for an annotation
    that it cannot process.
    """
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    has_own = is_dataclass(annotation) or hasattr(annotation, "__total__")  # a TypedDict
    adapter = TypeAdapter[Any](annotation, config=None if has_own else ConfigDict(arbitrary_types_allowed=True))
    config: Any = {"strict": True, "allow_inf_nan": language == "json", "extra_fields_behavior": extra}
    rules = _JSON if language == "json" else _YAML
    rules = {
        **rules,
        "dataclass": lambda node: _lax({**node, "config": config}),
        "typed-dict": lambda node: _lax({**node, "config": config, "extra_behavior": extra}),
    }
    return SchemaValidator(_adapted(adapter.core_schema, rules), config)


def _in_words(error: ErrorDetails) -> str:
    location = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"'{location}' is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown field '{location}'"
    given, must = json.dumps(error["input"], default=str), error["msg"].replace("Input should be", "must be")
    return f"{location}={given if len(given) <= 80 else f'{given[:77]}...'}: {must}"


def _adapted(node: Any, rules: Mapping[str, Rule]) -> Any:
    """Return pydantic's core schema of a type in which the rules have replaced the nodes of their types."""
    if isinstance(node, (list, tuple)):
        return type(node)(_adapted(item, rules) for item in node)
    if not isinstance(node, dict):
        return node
    apart = ("metadata", "serialization", "default", "expected")
    node = {key: value if key in apart else _adapted(value, rules) for key, value in node.items()}
    rule = rules.get(node.get("type", ""))
    return rule(node) if rule else node


def _lax(node: Node) -> Node:
    return {**node, "strict": False}


def _before(convert: Callable[[Any], Any]) -> Rule:
    function = {"type": "no-info", "function": convert}
    return lambda node: {"type": "function-before", "function": function, "schema": node}


def _with_integer_keys(node: Node) -> Node:
    keys = node["keys_schema"]
    return {**node, "keys_schema": _lax(keys) if keys["type"] == "int" else keys}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _nonfinite_word(value: Any) -> Any:  # Hydra parses inf and nan as numbers
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name(value: Any) -> Any:  # in a list of module names, YAML reads the name 16 as a number
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _with_names(node: Node) -> Node:
    items = node["items_schema"]
    return {**node, "items_schema": [*map(_named, items)] if isinstance(items, list) else _named(items)}


def _named(node: Node) -> Node:
    return _before(_name)(node) if node["type"] == "str" else node


def _is_path(node: Node) -> bool:
    """Return whether a node of pydantic is that of `Path`, and not of another type with a strict and a lax form."""
    return node["type"] == "lax-or-strict" and node["strict_schema"].get("python_schema", {}).get("cls") is Path


def _union(node: Node) -> Node:
    members = node["choices"]
    kinds = [member["type"] for member in members]
    if "float" in kinds:  # 2.0 stays a float
        members = [member["schema"] if member.get("schema", {}).get("type") == "int" else member for member in members]
    elif any(map(_is_path, members)):  # text becomes a path
        members = [member for member in members if member["type"] != "str"]
    return _lax({**node, "choices": members})


_JSON: dict[str, Rule] = {
    "tuple": _lax,
    "union": _lax,
    "int": lambda node: {"lt": _TOO_LARGE, "gt": -_TOO_LARGE, **node},
    "dict": _with_integer_keys,
}
_YAML: dict[str, Rule] = {
    "tuple": lambda node: _lax(_with_names(node)),
    "list": lambda node: _with_names(node) if "items_schema" in node else node,
    "int": _before(_whole),
    "literal": _before(_nonfinite_word),
    "lax-or-strict": lambda node: _lax(node) if _is_path(node) else node,
    "union": _union,
}
