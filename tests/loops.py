"""Loops over values inside of one test: collecting an item for each of thousands of values takes longer than testing them.

To run one row, give its name, as the failure says it, in the variable ``TEST_ROW``, and choose the test::

    TEST_ROW="factor=2, one=5, other=6" pytest -n 0 tests/FOLDER/test_FILE.py::test_NAME
"""

from __future__ import annotations

import functools
import inspect
import os

import pytest
import torch


class RoundFailed(AssertionError):
    """A round of a loop failed; the message names its values, those of an outer loop first."""


def each(names, values):
    """Run a test once for each value, as one item. Takes what `pytest.mark.parametrize` takes; a failure names the row.

    What is lost against `parametrize`: the rows after one that fails are not run, so one failure may hide others. All rows are
    one test in every report, count and list of durations, one skipped row is not shown, and the time limit is that of all
    rows. ``-k``, ids, marks, ``--lf`` and several workers do not tell rows apart; ``TEST_ROW`` runs one (see the module).

    Fixtures are those of the whole loop, so tests that fill a folder or patch something stay parametrised. The seed of torch's
    random numbers is that of a test of its own.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    rows = [(value,) if len(keys) == 1 else tuple(value) for value in values]
    assert not any(isinstance(value, type(pytest.param())) for value in values), (
        "give plain values: they have no ids or marks"
    )
    assert rows, f"no values of {', '.join(keys)}"
    cases = [(number, dict(zip(keys, row, strict=True))) for number, row in enumerate(rows, 1)]

    def decorate(test):
        @functools.wraps(test)
        def loop(*own, **given):
            skipped, asked_for = [], _asked_for(cases)
            for number, chosen in asked_for:
                torch.manual_seed(0)
                try:
                    test(*own, **given, **chosen)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except pytest.xfail.Exception:
                    raise
                except RoundFailed as inner:
                    raise RoundFailed(f"{_named(number, chosen, len(rows))}, {inner}") from inner.__cause__
                except (Exception, pytest.fail.Exception) as error:
                    raise RoundFailed(_named(number, chosen, len(rows))) from error
            if len(skipped) == len(asked_for):
                raise skipped[0]

        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        loop.__signature__ = signature.replace(parameters=rest)
        return loop

    return decorate


def _asked_for(cases):
    """The numbers and values of the rows whose names are in ``TEST_ROW``; without it, of all rows."""
    asked = os.environ.get("TEST_ROW")
    found = [case for case in cases if not asked or f", {_named(*case, len(cases))}, " in f", {asked}, "]
    assert found, f"no row of this test is in TEST_ROW={asked}"
    return found


def _named(number, chosen, count):
    """The values of a round; the number of the round in place of those that show an address only, as functions do."""
    words = [f"{key}={value!r}" for key, value in chosen.items()]
    shown = [word for word in words if " at 0x" not in word]
    return ", ".join(shown if shown == words else [*shown, f"case {number} of {count}"])
