"""Whether what was read is of the kind that was written. A file may be a stranger's, or come from a broken disk."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

Kind = Callable[[Any], bool]

#: No number of steps, bytes or elements reaches this.
_TOO_MANY = 2**63

#: Whole numbers from here on are no FP64 numbers.
_TOO_LARGE = 2**1023


def is_count(value: Any) -> bool:
    """A number of something: a whole number, not negative."""
    return type(value) is int and 0 <= value < _TOO_MANY


def is_whole(value: Any) -> bool:
    """A whole number, such as an exit code."""
    return type(value) is int and abs(value) < _TOO_MANY


def is_number(value: Any) -> bool:
    """A number that arithmetic takes: any FP64 number, finite or not, or a whole one of that range."""
    return type(value) is float or (type(value) is int and abs(value) < _TOO_LARGE)


def is_text(value: Any) -> bool:
    """Text, perhaps empty."""
    return type(value) is str


def is_flag(value: Any) -> bool:
    """True or false."""
    return type(value) is bool


def is_mapping(value: Any) -> bool:
    """A mapping of anything."""
    return type(value) is dict


def optional(kind: Kind) -> Kind:
    """None, or a value of a kind."""
    return lambda value: value is None or kind(value)


def each(kind: Kind) -> Kind:
    """A list of values of a kind."""
    return lambda value: type(value) is list and all(map(kind, value))


def mapping(kind: Kind) -> Kind:
    """A mapping to values of a kind."""
    return lambda value: type(value) is dict and all(map(kind, value.values()))


def having(kinds: Mapping[str, Kind]) -> Kind:
    """A mapping; those of the fields that it has are of their kinds, and it may have others."""
    return lambda value: type(value) is dict and not misfit(value, kinds)


def misfit(value: Mapping[str, Any], kinds: Mapping[str, Kind]) -> str:
    """The first field that is not of its kind; empty where all are."""
    for name, kind in kinds.items():
        if name in value and not kind(value[name]):
            return name
    return ""


def is_built_as(value: Any, annotation: Any) -> bool:
    """Whether a value is what its annotation says, and all that is in it: dataclasses, tuples, lists, mappings, scalars."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    if origin in (Union, types.UnionType):
        return any(is_built_as(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and arguments[-1] is not Ellipsis:
        return type(value) is tuple and len(value) == len(arguments) and all(map(is_built_as, value, arguments))
    if origin in (tuple, list):
        return type(value) is origin and all(is_built_as(item, arguments[0]) for item in value)
    if origin is dict:
        key, item = arguments
        return type(value) is dict and all(
            is_built_as(name, key) and is_built_as(one, item) for name, one in value.items()
        )
    if is_dataclass(annotation):
        return type(value) is annotation and all(
            is_built_as(getattr(value, name), hint) for name, hint in _hints(cast("Any", annotation)).items()
        )
    return True


_SCALARS: dict[Any, Kind] = {
    int: is_whole, float: is_number, str: is_text, bool: is_flag, type(None): lambda value: value is None,
}  # fmt: skip


@lru_cache
def _hints(annotation: Any) -> dict[str, Any]:
    return get_type_hints(annotation)
