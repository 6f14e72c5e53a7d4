"""Loops over values inside of one test: collecting an item for each of thousands of values takes longer than testing them."""

from __future__ import annotations

import functools
import inspect

import pytest


def each(names, values):
    """Run a test once for each value, as one item. Takes what `pytest.mark.parametrize` takes; a failure names the values.

    Fixtures are those of the whole loop, so tests that fill a folder or patch something stay parametrised.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    rows = [(value,) if len(keys) == 1 else tuple(value) for value in values]
    assert not any(isinstance(value, type(pytest.param())) for value in values), (
        "give plain values: they have no ids or marks"
    )
    assert rows, f"no values of {', '.join(keys)}"

    def decorate(test):
        @functools.wraps(test)
        def loop(*own, **given):
            skipped = []
            for row in rows:
                chosen = dict(zip(keys, row, strict=True))
                try:
                    test(*own, **given, **chosen)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except Exception as error:
                    raise AssertionError(", ".join(f"{key}={value!r}" for key, value in chosen.items())) from error
            if len(skipped) == len(rows):
                raise skipped[0]

        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        loop.__signature__ = signature.replace(parameters=rest)
        return loop

    return decorate
