"""The course of a run: its validations, or the training loss by windows."""

from __future__ import annotations

import math

import pytest

from mptrain.study.comparison.results import Arm, CurvePoint
from mptrain.study.comparison.run_measures import (
    align,
    align_reference,
    convergence_warnings,
    learning_curve,
    losses_at_ends,
    neither_learned,
    value_at,
)
from tests.study.comparison.fake_runs import epoch, measures, step, write_run


def course(root, *records, steps=30):
    return learning_curve(write_run(root, records=records, end=None), steps, 9.5)


def test_each_validation_is_a_moment(tmp_path):
    found = course(tmp_path, step(1, 1), epoch(1, 10, 9, top1=0.1, loss=2.0), epoch(2, 20, 18, top1=0.2, loss=1.0))
    assert found == (
        CurvePoint(10, 9, 95, {"val_top1": 0.1, "val_loss": 2.0}),
        CurvePoint(20, 18, 190, {"val_top1": 0.2, "val_loss": 1.0}),
    )


def test_the_fewest_updates_of_several_learners_count(tmp_path):
    rows = [
        epoch(number, 10 * number, 10 * number - lost, learner=learner, top1=0.1)
        for number in (1, 2)
        for learner, lost in (("d", 0), ("g", 4), ("h", 1))
    ]
    assert [moment.updates for moment in course(tmp_path, *rows)] == [6, 16]


def test_without_two_validations_the_training_loss_is_known_by_windows(tmp_path):
    steps = [step(number, number, float(number)) for number in range(1, 26)]
    found = course(tmp_path, *steps, epoch(1, 25, 25, top1=0.3), steps=25)
    assert [(moment.step, moment.samples, moment.values) for moment in found] == [
        (10, 95, {"train_loss": 5.5}),
        (20, 190, {"train_loss": 15.5}),
        (25, 238, {"val_top1": 0.3}),
        (25, 238, {"train_loss": 23.0}),
    ]


def test_skipped_and_nonfinite_losses_of_a_window_do_not_count(tmp_path):
    steps = [step(number, number, 0.5) for number in range(1, 9)]
    steps += [step(9, 8, 7.0, skipped=True), step(10, 9, math.nan)]
    steps += [step(10, 10, 99.0, learner="other")]
    (found,) = course(tmp_path / "a", *steps, steps=10)
    assert (found.updates, found.values) == (9, {"train_loss": pytest.approx(0.5)})
    assert course(tmp_path / "b", *(step(number, 0, skipped=True) for number in range(1, 11)), steps=10) == ()
    long = (step(number, number) for number in range(1, 501))
    assert len(course(tmp_path / "c", *long, steps=500)) == 50


def run(*moments, name="val_top1"):
    """A run by moments: step, updates, value; ten samples a step."""
    course = tuple(CurvePoint(step, updates, 10 * step, {name: value}) for step, updates, value in moments)
    return measures(course=course)


#: Accuracy rises by .01 a step; six of thirty updates of the first were skipped.
SKIPPED = run((10, 8, 0.1), (20, 16, 0.2), (30, 24, 0.3))
WHOLE = run((10, 10, 0.1), (20, 20, 0.2), (30, 30, 0.3))


def test_runs_are_compared_at_equal_updates_and_equal_samples():
    updates, samples = align([(SKIPPED, WHOLE)], "top1")
    assert (updates.by, updates.at, updates.quantity) == ("updates", 24, "val_top1")
    assert (updates.value.mean, updates.difference.mean) == pytest.approx((0.3, 0.3 - 0.24))  # between two validations
    assert (samples.by, samples.at, samples.quantity) == ("samples", 300, "val_top1")
    assert (samples.value.mean, samples.difference.mean) == pytest.approx((0.3, 0.0))
    updates, samples = align([(SKIPPED, WHOLE), (WHOLE, run((10, 10, 0.1), (20, 20, 0.4)))], "top1")
    assert (updates.at, samples.at) == (20, 200)  # what the shortest run reached
    assert samples.difference.mean == pytest.approx((0.0 + 0.2 - 0.4) / 2)
    assert samples.difference.n == 2
    updates, samples = align_reference([SKIPPED, WHOLE], "top1")
    assert (updates.at, samples.at, updates.difference) == (24, 300, None)
    assert updates.value.mean == pytest.approx((0.3 + 0.24) / 2)


