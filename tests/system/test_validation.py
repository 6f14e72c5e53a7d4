"""Parsed JSON becomes dataclasses, and everything that does not fit is named at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from mptrain.system.fields import NonNegativeInt
from mptrain.system.validation import build, line_parser


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    count: NonNegativeInt = 0


@dataclass(frozen=True)
class Path:
    name: str
    points: tuple[Point, ...] = ()
    pairs: dict[int, tuple[str, str]] = field(default_factory=dict)
    closed: bool | None = None


def test_objects_lists_and_keys_become_what_the_dataclass_has():
    found = build(Path, {"name": "\udce9", "points": [{"x": 2}], "pairs": {"3": ["a", "b"]}})
    assert found == Path("\udce9", (Point(2.0),), {3: ("a", "b")})
    assert type(found.points[0].x) is float


def test_everything_wrong_is_named_with_its_place_and_what_was_found():
    given = {"points": [{"x": "1"}, {"x": 1.0, "count": True}], "closed": 1, "colour": "red"}
    with pytest.raises(ValueError, match="must be") as refused:
        build(Path, given)
    assert str(refused.value).split("; ") == [
        "'name' is missing",
        'points.0.x="1": must be a valid number',
        "points.1.count=true: must be a valid integer",
        "closed=1: must be a valid boolean",
        "unknown field 'colour'",
    ]


@pytest.mark.parametrize("count", [-1, 1.0, "1", True, None, 2**63])
def test_only_whole_numbers_below_2_to_63_are_counts(count):
    with pytest.raises(ValueError, match="count="):
        build(Point, {"x": 1.0, "count": count})


def test_what_a_later_version_added_is_passed_over_on_request():
    assert build(Path, {"name": "a", "points": [{"x": 1.0, "z": 0}], "colour": 1}, lenient=True).points == (Point(1.0),)


@pytest.mark.parametrize("line", ["", "[]", '{"x": "1"}', '{"x": 1.0, "y": 2}', '{"x": 1.0, "count": 1.0}', "{"])
def test_a_line_that_does_not_match_is_left_to_the_caller(line):
    parse = line_parser(Point)
    assert parse(line) is None
    assert parse(json.dumps({"x": 1.5, "count": 3})) == Point(1.5, 3)
