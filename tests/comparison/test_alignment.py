"""Alignment: equal updates and equal samples are different points where updates were skipped."""

from __future__ import annotations

import math

import pytest
from comparison.fake_runs import measures

from mptrain.comparison.alignment import align, align_alone, value_at
from mptrain.comparison.results import Moment


def run(*moments, name="val_top1"):
    """A run by moments: step, updates, value; ten samples a step."""
    course = tuple(Moment(step, updates, 10 * step, {name: value}) for step, updates, value in moments)
    return measures(course=course)


#: Accuracy rises by .01 a step; six of thirty updates of the first were skipped.
SKIPPED = run((10, 8, 0.1), (20, 16, 0.2), (30, 24, 0.3))
WHOLE = run((10, 10, 0.1), (20, 20, 0.2), (30, 30, 0.3))


def test_at_equal_samples_both_have_seen_the_same_data():
    _, found = align([(SKIPPED, WHOLE)], "top1")
    assert (found.by, found.at, found.quantity) == ("samples", 300, "val_top1")
    assert found.value.mean == pytest.approx(0.3)
    assert found.difference.mean == pytest.approx(0.0)


def test_at_equal_updates_the_reference_is_taken_between_two_validations():
    found, _ = align([(SKIPPED, WHOLE)], "top1")
    assert (found.by, found.at, found.quantity) == ("updates", 24, "val_top1")
    assert found.value.mean == pytest.approx(0.3)
    assert found.difference.mean == pytest.approx(0.3 - 0.24)


def test_all_pairs_are_at_the_point_that_the_shortest_run_reached():
    updates, samples = align([(SKIPPED, WHOLE), (WHOLE, run((10, 10, 0.1), (20, 20, 0.4)))], "top1")
    assert (updates.at, samples.at) == (20, 200)
    assert samples.difference.mean == pytest.approx((0.0 + 0.2 - 0.4) / 2)
    assert samples.difference.n == 2


def test_the_reference_alone_is_at_what_all_its_runs_reached():
    updates, samples = align_alone([SKIPPED, WHOLE], "top1")
    assert (updates.at, samples.at, updates.difference) == (24, 300, None)
    assert updates.value.mean == pytest.approx((0.3 + 0.24) / 2)


def test_where_a_validation_is_missing_the_training_loss_of_all_is_taken():
    def losing(loss, *, validated):
        course = (Moment(15, 15, 150, {"train_loss": 2 * loss}), Moment(30, 30, 300, {"train_loss": loss}))
        return measures(course=(*course, Moment(30, 30, 300, {"val_top1": 0.9})) if validated else course)

    for found in align([(losing(0.5, validated=True), losing(0.4, validated=False))], "top1"):
        assert found.quantity == "train_loss"
        assert found.difference.mean == pytest.approx(0.1)


def test_of_moments_after_as_many_updates_the_last_counts():
    stuck = run((10, 5, 0.1), (20, 5, 0.2), (30, 8, 0.5))
    assert value_at(stuck, "val_top1", 5, "updates") == 0.2
    assert value_at(stuck, "val_top1", 6, "updates") == pytest.approx(0.3)


def test_nothing_is_said_beyond_what_was_measured():
    assert math.isnan(value_at(WHOLE, "val_top1", 9, "updates"))
    assert math.isnan(value_at(WHOLE, "val_top1", 31, "updates"))
    assert math.isnan(value_at(WHOLE, "val_loss", 10, "updates"))
    assert align([(WHOLE, measures())], "top1") == ()
    assert align([], "top1") == align_alone([], "top1") == ()
    assert [found.by for found in align_alone([run((10, 0, 0.1))], "top1")] == ["samples"]
