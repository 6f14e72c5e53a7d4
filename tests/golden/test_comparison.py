"""The comparison of golden records tells what differs, where, and leaves renamed words alone."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.comparison import compare, translated
from tests.golden.kept import text_of

ROOT = Path(__file__).parents[2]


def step(number, **changed):
    usual = {"learner": "main", "step": number, "loss": 0.1 * number, "loss_scale": 8.0, "lr": 0.0, "skipped": False}
    return {**usual, **changed}


RECORD = {
    "run": {"precision": "fp16_dynamic"},
    "steps": [step(1), step(2), step(3, skipped=True), step(4)],
    "epochs": [{"learner": "main", "epoch": "1", "train_loss": "0.25"}],
    "events": [{"event": "overflow", "step": 3, "phase": "abnormal"}, {"event": "scale", "step": 3, "why": "overflow"}],
    "summary": {"metric": 0.5, "learners": {"main": {"skipped": 1}}},
    "data": {"name": "abc"},
    "state": {".learners.main.scaler.clean": "2", ".model.0.weight": "torch.float32 (2,) abc"},
}


def folders(root, change=lambda record: None):
    """Two folders of two runs each, in the second of which one record is changed."""
    for name in ("before", "after"):
        (root / name).mkdir()
        for run in ("one", "two"):
            record = copy.deepcopy(RECORD)
            if (name, run) == ("after", "two"):
                change(record)
            (root / name / f"{run}.json").write_text(text_of(record))
    return root / "before", root / "after"


def planted(part, *places, value):
    def change(record):
        inner = record[part]
        for place in places[:-1]:
            inner = inner[place]
        inner[places[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (planted("steps", 1, "loss", value=0.2000001), "two: steps, step 2, main, loss: 0.2 -> 0.2000001"),
        (planted("steps", 1, "loss_scale", value=8), "two: steps, step 2, main, loss_scale: 8.0 -> 8"),
        (planted("steps", 0, "lr", value=-0.0), "two: steps, step 1, main, lr: 0.0 -> -0.0"),
        (planted("steps", 2, "skipped", value=False), "two: steps, step 3, main, skipped: True -> False"),
        (lambda record: record["steps"].pop(), "two: steps, step 4, main, learner: 'main' -> nothing (and 5 more)"),
        (planted("epochs", 0, "train_loss", value="0.26"), "two: epochs, epoch 1, main, train_loss: '0.25' -> '0.26'"),
        (planted("events", 1, "why", value="growth"), "two: events, step 3, scale, why: 'overflow' -> 'growth'"),
        (planted("summary", "learners", "main", "skipped", value=2), "two: summary, learners.main.skipped: 1 -> 2"),
        (planted("state", ".model.0.weight", value="torch.float32 (2,) abd"), "two: state, model.0.weight: "
         "'torch.float32 (2,) abc' -> 'torch.float32 (2,) abd'"),
    ],
)  # fmt: skip
def test_a_changed_value_is_told_with_run_file_and_step(tmp_path, change, told):
    count, found = compare(*folders(tmp_path, change), {})
    assert (count, [str(one) for one in found]) == (2, [told])


def test_of_several_changes_the_first_step_is_told(tmp_path):
    def change(record):
        for number in (3, 1, 2):
            record["steps"][number]["loss"] = 0.0

    [told] = compare(*folders(tmp_path, change), {})[1]
    assert str(told) == "two: steps, step 2, main, loss: 0.2 -> 0.0 (and 2 more)"


def test_a_missing_run_is_a_difference(tmp_path):
    before, after = folders(tmp_path)
    (after / "one.json").unlink()
    count, (told,) = compare(before, after, {})
    assert (count, str(told)) == (1, "one: run, the whole: 'a record' -> nothing")


def test_a_run_that_failed_is_a_difference_on_both_sides_too(tmp_path):
    before, after = folders(tmp_path)
    for folder in (before, after):
        (folder / "one.json").write_text(text_of({"run": RECORD["run"], "exit_code": 4}))
    (after / "two.json").write_text((after / "one.json").read_text())
    count, found = compare(before, after, {})
    assert (count, [str(one) for one in found]) == (2, ["one: run, exit code: 4 -> 4", "two: run, exit code: 0 -> 4"])


def test_renamed_words_are_equal_on_the_older_side_only(tmp_path):
    def change(record):
        record["events"][0]["phase"] = "unexpected"
        record["state"][".learners.main.scaler.growth_tracker"] = record["state"].pop(".learners.main.scaler.clean")

    before, after = folders(tmp_path, change)
    (after / "one.json").write_text((after / "two.json").read_text())
    renamed = {"abnormal": "unexpected", "scaler.clean": "scaler.growth_tracker"}
    assert compare(before, after, renamed) == (2, [])
    assert len(compare(before, after, {})[1]) == 4
    assert compare(after, before, renamed)[1] != []


def test_a_word_inside_of_a_longer_one_is_left_alone():
    renamed = {"clean": "growth_tracker", "growth probe": "probing"}
    record = {"unclean": "clean_steps", "a.clean.b": ["clean", "growth probe", 1.0]}
    assert translated(record, renamed) == {
        "unclean": "clean_steps", "a.growth_tracker.b": ["growth_tracker", "probing", 1.0]
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"makes one key of a\.clean and a\.growth_tracker"):
        translated({"state": {"a.clean": 1, "a.growth_tracker": 2, "b": 3}}, {"clean": "growth_tracker"})


def test_the_command_says_equal_or_each_difference(tmp_path):
    before, after = folders(tmp_path, planted("steps", 1, "loss", value=0.5))

    def command(*words):
        done = subprocess.run(
            [sys.executable, "-m", "tests.golden", "compare", *map(str, words)],
            check=False, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout

    assert command(before, before) == (0, "2 runs are equal\n")
    code, output = command(before, after)
    assert (code, output.splitlines()[0]) == (1, "two: steps, step 2, main, loss: 0.2 -> 0.5")
    assert json.loads(text_of(RECORD)) == RECORD
