"""Type checks of parsed JSON values, and construction of dataclasses from parsed JSON objects.

Files may be untrusted or damaged, so every value is checked. A check (type ``Kind``) is a function from a
value to bool.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mptrain.fields import NonNegativeInt

Built = TypeVar("Built")
Kind = Callable[[Any], bool]

#: Exclusive limit of counts (steps, bytes, elements).
_TOO_MANY = 2**63

#: Exclusive limit of integers that are safe to convert to FP64.
_TOO_LARGE = 2**1023


def is_count(value: Any) -> bool:
    """Return whether a value is an int (no bool) from 0 to 2**63 - 1, such as a number of steps or bytes."""
    return type(value) is int and 0 <= value < _TOO_MANY


def is_whole(value: Any) -> bool:
    """Return whether a value is an int (no bool) of magnitude below 2**63, such as an exit code."""
    return type(value) is int and abs(value) < _TOO_MANY


def is_number(value: Any) -> bool:
    """Return whether a value is a float, finite or not, or an int (no bool) in the range of FP64."""
    return type(value) is float or (type(value) is int and abs(value) < _TOO_LARGE)


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return type(value) is str


def is_flag(value: Any) -> bool:
    """Return whether a value is a bool."""
    return type(value) is bool


def is_mapping(value: Any) -> bool:
    """Return whether a value is a dict."""
    return type(value) is dict


def optional(kind: Kind) -> Kind:
    """Return a check that accepts None and every value that the check ``kind`` accepts."""
    return lambda value: value is None or kind(value)


def each(kind: Kind) -> Kind:
    """Return a check that accepts a list whose items all pass the check ``kind``."""
    return lambda value: type(value) is list and all(map(kind, value))


def mapping(kind: Kind) -> Kind:
    """Return a check that accepts a dict whose values all pass the check ``kind``."""
    return lambda value: type(value) is dict and all(map(kind, value.values()))


def having(kinds: Mapping[str, Kind]) -> Kind:
    """Return a check that accepts a dict whose fields, as far as present, pass the checks of their names."""
    return lambda value: type(value) is dict and not find_mismatch(value, kinds)


def find_mismatch(value: Mapping[str, Any], kinds: Mapping[str, Kind]) -> str:
    """Return the name of the first field of a JSON object that fails its check, if it has one; empty if all pass."""
    for name, kind in kinds.items():
        if name in value and not kind(value[name]):
            return name
    return ""


class SchemaMismatch(ValueError):
    """Error for a field of a JSON object, named in the message, that does not match its annotation in the dataclass."""


def build(kind: type[Built], given: Any, *, lenient: bool = False) -> Built:
    """Build a dataclass, including nested ones, from a parsed JSON object, checking the type of every field.

    Args:
        kind: The dataclass. Its annotations may be dataclasses, tuples, lists, dicts, literals and scalars,
            each optionally None.
        given: Parsed JSON: lists for tuples, dicts for dataclasses, strings for integer keys.
        lenient: Ignore unknown fields, because later versions may write more.

    Raises:
        ValueError: A field has an invalid value, is missing or is unknown.
    """
    built: Built = _builder(cast("Any", kind), lenient)(given)
    return built


@cache
def _builder(annotation: Any, lenient: bool) -> Callable[[Any], Any]:
    """Return a function that builds a value of an annotation. For invalid input it raises Python's own errors."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return _checking(_SCALARS[annotation])
    if origin is Literal:
        return _checking(arguments.__contains__)
    if origin in (Union, types.UnionType):  # one type and None
        inner = _builder(next(one for one in arguments if one is not type(None)), lenient)
        return lambda value: None if value is None else inner(value)
    if origin in (list, tuple):
        items = [_builder(one, lenient) for one in arguments if one is not Ellipsis]
        endless = origin is list or arguments[-1] is Ellipsis
        return lambda value: origin(
            _each(items[0], value) if endless else [make(one) for make, one in zip(items, _listed(value), strict=True)]
        )
    if origin is dict:
        key, item = int if arguments[0] is int else str, _builder(arguments[1], lenient)
        return lambda value: {key(name): item(one) for name, one in value.items()}
    return _dataclass_builder(annotation, lenient) if is_dataclass(annotation) else lambda value: value


def _dataclass_builder(annotation: Any, lenient: bool) -> Callable[[Any], Any]:
    hints = get_type_hints(annotation, include_extras=True)
    builders = {name: _builder(hint, lenient) for name, hint in hints.items()}
    required = {one.name for one in fields(annotation) if one.default is one.default_factory}  # MISSING, both

    def build_fields(given: Any) -> Any:
        if type(given) is not dict:
            raise ValueError(f"a value of type {type(given).__name__} instead of an object")
        if not lenient and (unknown := given.keys() - builders.keys()):
            raise SchemaMismatch(f"unknown field '{min(unknown)}'")
        found = {}
        for name, value in given.items():
            try:
                if name in builders:
                    found[name] = builders[name](value)
            except SchemaMismatch:
                raise
            except (AttributeError, TypeError, ValueError):
                if get_origin(hints[name]) is Literal:
                    raise SchemaMismatch(f"{name} {value!r} is not one of {', '.join(get_args(hints[name]))}") from None
                raise SchemaMismatch(f"'{name}' has an invalid value") from None
        if missing := required - found.keys():
            raise SchemaMismatch(f"'{min(missing)}' is missing")
        return annotation(**found)

    return build_fields


def _checking(holds: Kind) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return check


def _each(make: Callable[[Any], Any], values: Any) -> Iterator[Any]:
    """Yield the value built from each item; errors name the index of the item, counted from 0."""
    for index, value in enumerate(_listed(values)):
        try:
            yield make(value)
        except SchemaMismatch as error:
            raise SchemaMismatch(f"entry {index}: {error}") from None


def _listed(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError
    return value


_SCALARS: dict[Any, Kind] = {int: is_whole, NonNegativeInt: is_count, float: is_number, str: is_text, bool: is_flag}
