"""Decorator for data set loaders whose options are a dataclass.

The dataclass defines the type, range, default and meaning of each option once, for all functions that take it.
"""

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

    The decorated function has the signature of the dataclass, with resolved annotations; the configuration checks its
    keys against them.

    Args:
        options: The dataclass; its instance is the only argument of the decorated function.

    Example:
        With ``@takes_fields_of(Options)`` above ``def load(options: Options)``, the call ``load(root=path)`` runs the
        original function with ``Options(root=path)``.
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
