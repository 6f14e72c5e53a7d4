"""Conversion of parsed YAML and JSON to annotated types and dataclasses by pydantic, with all mismatches at once.

Numbers are never made from text, truth values or the other way round. JSON was written by mptrain: lists stand for
tuples, objects for dataclasses, text for integer keys, and nothing else is converted. YAML was written by people:
1e3 is also an integer, text also a path, a number in a list of names also a name, and numbers must be finite.

pydantic is imported at the first call, so that importing this module costs nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from mptrain.errors import did_you_mean
from mptrain.fields import describe, is_union, without_metadata

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

Built = TypeVar("Built")
Language = Literal["yaml", "json"]

#: Exclusive limit of the magnitude of integers in JSON, such as numbers of steps or bytes.
_TOO_LARGE = 2**63


@dataclass(frozen=True)
class Mismatch:
    """One field of checked data that is unknown, missing, or does not match its annotation.

    Attributes:
        path: Names of the fields, and keys and indices between them, from the outermost value to the field.
        what: Why it does not match; ``value`` if it has another type, or is outside of its range.
        found: The value of the field; None if it is missing.
        annotation: The annotation of the field; None if it is unknown.
        known: The fields that its dataclass has.
    """

    path: tuple[str | int, ...]
    what: Literal["value", "unknown", "missing"]
    found: Any
    annotation: Any
    known: tuple[str, ...]

    @property
    def place(self) -> str:
        """The path, joined by dots."""
        return ".".join(map(str, self.path))

    @property
    def meant(self) -> str:
        """The field whose name is closest to an unknown one, with its path; empty if none is close."""
        guess = did_you_mean(str(self.path[-1]), self.known)
        return ".".join(map(str, [*self.path[:-1], guess])) if guess else ""

    def __str__(self) -> str:
        if self.what == "missing":
            return f"'{self.place}' is missing"
        if self.what == "unknown":
            return f"unknown field '{self.place}'" + (f", did you mean '{self.meant}'?" if self.meant else "")
        shown = json.dumps(self.found, default=str)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return f"{self.place}={shown}: must be {describe(self.annotation)}"


class SchemaMismatch(ValueError):
    """Error for data that does not match its dataclass; the message names all fields that do not."""

    def __init__(self, mismatches: list[Mismatch]) -> None:
        super().__init__("; ".join(map(str, mismatches)))
        self.mismatches = mismatches


def build(kind: type[Built], given: Any, *, lenient: bool = False) -> Built:
    """Build a dataclass, including nested ones, from a parsed JSON object, checking every field.

    Args:
        kind: The dataclass; or a ``TypedDict``, to check a mapping.
        given: Parsed JSON, with its non-finite numbers restored.
        lenient: Ignore unknown fields, because later versions may write more.

    Raises:
        ValueError: Fields have invalid values, are missing or are unknown; see `SchemaMismatch`.
    """
    return _validate(kind, given, "json", "ignore" if lenient else "forbid")


def build_section(kind: type[Built], given: Any) -> Built:
    """Build a dataclass, including nested ones, from a parsed YAML mapping, checking every key.

    Raise SchemaMismatch with all keys that are unknown or missing or have invalid values. Exceptions of the dataclass's
    own checks are not caught.
    """
    return _validate(kind, given, "yaml", "forbid")


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


def _validate(kind: type[Built], given: Any, language: Language, extra: str) -> Built:
    import pydantic

    try:
        return cast("Built", validator(cast("Any", kind), language, extra).validate_python(given))
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        found = {one.path: one for one in (_mismatch(kind, given, error["loc"], error["type"]) for error in errors)}
        raise SchemaMismatch(sorted(found.values(), key=lambda one: one.what == "missing")) from None


@lru_cache(maxsize=1024)
def validator(annotation: Any, language: Language, extra: str = "forbid") -> SchemaValidator:
    """Return the pydantic validator of an annotation or dataclass, for values that are parsed from YAML or JSON.

    ``extra`` is the treatment of unknown fields: ``forbid`` or ``ignore``. Raise an error of pydantic for an annotation
    that it cannot process.
    """
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import CoreConfig, SchemaValidator

    own = None if is_section(annotation) else ConfigDict(arbitrary_types_allowed=True)
    adapter = TypeAdapter[Any](annotation, config=own)  # a section would have a configuration of its own
    config = CoreConfig(strict=True, allow_inf_nan=language == "json", extra_fields_behavior=cast("Any", extra))
    return SchemaValidator(_adapted(adapter.core_schema, language, config), config)


def _adapted(node: Any, language: Language, config: Any) -> Any:
    """Return pydantic's schema of a type with the conversions of a language, in which only strict types are left."""
    if isinstance(node, (list, tuple)):
        return type(node)(_adapted(item, language, config) for item in node)
    if not isinstance(node, dict):
        return node
    node = {
        key: value if key in ("metadata", "default", "expected") else _adapted(value, language, config)
        for key, value in node.items()
    }
    kind = node.get("type")
    if kind in ("dataclass", "typed-dict"):
        node = {**node, "config": {**node.get("config", {}), **config}, "strict": False}
    elif kind == "tuple":
        node["strict"] = False
    return (_adapted_to_json if language == "json" else _adapted_to_yaml)(node, kind)


