import math

import pytest

from mptrain.report.run_history import MOST_MARKS, MOST_ROWS, LearnerHistory, read_history
from mptrain.report.run_page import run_page
from mptrain.runlog import RunPaths, read_run
from mptrain.system.records import EventRecord, StepRecord
from tests.report.folders import make_run, warning

pytestmark = pytest.mark.usefixtures("undrawn")


def history_of(path, **options):
    return read_history(read_run(path), **options)


def test_every_learner_has_its_own_curves(tmp_path):
    history = history_of(
        make_run(tmp_path / "gan", learners=("discriminator", "generator"), overflows={2: "calibrating"})
    )
    assert list(history.learners) == ["discriminator", "generator"]
    assert [learner.refused for learner in history.learners.values()] == [1, 0]
    assert history.overflows.keys() == {"discriminator"}


def test_the_norm_of_an_overflow_is_left_out_and_the_rest_is_not(tmp_path):
    history = history_of(make_run(tmp_path / "run", overflows={5: "unexpected"}))
    learner = history.learners["main"]
    assert (learner.grad_norm.count, learner.loss.count, history.scaled) == (59, 60, True)
    assert not learner.grad_norm.lost()
    diverged = history_of(make_run(tmp_path / "one", scale=1.0, loss=lambda step: math.nan if step > 50 else 1.0))
    assert diverged.learners["main"].loss.lost() == list(range(51, 61))
    assert not diverged.scaled


def test_overflows_are_counted_all_and_kept_few(tmp_path):
    overflows = dict.fromkeys(range(1, 901), "unexpected")
    history = history_of(make_run(tmp_path / "run", steps=900, overflows=overflows, scale=2.0**1000))
    assert history.overflows["main"].counts == {"unexpected": 900}
    assert len(history.overflows["main"].marks["unexpected"]) <= MOST_MARKS
    ends = history.overflow_rows
    assert (ends.count, ends.between) == (900, 900 - 2 * MOST_ROWS)
    assert [event["step"] for event in ends.kept()[-2:]] == [899, 900]


def test_a_damaged_line_ends_the_curves_with_a_sentence(tmp_path):
    path = make_run(tmp_path / "run")
    lines = (path / "steps.jsonl").read_text().splitlines(keepends=True)
    lines[29] = "{damaged\n"
    (path / "steps.jsonl").write_text("".join(lines))
    history = history_of(path)
    assert history.steps == 29
    assert "line 30 is damaged" in history.notes[0]
    assert history.evaluations["val"]["top1"].count == 3


def test_an_event_that_lacks_its_fields_is_left_out(tmp_path):
    path = make_run(
        tmp_path / "run", events=[EventRecord("overflow", 3, {}), EventRecord("evaluation", 3, {"metrics": 7})]
    )
    history = history_of(path)
    assert len(history.notes) == 2
    assert history.evaluations["test"]["top1"].count == 1


def test_only_unusual_events_are_told(tmp_path):
    events = [
        warning("mind the gap"),
        EventRecord("checkpoint", 9, {"metric": 1.0}),
        EventRecord("data_order", 0, {"epoch": 0}),
        EventRecord("unusable", 9, {"split": "val", "samples": {"a.png": "empty"}}),
        EventRecord("resume", 30, {"notes": ["scaler began anew"], "warnings": []}),
    ]
    told = history_of(make_run(tmp_path / "run", events=events)).occurrences.kept()
    assert told[:2] == [(7, "warning", "mind the gap"), (9, "unusable", "split: val; samples: a.png empty")]
    assert told[2][2].startswith("notes: scaler began anew")
    assert len(told) == 3


def test_the_newest_operators_are_kept_and_damaged_ones_left_out(tmp_path):
    row = {"phase": "forward", "operator": "mm", "inputs": "float16", "outputs": "float16", "calls": 2}
    events = [
        EventRecord("operators", 0, {"operators": [{**row, "calls": 1}], "casts": []}),
        EventRecord("operators", 4, {"operators": [row], "casts": []}),
        EventRecord("operators", 6, {"operators": [{"phase": "forward"}], "casts": []}),
    ]
    path = make_run(tmp_path / "run", events=events)
    history = history_of(path)
    assert history.operators == {"operators": [row], "casts": []}
    assert len(history.notes) == 1
    assert not history.occurrences.count
    shown = next(section for section in run_page(RunPaths(path)).sections if section.title.startswith("Operator"))
    assert shown.blocks[0].text == "Of 2 operators in one step, 2 returned float16; no casts between dtypes."


def test_the_first_and_the_last_loss_scale_are_those_of_steps_and_not_of_buckets():
    learner = LearnerHistory.empty(4)
    scales = [4.0, 32.0, *[8.0] * 59, 16.0, 8.0, 8.0]  # wider buckets than a step at both ends
    for step, scale in enumerate(scales, 1):
        learner.add(StepRecord("main", step, step, 0, 1.0, scale, False, False, 1.0, 0.1))
    assert learner.loss_scale.width > 1
    assert learner.scale_path() == {"first": 4.0, "min": 4.0, "max": 32.0, "last": 8.0}
    assert LearnerHistory.empty(4).scale_path() == {}
