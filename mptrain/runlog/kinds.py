"""Whether what was read is of the kind that was written. A file may be a stranger's, or come from a broken disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    return next((name for name, kind in kinds.items() if name in value and not kind(value[name])), "")
