"""Decorator for data set loaders whose options are a dataclass, the one place for their types, ranges and meanings."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Fields = ParamSpec("Fields")
Options = TypeVar("Options")
Made = TypeVar("Made")


def takes_fields_of(
    options: Callable[Fields, Options],
) -> Callable[[Callable[[Options], Made]], Callable[Fields, Made]]:
    """Return a decorator that lets a function of one dataclass instance be called with the fields of the dataclass.

    It gets the signature of the dataclass, with resolved annotations; the configuration checks its keys against them.
    """

    def decorate(function: Callable[[Options], Made]) -> Callable[Fields, Made]:
        def call(*args: Fields.args, **kwargs: Fields.kwargs) -> Made:
            return function(options(*args, **kwargs))

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(call, name, getattr(function, name))
        call.__annotations__ = typing.get_type_hints(options, include_extras=True)
        call.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        return call

    return decorate
