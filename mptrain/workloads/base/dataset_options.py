"""Options of data sets as dataclasses, the one place for their types, ranges and meanings."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from mptrain.system.fields import BelowOneOrZero, PositiveInt

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


@dataclass(frozen=True, kw_only=True)
class ShareOptions:
    """Options of data sets from which shares are held out.

    Attributes:
        val_share: Share of the samples held out for validation, if no file is for validation; likewise ``test_share``.
        train_samples: Number of samples to train on; None trains on all.
    """

    val_share: BelowOneOrZero = 0.1
    test_share: BelowOneOrZero = 0.1
    train_samples: PositiveInt | None = None
