"""Checks that what was read is of the kind that was written, and dataclasses made of it.

A file may be a stranger's, or come from a broken disk.
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
    return lambda value: type(value) is dict and not find_mismatch(value, kinds)


def find_mismatch(value: Mapping[str, Any], kinds: Mapping[str, Kind]) -> str:
    """The first field that is not of its kind; empty where all are."""
    for name, kind in kinds.items():
        if name in value and not kind(value[name]):
            return name
    return ""


class SchemaMismatch(ValueError):
    """A field is not of the kind that its annotation says; the message names it."""


def build(kind: type[Built], given: Any, *, lenient: bool = False) -> Built:
    """Return the dataclass that the fields of a JSON object stand for, with all that is in it.

    Args:
        kind: The dataclass. Its annotations may hold dataclasses, tuples, lists, mappings, literals and scalars, each of them or None.
        given: Values as JSON has them: lists for tuples, mappings for dataclasses, texts for the numbers that are keys.
        lenient: Pass over fields that the dataclass has not: later versions may write more.

    Raises:
        ValueError: A field is of another kind or missing, or there is one that the dataclass has not.
    """
    built: Built = _builder(cast("Any", kind), lenient)(given)
    return built


@cache
def _builder(annotation: Any, lenient: bool) -> Callable[[Any], Any]:
    """Return what makes a value of an annotation; it raises what Python does where it is given another one."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return _checking(_SCALARS[annotation])
    if origin is Literal:
        return _checking(arguments.__contains__)
    if origin in (Union, types.UnionType):  # of one kind and None
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
            raise ValueError(f"{type(given).__name__} instead of fields")
        if not lenient and (unknown := given.keys() - builders.keys()):
            raise SchemaMismatch(f"there is no field '{min(unknown)}'")
        found = {}
        for name, value in given.items():
            try:
                if name in builders:
                    found[name] = builders[name](value)
            except SchemaMismatch:
                raise
            except (AttributeError, TypeError, ValueError):
                if get_origin(hints[name]) is Literal:
                    raise SchemaMismatch(f"{name} {value!r} is none of {', '.join(get_args(hints[name]))}") from None
                raise SchemaMismatch(f"'{name}' holds a value of another kind") from None
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
    """Yield what is made of each item; which one is at fault is said by its number, from 0."""
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
