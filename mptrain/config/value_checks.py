"""Checks of configuration values against the annotations of their fields, and descriptions of the allowed range.

pydantic validates; the messages are mptrain's own, for users at a terminal. Numbers given as text, numbers in place of
true and false, and non-finite numbers are refused.
"""

from __future__ import annotations

import contextlib
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from mptrain.config.synonyms import translate_value
from mptrain.errors import Problem

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_POWER = re.compile(r"2(?:\^|\*\*)(?P<exponent>-?\d{1,3})")
_NAMES = {bool: "true or false", str: "text", Path: "the path of a file or folder", type(None): "null"}


@dataclass(frozen=True)
class RangeDescription:
    """Marker in an ``Annotated`` type with a readable description of its values, for messages; needed for patterns.

    Attributes:
        text: Words that follow "must be", such as ``the path of a folder``.
    """

    text: str


class _Unresolved:
    """Placeholder for a value that could not be resolved, and whose problem is already reported."""

    def __repr__(self) -> str:
        return "(unresolved)"


UNRESOLVED = _Unresolved()


class InvalidValueError(Exception):
    """Raised if a configuration value does not match its annotation; the text is "must be" and the allowed values."""


def check_value(value: Any, annotation: Any) -> Any:
    """Check a configuration value and convert it to the annotated type: a list to a tuple, 1e3 to an int.

    An annotation that pydantic cannot process (such as a third party's) accepts everything.

    Args:
        value: Value as parsed from YAML or the command line.
        annotation: Type annotation of the field, possibly ``Annotated`` with a range.

    Returns:
        The converted value.

    Raises:
        InvalidValueError: Wrong type, or outside the range.
    """
    if _unresolved(value):
        return value
    try:
        adapter = _adapter(annotation)
    except TypeError:  # lru_cache cannot store an annotation with unhashable parts
        adapter = _adapter.__wrapped__(annotation)
    shaped = _shape(value, annotation)
    if adapter is None:
        return shaped
    try:
        return adapter.validate_python(shaped)
    except ValidationError:
        words = describe(annotation)
        if _has_nonfinite(value):
            words = words.replace("a number", "a finite number", 1)
        raise InvalidValueError(f"must be {words}") from None


def check_field(key: str, value: Any, annotation: Any, problems: list[Problem]) -> Any:
    """Check and convert the value of a configuration key; record a problem instead of raising if it is invalid.

    Args:
        key: Dotted key, for the message.
        value: Value as parsed from YAML or the command line.
        annotation: Type annotation of the field.
        problems: List to which the problem is added.

    Returns:
        The converted value, or `UNRESOLVED` if it is invalid.
    """
    try:
        return check_value(value, annotation)
    except InvalidValueError as unfit:
        problems.append(Problem(f"{key}={show(value)}: {unfit}", hint_for(key, value, annotation), key))
        return UNRESOLVED


def hint_for(key: str, value: Any, annotation: Any) -> str:
    """Return the hint for an invalid value of a configuration key, such as ``did you mean device=cuda?``; may be empty.

    It names mptrain's word for another framework's value, another way to write the value, or a list with it.

    Args:
        key: Dotted key.
        value: The invalid value.
        annotation: Type annotation of the field.
    """
    if other := translate_value(key, value):
        return f"did you mean {key}={other}?"
    for meaning in _meanings(value):
        with contextlib.suppress(InvalidValueError):
            check_value(meaning, annotation)
            return f"write {key}={show(meaning)}"
    base, _ = _peel(annotation)
    if get_origin(base) not in (tuple, list, Sequence) or not isinstance(value, (str, int, float)):
        return ""
    try:
        check_value([value], annotation)
    except InvalidValueError:
        return ""
    return f"write {key}=[{show(value)}]"


#: Values that a word may mean, although YAML reads it as text or a number.
_MEANINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("none", "nil", "no", "off"), (None, False)),
    **dict.fromkeys(("yes", "on", "y", "1"), (True,)),
    **dict.fromkeys(("n", "0"), (False,)),
}


def _meanings(value: Any) -> tuple[Any, ...]:
    """Return the values that a text or number may mean: a power of two, null, true or false."""
    text = str(value).lower()
    if power := _POWER.fullmatch(text):
        number = 2.0 ** int(power["exponent"])
        return (int(number) if number.is_integer() else number,)
    return _MEANINGS.get(text, ())


def describe(annotation: Any) -> str:
    """Describe the values that a type annotation allows, to follow "must be": ``a whole number, at least 1``."""
    base, metadata = _peel(annotation)
    for item in metadata:
        if isinstance(item, RangeDescription):
            return item.text
    origin, arguments = get_origin(base), get_args(base)
    if origin in (Union, types.UnionType):
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
    if origin in (dict, Mapping) or base in (dict, Mapping):
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


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that is not blank, or the exception's type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return show(lines[0]) if lines else type(error).__name__


@lru_cache(maxsize=512)
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(annotation, config=_STRICT)
    except (PydanticSchemaGenerationError, PydanticUserError, SyntaxError, NameError):
        return None


def _unresolved(value: Any) -> bool:
    return value is UNRESOLVED or (isinstance(value, list) and any(map(_unresolved, value)))


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_nonfinite, value))
    return isinstance(value, float) and not math.isfinite(value)


def _peel(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        flat: list[Any] = []
        for item in metadata:
            flat.extend(
                item if isinstance(item, GroupedMetadata) and not isinstance(item, RangeDescription) else [item]
            )
        inner, more = _peel(base)
        return inner, (*more, *flat)
    return annotation, ()


def _shape(value: Any, annotation: Any) -> Any:
    base, _ = _peel(annotation)
    origin, arguments = get_origin(base), get_args(base)
    if origin is Literal and isinstance(value, float) and str(value) in arguments:
        return str(value)  # Hydra parses inf and nan as numbers
    if origin in (Union, types.UnionType):
        plain = {_peel(argument)[0] for argument in arguments}
        if isinstance(value, float) and math.isfinite(value) and float in plain:
            return value
        for argument in arguments:
            shaped = _shape(value, argument)
            if shaped is not value:
                return shaped
        return value
    if base is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if base is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, list) and origin in (tuple, list, Sequence) and arguments:
        variadic = origin is not tuple or arguments[-1] is Ellipsis
        inner = [arguments[0]] * len(value) if variadic else list(arguments) + [Any] * len(value)
        shaped_items = [_shape_item(item, inner[index]) for index, item in enumerate(value)]
        return tuple(shaped_items) if origin is tuple else shaped_items
    return tuple(value) if isinstance(value, list) and base is tuple else value


def _shape_item(value: Any, annotation: Any) -> Any:
    # In a list of module names, YAML reads the name 16 as a number.
    if _peel(annotation)[0] is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _shape(value, annotation)


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