def test_where_a_validation_is_missing_the_training_loss_of_all_is_taken():
    def losing(loss, *, validated):
        course = (CurvePoint(15, 15, 150, {"train_loss": 2 * loss}), CurvePoint(30, 30, 300, {"train_loss": loss}))
        return measures(course=(*course, CurvePoint(30, 30, 300, {"val_top1": 0.9})) if validated else course)

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
    assert align([], "top1") == align_reference([], "top1") == ()
    assert [found.by for found in align_reference([run((10, 0, 0.1))], "top1")] == ["samples"]


def arm(*courses, name="val_top1", **changes):
    """Runs whose course has these values of one quantity."""
    runs = [
        measures(seed, course=tuple(CurvePoint(10 * at, 10 * at, 100 * at, {name: value}) for at, value in enumerate(values, 1)), **changes)
        for seed, values in enumerate(courses)
    ]  # fmt: skip
    return Arm("fp32", tuple(runs))


def test_the_mean_move_between_the_last_two_validations_counts():
    (note,) = convergence_warnings(arm((0.1, 0.5, 0.53), (0.2, 0.6, 0.55)), "top1", 0.03)
    assert "still changed by 0.04 between" in note
    assert convergence_warnings(arm((0.1, 0.5, 0.53), (0.2, 0.6, 0.55)), "top1", 0.05) == []


UNTRAINED, TRAINED = {"losses": (2.3, 2.29)}, {"losses": (2.3, 0.4)}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (UNTRAINED, UNTRAINED, "the training loss of no run fell by 5 %"),
        ({"losses": (2.3, 40.0)}, UNTRAINED, "the training loss of no run fell"),
        (TRAINED, UNTRAINED, ""),
        (UNTRAINED, {"losses": (math.nan, math.nan)}, ""),
        ({"losses": (-2.3, -2.3)}, UNTRAINED, ""),
        ({**TRAINED, "metrics": {"top1": 0.0}}, {**UNTRAINED, "metrics": {"top1": 0.0}}, "top1 is 0 in every run"),
        ({**TRAINED, "metrics": {"top1": 0.0}}, {**TRAINED, "metrics": {"top1": 0.1}}, ""),
    ],
)
def test_neither_has_learned_where_the_loss_did_not_fall_or_the_metric_is_zero(one, other, said):
    runs = [[measures(seed, **changes) for seed in range(2)] for changes in (one, other)]
    assert neither_learned(*runs, "top1", 0.01, higher_is_better=True).startswith(said)
    assert bool(neither_learned(*runs, "top1", 0.01, higher_is_better=True)) == bool(said)


def test_what_validations_gain_is_learning_too():
    gains, stays = arm((0.1, 0.5), (0.1, 0.1), **UNTRAINED).runs, arm((0.1, 0.105), (0.1, 0.1), **UNTRAINED).runs
    assert not neither_learned(gains, stays, "top1", 0.01, higher_is_better=True)
    assert neither_learned(stays, stays, "top1", 0.01, higher_is_better=True)


def test_the_losses_at_the_ends_are_those_of_one_learner(tmp_path):
    falling = [step(at, at, loss=2.0 if at <= 10 else 1.0) for at in range(1, 31)]
    place = write_run(tmp_path, "a", records=[*falling, epoch(1, 15, 15, top1=0.1), epoch(2, 30, 30, top1=0.2)])
    assert losses_at_ends(place, ()) == (2.0, 0.5)
    windows = (CurvePoint(10, 10, 10, {"train_loss": 2.0}), CurvePoint(30, 30, 30, {"train_loss": 1.0}))
    assert losses_at_ends(place, windows) == (2.0, 1.0)
    both = write_run(tmp_path, "b", records=[step(1, 1, learner=name) for name in ("generator", "discriminator")])
    assert math.isnan(losses_at_ends(both, ())[0])


@pytest.mark.parametrize("values", [(), (2.0,), (2.0, math.nan)])
def test_where_nothing_tells_that_is_said(values):
    found = convergence_warnings(arm((*values, math.nan), name="train_loss"), "top1", 0.03)
    assert "the records do not show whether fp32 learned" in found[0]
    assert convergence_warnings(arm((0.1, 0.9), status="failed"), "top1", 0.01) == []
    assert convergence_warnings(Arm("fp32", (measures(0, course=()),)), "top1", 0.01) == []
