"""Checks of configuration values and untrusted mappings against the annotations of fields, all problems at once.

pydantic validates; the messages are mptrain's own, for users at a terminal. Numbers given as text, numbers in place of
true and false, and non-finite numbers are refused. Of a mapping, `mptrain.system.validation` converts and checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, PydanticUserError, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ErrorDetails
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


def as_word(value: Any) -> str:
    """Return what stands for a value in a word: of a class, a function or an object its name, or that of its class."""
    values = value if isinstance(value, list | tuple) else [value]
    if value is None or all(isinstance(each, str | int | float | Path) for each in values):
        return show(value)
    kind = type(value).__name__
    return str(value).removeprefix("torch.") if kind in ("dtype", "device") else getattr(value, "__name__", kind)


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
        errors = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] == "missing")
        section_problems = [_problem(name, node, schema, detail["loc"]) for detail in errors]
        problems += filter(None, dict.fromkeys(section_problems))
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


#: Metadata of an annotated type: a function that returns the checked value, or raises `EntryError`.
Check = AfterValidator

T = TypeVar("T")


class EntryError(ValueError):
    """Error of one entry, for the `Check` of a schema's field and for ``__post_init__``; ``hint`` may be empty."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def read_mapping(tree: Mapping[Any, Any], schema: type[T]) -> T:
    """Convert a mapping to a dataclass whose fields are its keys. Nested dataclasses are mappings in it.

    Args:
        tree: Plain dicts, lists and values, as `mptrain.config.yaml_files.read_yaml` returns them.
        schema: The dataclass. ``metadata={"add": ...}`` of a required field is an
            example for the message if it is missing.

    Raises:
        ConfigError: If the mapping does not fit. There is one problem for each invalid entry, with its dotted path.
    """
    try:
        return cast("T", validator(cast("Any", schema), "yaml").validate_python(dict(tree)))
    except ValidationError as error:
        by_path = dict(reversed(list(_problems(error, schema))))  # the first problem of each place
        raise ConfigError(list(reversed(by_path.values()))) from None


def _problems(error: ValidationError, schema: type) -> Iterator[tuple[str, Problem]]:
    """Yield the path and the problem of each invalid entry; several for a value that fits no member of a union."""
    for detail in error.errors(include_url=False):
        if not detail["loc"]:
            yield "", Problem(detail["msg"])
            continue
        path, owner, annotation = _locate(detail["loc"], schema)
        yield path, _key_problem(detail, path, owner, annotation)


def _locate(path: tuple[int | str, ...], schema: Any) -> tuple[str, Any, Any]:
    """Return the dotted path of an entry, the type that contains it, and its annotation; None for an unknown key."""
    names, owner, annotation = [], schema, schema
    for part in path:
        base = _bare(annotation)
        if part == "[key]":
            annotation = get_args(owner)[0]
        elif dataclasses.is_dataclass(base):
            owner, annotation = base, get_type_hints(base, include_extras=True).get(str(part))
        elif get_origin(base) in (dict, tuple):
            owner, annotation = base, get_args(base)[get_origin(base) is dict]
        else:  # a member of a union
            break
        names.append(str(part))
    return ".".join(name for name in names if name != "[key]"), owner, annotation


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _key_problem(error: ErrorDetails, path: str, owner: Any, annotation: Any) -> Problem:
    name, prefix = path.rpartition(".")[2], path[: path.rfind(".") + 1]
    known = [field.name for field in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    if error["type"] == "missing":
        metadata = next(field.metadata for field in dataclasses.fields(owner) if field.name == name)
        return Problem(f"{path} is missing", metadata.get("add", f"add {name}:"))
    if error["type"] == "unexpected_keyword_argument":
        guess = did_you_mean(name, known)
        hint = f"did you mean {prefix}{guess}?" if guess else f"known keys: {', '.join(known)}"
        return Problem(f"unknown key '{show(path)}'", hint)
    if isinstance(wrong := error.get("ctx", {}).get("error"), EntryError):
        return Problem(f"{path}: {wrong}", wrong.hint)
    value, base = error["input"], _bare(annotation)
    if dataclasses.is_dataclass(base):
        keys = ", ".join(field.name for field in dataclasses.fields(base))
        return Problem(f"{path}: {show(value)} must be a mapping", f"its keys are {keys}")
    hint = f"write {path}: [{show(value)}]" if get_origin(base) is tuple and isinstance(value, (str, int)) else ""
    return Problem(f"{path}: {show(value)} must be {describe(annotation)}", hint)
