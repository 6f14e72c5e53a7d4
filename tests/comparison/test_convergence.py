"""Arms that had learned nothing, or were still on their way, are not called equal without a word."""

from __future__ import annotations

import math

import pytest
from comparison.fake_runs import measures

from mptrain.comparison.convergence import unsettled
from mptrain.comparison.results import Arm, Moment


def arm(*courses, name="val_top1", **changes):
    """Runs whose course has these values of one quantity."""
    runs = [
        measures(seed, course=tuple(Moment(10 * at, 10 * at, 100 * at, {name: value}) for at, value in enumerate(values, 1)), **changes)
        for seed, values in enumerate(courses)
    ]  # fmt: skip
    return Arm("fp32", tuple(runs))


def test_the_mean_move_between_the_last_two_validations_counts():
    (note,) = unsettled(arm((0.1, 0.5, 0.53), (0.2, 0.6, 0.55)), "top1", 0.03)
    assert "still moved by 0.04 of top1" in note
    assert unsettled(arm((0.1, 0.5, 0.53), (0.2, 0.6, 0.55)), "top1", 0.05) == []


def test_of_one_validation_the_training_loss_tells():
    (note,) = unsettled(arm((2.0, 1.99, 1.98), (2.0, 2.0, 1.9), name="train_loss"), "top1", 0.03)
    assert "fell by only 3 %" in note
    assert unsettled(arm((2.0, 1.0), name="train_loss"), "top1", 0.03) == []
    (note,) = unsettled(arm((2.0, 2.5), name="train_loss"), "top1", 0.03)
    assert "fell by only 0 %" in note


@pytest.mark.parametrize("values", [(), (2.0,), (2.0, math.nan)])
def test_where_nothing_tells_that_is_said(values):
    found = unsettled(arm((*values, math.nan), name="train_loss"), "top1", 0.03)
    assert "nothing on record tells whether fp32 learned" in found[0]


def test_runs_that_did_not_end_and_those_without_a_course_are_left_out():
    assert unsettled(arm((0.1, 0.9), status="failed"), "top1", 0.01) == []
    assert unsettled(Arm("fp32", (measures(0, course=()),)), "top1", 0.01) == []
