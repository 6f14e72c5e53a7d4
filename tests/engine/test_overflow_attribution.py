from __future__ import annotations

import json
import math

import pytest
import torch

from mptrain.engine.observer import DESCENDED, SETTLED, OverflowHistory, boundary, nonfinite_parameters
from mptrain.system.records import MAX_TENSORS
from tests.loops import each


def phases_of(trace, history=None):
    """Phases along a trace of (overflow, scale, next scale)."""
    history = history or OverflowHistory()
    return [
        history.observe(overflow=overflow, loss=1.0, scale=scale, next_scale=after) for overflow, scale, after in trace
    ]


def clean(scale, steps):
    return [(False, scale, scale)] * steps


DESCENT = [
    *((True, 64.0, 32.0), *clean(32.0, SETTLED - 1)),
    *((True, 32.0, 16.0), *clean(16.0, SETTLED + 15)),
    *((True, 16.0, 8.0), *clean(8.0, DESCENDED - 1)),
    *((True, 8.0, 4.0), *clean(4.0, DESCENDED)),
    (True, 4.0, 2.0),
]
GROWTH = [
    *(*clean(64.0, SETTLED), (True, 64.0, 32.0), *clean(32.0, SETTLED)),
    *((False, 32.0, 64.0), (True, 64.0, 32.0), *clean(32.0, 3), (True, 32.0, 16.0)),
]
GROWN = [*clean(16.0, SETTLED), (False, 16.0, 32.0)]


@each(
    ("trace", "expected"),
    [
        (clean(8.0, 3), []),
        (DESCENT, [*["calibrating"] * 4, "unexpected"]),  # until a scale has lasted as long as it takes to grow
        (GROWTH, ["calibrating", "growth probe", "unexpected"]),
        ([*GROWN, (True, 32.0, 16.0), *clean(16.0, 3), (True, 16.0, 8.0)], ["growth probe", "unexpected"]),
        ([*GROWN, *clean(32.0, 10), (True, 32.0, 16.0), (True, 16.0, 8.0)], ["growth probe", "unexpected"]),
        ([*GROWN, (True, 32.0, 32.0), (True, 32.0, 16.0), (True, 16.0, 16.0)], ["growth probe", "growth probe", "unexpected"]),
    ],
)  # fmt: skip
def test_phases_follow_the_course_of_the_scale(trace, expected):
    assert [phase for phase in phases_of(trace) if phase] == expected


@pytest.mark.parametrize(("steps", "phase"), [(SETTLED - 1, "calibrating"), (SETTLED, "growth probe")])
def test_a_scale_settles_with_the_last_of_so_many_clean_steps(steps, phase):
    trace = [*clean(32.0, steps - 1), (False, 32.0, 64.0), (True, 64.0, 32.0)]
    assert phases_of(trace)[-1] == phase


def test_a_state_of_before_the_descent_was_counted_is_taken_up():
    saved = {"floor": 1.0, "consecutive": 0, "clean": 7, "settled": True, "grown": True, "counts": {"abnormal": 2}}
    history = OverflowHistory.from_state(saved, floor=1.0)
    assert history.observe(overflow=True, loss=1.0, scale=4.0, next_scale=2.0) == "calibrating"
    assert history.counts == {"abnormal": 2, "calibrating": 1}


def test_trap_26_overflows_at_a_constant_scale_are_seen_and_counted():
    history = OverflowHistory(floor=128.0)
    phases_of([*clean(128.0, SETTLED), *[(True, 128.0, 128.0)] * 3], history)
    assert history.counts == {"unexpected": 3}
    assert history.consecutive == 3
    assert history.clean == 0


def test_trap_01_overflows_in_a_row_are_counted_and_one_clean_step_ends_the_row():
    history = OverflowHistory()
    phases_of([(True, 1.0, 1.0)] * 7, history)
    assert history.consecutive == 7
    phases_of(clean(1.0, 1), history)
    assert history.consecutive == 0
    assert history.clean == 1


@each("cut", [0, 1, 10, SETTLED, SETTLED + 1, SETTLED + 2, SETTLED + 3])
def test_trap_37_a_history_survives_json_at_any_place(cut):
    trace = [(True, 64.0, 32.0), *clean(32.0, SETTLED), (False, 32.0, 64.0), (True, 64.0, 32.0), (True, 32.0, 16.0)]
    whole = OverflowHistory()
    expected = phases_of(trace, whole)
    first = OverflowHistory()
    head = phases_of(trace[:cut], first)
    second = OverflowHistory.from_state(json.loads(json.dumps(first.state_dict())), floor=0.0)
    assert head + phases_of(trace[cut:], second) == expected
    assert second == whole


def test_trap_14_offenders_are_named_in_order_and_all_counted():
    names = ["a", "b", "c", "d", "e"]
    found = nonfinite_parameters(names, [1.0, math.inf, -1.0, math.nan, 0.0])  # -1: there is no gradient
    assert found == (2, (("b", "inf"), ("d", "nan")))
    names = [f"p{index}" for index in range(MAX_TENSORS + 5)]
    count, found = nonfinite_parameters(names, [math.nan] * len(names))
    assert count == MAX_TENSORS + 5
    assert [name for name, _ in found] == names[:MAX_TENSORS]


ROUNDED = float(torch.tensor(1e30))  # a scale is an FP32 number, and 1e30 is none


@each(
    ("floor", "loss", "scale", "after", "phase"),
    [
        (1.0, math.nan, 64.0, 32.0, "unexpected"),  # no lower scale would mend it
        *((floor, 2.0, scale, scale, "unexpected") for floor, scale in ((1.0, 1.0), (1024.0, 1024.0), (1e30, ROUNDED))),
        (1.0, 2.0, 1024.0, 512.0, "calibrating"),
    ],
)
def test_what_no_lower_scale_would_mend_is_unexpected_at_once(floor, loss, scale, after, phase):
    assert ROUNDED > 1e30
    assert OverflowHistory(floor=floor).observe(overflow=True, loss=loss, scale=scale, next_scale=after) == phase


@each(
    ("norms", "between"),
    [
        ([math.inf, math.nan, math.inf, math.inf, 1.0, 2.0], ("1", "2")),
        ([math.inf, math.inf, -1.0, 0.0, 1.0, 2.0], ("0", "1")),
        ([math.inf, math.inf, math.inf, 1.0, 1.0, 2.0], ("", "")),  # within a module
        ([math.inf] * 6, ("", "")),
        ([1.0, 1.0, 1.0, 1.0, math.inf, 1.0], ("", "")),  # of one parameter's own gradient
        ([1.0] * 6, ("", "")),
    ],
)
def test_the_boundary_of_an_overflow_is_between_modules(norms, between):
    names = [f"{module}.{kind}" for module in (0, 1, 2) for kind in ("weight", "bias")]
    assert boundary(names, norms) == between
