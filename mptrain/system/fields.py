"""Types of fields with their allowed ranges, and their descriptions in words.

Dataclasses of the package annotate their fields with these types; `mptrain.system.validation` checks the ranges.
Nothing here imports the validation library.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

try:
    from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
except ImportError:  # torch alone is enough to write records; nothing is validated then
    if not TYPE_CHECKING:

        class Ge:
            """Stand-in for the markers of ranges."""

            def __init__(self, *limits: Any) -> None:
                pass

        Gt = Le = Lt = MinLen = MaxLen = MultipleOf = GroupedMetadata = Ge

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
AboveOne = Annotated[float, Gt(1), Lt(math.inf)]
AtLeastOne = Annotated[float, Ge(1), Lt(math.inf)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
BelowOne = Annotated[float, Gt(0), Lt(1)]
BelowOneOrZero = Annotated[float, Ge(0), Lt(1)]
Exponent = Annotated[int, Ge(-1100), Le(1100)]  # of FP64 numbers
CountPerExponent = Annotated[tuple[NonNegativeInt, ...], MaxLen(2200)]

_NAMES = {bool: "true or false", str: "text", Path: "the path of a file or folder", type(None): "null"}


@dataclass(frozen=True)
class RangeDescription:
    """Marker in an ``Annotated`` type with a readable description of its values, for messages; needed for patterns.

    Attributes:
        text: Words that follow "must be", such as ``the path of a folder``.
    """

    text: str


def describe(annotation: Any) -> str:
    """Describe the values that a type annotation allows, to follow "must be": ``a whole number, at least 1``."""
    base, metadata = without_metadata(annotation)
    for item in metadata:
        if isinstance(item, RangeDescription):
            return item.text
    origin, arguments = get_origin(base), get_args(base)
    if is_union(base):
        words = [describe(argument) for argument in arguments]
        return ", or ".join([word for word in words if not word.startswith("of type ")] or words)
    if origin is Literal:
        words = [show(argument) for argument in arguments]
        return " or ".join(([", ".join(words[:-1])] if words[1:] else []) + words[-1:])
    if base in (int, float):
        return ("a whole number" if base is int else "a number") + _range(metadata)
    if origin in (tuple, list, Sequence) and arguments:
        return _describe_list(origin, arguments) + _range(metadata)
    if base in _NAMES:
        return _NAMES[base]
    if origin in (dict, Mapping) or base in (dict, Mapping) or is_dataclass(base):
        return "a mapping"
    return f"of type {getattr(base, '__name__', base)}"


def show(value: Any) -> str:
    """Format a value as it is written on the command line: ``null``, ``true``, ``[1,2]``.

    Text is truncated to 80 characters.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    text = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def without_metadata(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type in an ``Annotated`` type, and its metadata; any other type with empty metadata."""
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        flat: list[Any] = []
        for item in metadata:
            flat.extend(
                item if isinstance(item, GroupedMetadata) and not isinstance(item, RangeDescription) else [item]
            )
        inner, more = without_metadata(base)
        return inner, (*more, *flat)
    return annotation, ()


def is_union(kind: Any) -> bool:
    """Return whether a type is a union, such as ``int | None``."""
    return get_origin(kind) in (Union, types.UnionType)


def _describe_list(origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(set(arguments)) == 1:
            return f"a list of {len(arguments)} values, each {describe(arguments[0])}"
        return "a list of " + " and ".join(describe(argument) for argument in arguments)
    return f"a list, each entry {describe(arguments[0])}"


def _range(metadata: tuple[Any, ...]) -> str:
    kinds = {"ge": Ge, "gt": Gt, "le": Le, "lt": Lt}
    bounds = {name: getattr(item, name) for item in metadata for name, kind in kinds.items() if isinstance(item, kind)}
    words = _describe_bounds(**bounds)
    for item in metadata:
        if isinstance(item, MultipleOf):
            words += f", a multiple of {item.multiple_of}"
        if isinstance(item, MinLen) and item.min_length:
            words += f", with at least {item.min_length} of them"
    return words


def _describe_bounds(ge: Any = None, gt: Any = None, le: Any = None, lt: Any = None) -> str:
    if ge is not None and le is not None:
        return f" from {ge} to {le}"
    lower = f" above {gt}" if gt is not None else f", at least {ge}" if ge is not None else ""
    upper = f"at most {le}" if le is not None else f"below {lt}" if lt not in (None, math.inf) else ""
    return f"{lower} and {upper}" if lower and upper else lower or (upper and f" {upper}")
