"""The choice of golden runs has every pair that it claims, and the program takes what is chosen from."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.golden import runs
from tests.golden.choice import all_pairs, choose, is_possible, pairs_of

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {"a": ["1", "2", "3"], "b": ["1", "2", "3", "4"], "c": ["1", "2"], "d": ["1", "2"]}


def refuses_two(row):
    return not (row["a"] == "2" and row["b"] == "3") and not (row["a"] == "1" and row["c"] == "2" and row["d"] == "2")


@pytest.mark.parametrize("is_valid", [lambda row: True, refuses_two], ids=["all valid", "some refused"])
def test_chosen_rows_are_valid_and_have_every_pair_that_a_valid_row_has(is_valid):
    rows, left, impossible = choose(SMALL, 100, is_valid)
    every = [dict(zip(SMALL, values, strict=True)) for values in product(*SMALL.values())]
    valid = {pair for row in filter(is_valid, every) for pair in pairs_of(row)}
    assert all(map(is_valid, rows))
    assert {pair for row in rows for pair in pairs_of(row)} == valid
    assert (left, set(impossible)) == ([], set(all_pairs(SMALL)) - valid)
    assert len(rows) < 20  # of 48
    assert choose(SMALL, 100, is_valid) == (rows, left, impossible)


def test_what_too_few_rows_leave_out_is_named():
    rows, left, impossible = choose(SMALL, 3, refuses_two)
    assert len(rows) == 3
    assert {pair for row in rows for pair in pairs_of(row)} | {*left, *impossible} == set(all_pairs(SMALL))
    assert not {pair for row in rows for pair in pairs_of(row)} & {*left}
    assert not is_possible((("a", "2"), ("b", "3")), SMALL, refuses_two)
    assert is_possible((("a", "2"), ("b", "2")), SMALL, refuses_two)


def test_eighty_runs_have_every_setting_and_most_pairs_of_settings():
    factors = runs.factors(CONFIGS)
    rows, left, _ = choose(factors, 80, lambda row: runs.words_of(row, CONFIGS) is not None)
    assert len({runs.name_of(row) for row in rows}) == 80
    assert {setting for row in rows for setting in row.items()} == {(f, v) for f in factors for v in factors[f]}
    wide = {"precision", "scaler", "family"}  # more pairs among these than runs
    assert [pair for pair in left if not {factor for factor, _ in pair} <= wide] == []


@pytest.mark.long
def test_the_program_takes_every_family_rule_and_fault():
    """A key that is renamed has to be renamed in `tests.golden.runs` too."""
    factors, is_valid = runs.factors(CONFIGS), runs.Valid(CONFIGS)
    for number, scaler in enumerate(factors["scaler"]):  # there are more rules than families
        row = {name: values[number % len(values)] for name, values in factors.items()}
        fault = "infinite" if number % 2 or scaler in ("none", "static") else "high_scale"
        row |= {"scaler": scaler, "ranks": "one", "fault": fault}
        assert is_valid(row), runs.name_of(row)
    assert len(factors["scaler"]) >= len(factors["family"])
    assert not is_valid({**row, "scaler": "none", "fault": "high_scale"})
