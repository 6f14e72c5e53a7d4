"""Checks of configuration values against the annotations of their fields, and descriptions of the allowed range.

pydantic validates; the messages are mptrain's own, for users at a terminal. Numbers given as text, numbers in place of
true and false, and non-finite numbers are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from pydantic import PydanticUserError, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from typing_extensions import is_typeddict

from mptrain.config.synonyms import translate_value
from mptrain.system.errors import ConfigError, Problem, did_you_mean
from mptrain.system.fields import RangeDescription, describe, show, without_metadata
from mptrain.system.validation import validator

__all__ = ["UNRESOLVED", "InvalidValueError", "RangeDescription", "check_field", "check_value", "first_line", "show"]

_POWER = re.compile(r"2(?:\^|\*\*)(?P<exponent>-?\d{1,3})")


class _Unresolved:
    """Placeholder for a value that could not be resolved, and whose problem is already reported."""

    def __repr__(self) -> str:
        return "(unresolved)"


UNRESOLVED = _Unresolved()


class InvalidValueError(Exception):
    """Raised if a configuration value does not match its annotation; the text is "must be" and the allowed values."""


#: Hint for a file whose keys are one level too deep or too high.
HEADER = (
    "a file in {group}/ needs both or neither: the first line '# @package _global_', and its keys indented below "
    "'{group}:'"
)


def check_value(value: Any, annotation: Any) -> Any:
    """Check a configuration value and convert it to the annotated type: a list to a tuple, 1e3 to an int.

    An annotation that pydantic cannot process (such as a third party's), and dataclasses, accept everything.

    Args:
        value: Value as parsed from YAML or the command line.
        annotation: Type annotation of the field, possibly ``Annotated`` with a range.

    Returns:
        The converted value.

    Raises:
        InvalidValueError: Wrong type, or outside the range.
    """
    if is_unresolved(value) or dataclasses.is_dataclass(annotation) or is_typeddict(annotation):
        return value
    try:
        checker = validator(annotation, "yaml")
    except TypeError:  # lru_cache cannot store an annotation with unhashable parts
        checker = validator.__wrapped__(annotation, "yaml")
    except (PydanticSchemaGenerationError, PydanticUserError, SyntaxError, NameError):
        return value
    try:
        return checker.validate_python(value)
    except Exception as error:  # of pydantic, or of a class that the annotation names
        raise InvalidValueError(f"must be {_words_for(value, annotation)}") from error


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
    except InvalidValueError:
        problems.append(value_problem(key, value, annotation))
        return UNRESOLVED


def value_problem(key: str, value: Any, annotation: Any) -> Problem:
    """Return the problem of a configuration key whose value does not match its annotation, with a hint."""
    what = f"{key}={show(value)}: must be {_words_for(value, annotation)}"
    return Problem(what, hint_for(key, value, annotation), key)


def _words_for(value: Any, annotation: Any) -> str:
    words = describe(annotation)
    return words.replace("a number", "a finite number", 1) if _has_nonfinite(value) else words


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
    base, _ = without_metadata(annotation)
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


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that is not blank, or the exception's type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return show(lines[0]) if lines else type(error).__name__


def is_unresolved(value: Any) -> bool:
    """Return whether a value, or one in a list, could not be resolved."""
    return value is UNRESOLVED or (isinstance(value, list) and any(map(is_unresolved, value)))


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_nonfinite, value))
    return isinstance(value, float) and not math.isfinite(value)


def check_section(name: str, node: Any, schema: type, problems: list[Problem]) -> Any:
    """Check a section of the configuration, such as ``train``, and convert it to its dataclass.

    Args:
        name: Key of the section; empty for the top-level keys.
        node: Value of the section in the configuration.
        schema: The dataclass; its fields are the section's keys.
        problems: List to which problems are added.

    Returns:
        An instance of the dataclass, or None if there is a problem.
    """
    if node is UNRESOLVED:
        return None
    if not isinstance(node, Mapping):
        problems.append(_no_mapping(name, node, schema))
        return None
    try:
        return validator(schema, "yaml").validate_python(dict(node))
    except ValidationError as error:
        errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
        found = [_problem(name, node, schema, one["loc"]) for one in errors]
        problems += filter(None, dict.fromkeys(found))
    except ConfigError as error:
        problems += error.problems
    return None


def _problem(section: str, node: Mapping[Any, Any], schema: type, path: Sequence[str | int]) -> Problem | None:
    """Return the problem at the path of an error of pydantic; None for a value whose problem is reported already."""
    if not path:  # pydantic names no key that is no valid text
        return Problem(f"{section or 'the file'}: a key is not valid Unicode text", "write it in plain letters")
    hints = typing.get_type_hints(schema, include_extras=True)
    name = str(path[0])
    prefix = f"{section}." if section else ""
    key = f"{prefix}{name}"
    value: Any = node.get(path[0])
    if name not in hints:
        guess = "" if name == section else did_you_mean(name, hints)
        hint = f"did you mean {prefix}{guess}={show(value)}?" if guess else f"the keys are {', '.join(hints)}"
        return Problem(f"unknown key '{key}'", HEADER.format(group=section) if name == section else hint)
    if path[0] not in node:
        return Problem(f"{key} is required")
    if is_unresolved(value):
        return None
    if (inner := section_of(hints[name])) is None:
        return value_problem(key, value, hints[name])
    return _problem(key, value, inner, path[1:]) if path[1:] else _no_mapping(key, value, inner)


def _no_mapping(name: str, value: Any, schema: type) -> Problem:
    keys = ", ".join(f"{name}.{field.name}" for field in fields_of(schema))
    return Problem(f"{name}={show(value)}: must be a mapping", f"its keys are {keys}")


def section_of(annotation: Any) -> type | None:
    """Return the dataclass of a field that is a section itself, such as ``EarlyStopping | None``; None for others."""
    kinds = [kind for kind in typing.get_args(annotation) if isinstance(kind, type)]
    return next(filter(dataclasses.is_dataclass, kinds), None)


def fields_of(schema: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a dataclass, in order (`dataclasses.fields`)."""
    return dataclasses.fields(schema)
