"""Conversion of an untrusted mapping, such as the content of a YAML file, to a dataclass, with all problems at once.

`mptrain.system.validation` converts and checks; the messages are those of `mptrain.config.value_checks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ValidationError
from pydantic_core import ErrorDetails

from mptrain.config.value_checks import show
from mptrain.system.errors import ConfigError, Problem, did_you_mean
from mptrain.system.fields import describe
from mptrain.system.validation import validator

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
        found = dict(reversed(list(_problems(error, schema))))  # the first problem of each place
        raise ConfigError(list(reversed(found.values()))) from None


def _problems(error: ValidationError, schema: type) -> Iterator[tuple[str, Problem]]:
    """Yield the path and the problem of each invalid entry; several for a value that fits no member of a union."""
    for one in error.errors(include_url=False):
        if not one["loc"]:
            yield "", Problem(one["msg"])
            continue
        place, owner, annotation = _locate(one["loc"], schema)
        yield place, _problem(one, place, owner, annotation)


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


def _problem(error: ErrorDetails, place: str, owner: Any, annotation: Any) -> Problem:
    name, prefix = place.rpartition(".")[2], place[: place.rfind(".") + 1]
    known = [field.name for field in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    if error["type"] == "missing":
        metadata = next(field.metadata for field in dataclasses.fields(owner) if field.name == name)
        return Problem(f"{place} is missing", metadata.get("add", f"add {name}:"))
    if error["type"] == "unexpected_keyword_argument":
        guess = did_you_mean(name, known)
        hint = f"did you mean {prefix}{guess}?" if guess else f"known keys: {', '.join(known)}"
        return Problem(f"unknown key '{show(place)}'", hint)
    if isinstance(wrong := error.get("ctx", {}).get("error"), EntryError):
        return Problem(f"{place}: {wrong}", wrong.hint)
    value, base = error["input"], _bare(annotation)
    if dataclasses.is_dataclass(base):
        keys = ", ".join(field.name for field in dataclasses.fields(base))
        return Problem(f"{place}: {show(value)} must be a mapping", f"its keys are {keys}")
    hint = f"write {place}: [{show(value)}]" if get_origin(base) is tuple and isinstance(value, (str, int)) else ""
    return Problem(f"{place}: {show(value)} must be {describe(annotation)}", hint)
