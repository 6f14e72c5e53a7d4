import dataclasses
import os
from typing import Annotated, Literal

import pytest
from annotated_types import Interval, MinLen, MultipleOf
from typing_extensions import TypedDict

from mptrain.config.value_checks import UNRESOLVED, InvalidValueError, check_section, check_value, describe, show
from mptrain.optimizer.parameter_groups import ParameterGroup
from mptrain.system.fields import AboveOne, BelowOne, BelowOneOrZero, Fraction, PositiveFloat, PositiveInt
from tests.loops import each

WORDS = [
    (PositiveInt, "a whole number, at least 1"),
    (PositiveInt | None, "a whole number, at least 1, or null"),
    (PositiveFloat, "a number above 0"),
    (AboveOne, "a number above 1"),
    (BelowOne, "a number above 0 and below 1"),
    (Fraction, "a number from 0 to 1"),
    (BelowOneOrZero, "a number, at least 0 and below 1"),
    (bool, "true or false"),
    (Literal["auto", "never", "must"], "auto, never or must"),
    (tuple[str, ...], "a list, each entry text"),
    (tuple[int, int], "a list of 2 values, each a whole number"),
    (tuple[int, str], "a list of a whole number and text"),
    (Annotated[int, Interval(ge=1, le=8)], "a whole number from 1 to 8"),
    (Annotated[int, MultipleOf(8)], "a whole number, a multiple of 8"),
    (Annotated[tuple[int, ...], MinLen(1)], "a list, each entry a whole number, with at least 1 of them"),
    (dict[str, int], "a mapping"),
    (float | pytest.Item, "a number"),
    (pytest.Item | None, "null"),
    (pytest.Item, "of type Item"),
]


@each(("annotation", "words"), WORDS)
def test_ranges_are_said_in_words(annotation, words):
    assert describe(annotation) == words


def test_values_are_shown_as_written_and_unknown_ones_are_accepted():
    value = {"a": [True, None, 1.0, 0.5], "b": "x"}
    assert show(value) == "{a:[true,null,1,0.5],b:x}"
    assert len(show("x" * 500)) == 80
    assert check_value("anything", "not a type") == "anything"
    assert check_value(UNRESOLVED, PositiveInt) is UNRESOLVED
    assert check_value([1, UNRESOLVED], tuple[int, ...]) == [1, UNRESOLVED]


class _Sizes(TypedDict, total=False):
    width: int


@dataclasses.dataclass
class _Strict:
    width: int = 8

    def __post_init__(self):
        raise RuntimeError("of somebody's class")


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("https://example.org/w.pt", str | os.PathLike[str]),
        ({"width": 1, "height": 2}, _Sizes),
        ({"width": 1}, _Strict),
    ],
)
def test_types_of_somebodys_classes_are_left_as_they_are_written(value, annotation):
    assert check_value(value, annotation) == value
    assert type(check_value(value, annotation)) is type(value)


def test_an_error_of_somebodys_class_is_a_problem_of_the_value():
    with pytest.raises(InvalidValueError, match="must be"):
        check_value({"width": 1}, _Strict | None)


def test_a_key_that_is_no_text_is_a_problem():
    problems = []
    assert check_section("optimizer.groups.0", {"\ud800": 1, "match": ["a"]}, ParameterGroup, problems) is None
    assert "not valid Unicode" in problems[0].what
