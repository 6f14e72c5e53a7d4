"""The course of a run: its validations, or the training loss by windows."""

from __future__ import annotations

import math

import pytest
from comparison.fake_runs import epoch, step, write_run

from mptrain.comparison.learning_curve import course_of
from mptrain.comparison.results import Moment


def course(root, *records, steps=30):
    return course_of(write_run(root, records=records, end=None), steps, 9.5)


def test_each_validation_is_a_moment(tmp_path):
    found = course(tmp_path, step(1, 1), epoch(1, 10, 9, top1=0.1, loss=2.0), epoch(2, 20, 18, top1=0.2, loss=1.0))
    assert found == (
        Moment(10, 9, 95, {"val_top1": 0.1, "val_loss": 2.0}),
        Moment(20, 18, 190, {"val_top1": 0.2, "val_loss": 1.0}),
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


def test_long_runs_have_fifty_windows(tmp_path):
    steps = [step(number, number) for number in range(1, 2001)]
    assert len(course(tmp_path, *steps, steps=2000)) == 50


def test_skipped_and_nonfinite_losses_and_other_learners_do_not_count(tmp_path):
    steps = [step(number, number, 0.5) for number in range(1, 9)]
    steps += [step(9, 8, 7.0, skipped=True), step(10, 9, math.nan)]
    steps += [step(10, 10, 99.0, learner="other")]
    (found,) = course(tmp_path, *steps, steps=10)
    assert (found.updates, found.values) == (9, {"train_loss": pytest.approx(0.5)})


def test_a_window_without_an_applied_step_says_nothing(tmp_path):
    assert course(tmp_path, *(step(number, 0, skipped=True) for number in range(1, 11)), steps=10) == ()