def _adapted_to_json(node: dict[str, Any], kind: Any) -> dict[str, Any]:
    if kind == "int":
        return {"lt": _TOO_LARGE, "gt": -_TOO_LARGE, **node}
    if kind == "dict" and node["keys_schema"].get("type") == "int":
        return {**node, "keys_schema": {**node["keys_schema"], "strict": False}}
    return node


def _adapted_to_yaml(node: dict[str, Any], kind: Any) -> dict[str, Any]:
    if kind == "int":
        return _after(_whole, node)
    if kind == "literal":
        return _after(_nonfinite_word, node)
    if kind == "lax-or-strict":  # a path
        return {**node, "strict": False}
    if kind == "union":
        return {**node, "choices": _members(node["choices"])}
    if kind in ("tuple", "list") and "items_schema" in node:
        items = node["items_schema"]
        return {**node, "items_schema": [_name(one) for one in items] if isinstance(items, list) else _name(items)}
    return node


def _members(choices: list[Any]) -> list[Any]:
    """Return the members of a union, so that 2.0 stays a float where floats are allowed, and text becomes a path."""
    kinds = [one["type"] for one in choices]
    if "float" in kinds:
        return [one["schema"] if one.get("schema", {}).get("type") == "int" else one for one in choices]
    return [one for one in choices if one["type"] != "str"] if "lax-or-strict" in kinds else choices


def _name(node: dict[str, Any]) -> dict[str, Any]:
    return _after(_as_name, node) if node["type"] == "str" else node


def _after(convert: Any, node: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function-before", "function": {"type": "no-info", "function": convert}, "schema": node}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _nonfinite_word(value: Any) -> Any:
    # Hydra parses inf and nan as numbers.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _as_name(value: Any) -> Any:
    # In a list of module names, YAML reads the name 16 as a number.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _mismatch(kind: Any, given: Any, loc: tuple[str | int, ...], what: str) -> Mismatch:
    """Return the mismatch of the innermost field on the path of an error of pydantic."""
    found = Mismatch((), "value", given, kind, ())
    for depth, key in enumerate(loc, 1):
        kind = _without_null(kind)
        if is_section(kind):
            hints = get_type_hints(kind, include_extras=True)
            if depth == len(loc) and what == "missing":
                return Mismatch(loc, "missing", None, hints[str(key)], tuple(hints))
            given = given[key]
            if key not in hints:
                return Mismatch(loc[:depth], "unknown", given, None, tuple(hints))
            kind = hints[str(key)]
            found = Mismatch(loc[:depth], "value", given, kind, tuple(hints))
        else:
            try:
                kind, given = _item_type(kind, key), given[key]
            except (LookupError, TypeError):  # an item is missing, or the key names a member of a union
                break
    return found


def is_section(kind: Any) -> bool:
    """Return whether a type has named fields: a dataclass or a ``TypedDict``."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "__total__"))


def _without_null(annotation: Any) -> Any:
    kind, _ = without_metadata(annotation)
    members = [one for one in get_args(kind) if one is not type(None)]
    return without_metadata(members[0])[0] if is_union(kind) and len(members) == 1 else kind


def _item_type(kind: Any, key: Any) -> Any:
    """Return the type of an item of a mapping or sequence. Raise IndexError or TypeError if there is none."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_union(kind):
        raise TypeError
    if origin is tuple and arguments[-1] is not Ellipsis:
        return arguments[key]
    return arguments[isinstance(origin, type) and issubclass(origin, Mapping)]
