"""Which curves a record adds to, and under which names."""

import pytest

from mptrain.logger.base import flat, markdown_table, numbers, points, read_table
from mptrain.system.records import (
    EpochRecord,
    EvalRecord,
    EventRecord,
    OverflowRecord,
    ProgressRecord,
    ScaleRecord,
    StepRecord,
)


def step(number=7, learner="main", overflow=False):
    return StepRecord(learner, number, 6, 0, 0.5, 1024.0, overflow, overflow, 2.0, 0.1)


def test_a_step_of_one_of_several_learners_has_its_name():
    assert points(step()) == {
        "train/loss": 0.5,
        "train/loss_scale": 1024.0,
        "train/grad_norm": 2.0,
        "train/lr": 0.1,
        "train/overflow": 0.0,
        "train/skipped": 0.0,
    }
    assert points(step(learner="critic"))["train/critic/loss"] == 0.5


def test_thinning_keeps_every_nth_step_and_all_overflows():
    kept = [n for n in range(1, 13) if points(step(n, overflow=n == 7), every_steps=5)]
    assert kept == [5, 7, 10]


def test_overflows_evaluations_epochs_and_progress_have_their_numbers():
    record = OverflowRecord("main", 3, 2.0, "growth probe", "finite", (("w", "inf"),), 4, True, 0)
    assert points(record) == {"overflow/growth_probe": 4.0}
    assert points(EvalRecord("val", 9, 1, 200, {"loss": 0.3, "top1": 0.9})) == {"val/loss": 0.3, "val/top1": 0.9}
    epoch = EpochRecord("main", 2, 76, 75, 1, 0.4, 8.0, 0.1, {"top1": 0.5}, 3.0, 400.0)
    counts = {"epoch/epoch": 2.0, "epoch/updates": 75.0, "epoch/skipped": 1.0}
    assert points(epoch) == {**counts, "epoch/train_loss": 0.4, "epoch/seconds": 3.0, "epoch/terms_per_second": 400.0}
    progress = ProgressRecord(5, 10, 0, 1, 123.0, "tokens", 0.25, 1000, 4.0, "training")
    measured = {"system/tokens_per_second": 123.0, "system/data_wait": 0.25, "system/memory_bytes": 1000.0}
    assert points(progress) == measured


@pytest.mark.parametrize("record", [EventRecord("warning", 1, {"message": "x"}), ScaleRecord("main", 1, 2.0, 1.0, "o")])
def test_other_records_add_to_no_curve(record):
    assert points(record) == {}


def test_a_tree_is_flattened_and_its_numbers_can_be_drawn():
    tree = {"a": {"b": {"c": 1, "d": None}, "e": []}, "f": True, "g": {}, "h": [1, "x"], "i": "text"}
    leaves = {"a.b.c": 1, "a.b.d": "null", "a.e": "[]", "f": True, "g": "{}", "h": '[1, "x"]', "i": "text"}
    assert flat(tree) == leaves
    assert numbers({"a": {"b": 1, "c": "x"}, "d": True, "e": 2.5, "f": None}) == {"a.b": 1.0, "e": 2.5}


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "transcripts-000010.tsv"
    path.write_text('reference\tmodel\none\t"two\nlines"\n', encoding="utf-8")
    assert read_table(path) == [["reference", "model"], ["one", "two\nlines"]]
    assert markdown_table(path).splitlines() == ["| reference | model |", "| --- | --- |", "| one | two lines |"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"model\n" + 131073 * b"a" + b"\n", "cannot be shown: field larger"), (b"", "is empty")],
    ids=["too long", "empty"],
)
def test_of_a_table_that_cannot_be_read_one_row_says_so(tmp_path, content, said):
    path = tmp_path / "continuations-000010.tsv"
    path.write_bytes(content)
    columns, row = read_table(path)
    assert len(columns) == len(row) == 1
    assert row[0].startswith(f"{path.name} {said}")
    assert said in markdown_table(path)


def test_letters_that_are_no_utf8_are_replaced(tmp_path):
    path = tmp_path / "translations-000010.tsv"
    path.write_bytes(b"model\nGr\xfc\xdfe\n")
    assert read_table(path) == [["model"], ["Gr\ufffd\ufffde"]]
