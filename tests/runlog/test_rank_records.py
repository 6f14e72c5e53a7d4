"""Records that ranks wrote of their own shards are those of the whole parameters when they are read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mptrain.runlog import read_run
from mptrain.runlog.directory import create_run
from mptrain.runlog.record_writer import RecordWriter
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_reader import merged_events, merged_histograms, merged_steps
from mptrain.runlog.run_state import RunState
from mptrain.system.errors import StorageError
from mptrain.system.records import (
    EventRecord,
    ExponentCounts,
    HistogramRecord,
    OverflowRecord,
    ScaleRecord,
    StepRecord,
)

STEP = StepRecord("main", 1, 1, 0, 0.5, 8.0, False, False, 3.0, 0.1)


def overflow(step, *names, kind="inf", boundary=("", ""), count=None):
    tensors = [[name, kind] for name in names]
    count = len(names) if count is None else count
    return {
        "event": "overflow",
        "learner": "main",
        "step": step,
        "tensors": tensors,
        "count": count,
        "boundary": list(boundary),
    }


def test_the_norm_is_that_of_all_shards_and_an_overflow_that_of_any():
    ranks = [[STEP, replace(STEP, step=2)], [replace(STEP, grad_norm=4.0, loss=7.0), replace(STEP, step=2)], [STEP]]
    (found,) = merged_steps(ranks)  # the third rank has not recorded the second step yet
    assert (found.grad_norm, found.loss, found.overflow) == (pytest.approx(math.sqrt(34)), 0.5, False)
    broken = replace(STEP, grad_norm=math.nan, overflow=True)
    (found,) = merged_steps([[STEP], [broken]])
    assert found.overflow
    assert math.isnan(found.grad_norm)


def test_an_overflow_has_the_names_of_all_ranks_in_the_order_of_modules():
    one = overflow(3, "a", "c", boundary=("c", "d"))
    two = overflow(3, "a", "b", "c", kind="nan", boundary=("c", "d"))
    scale = {"event": "scale", "step": 3}
    found = list(merged_events([[one, scale], [two, scale]]))
    assert [event["event"] for event in found] == ["overflow", "scale"]
    assert found[0]["tensors"] == [["a", "nan"], ["b", "nan"], ["c", "nan"]]
    assert (found[0]["count"], found[0]["boundary"]) == (3, ["c", "d"])


def test_boundaries_that_differ_are_left_out_but_not_those_of_ranks_that_stayed_finite():
    one, two = overflow(3, "a", boundary=("a", "b")), overflow(3, "b", boundary=("b", "c"))
    assert next(merged_events([[one], [two]]))["boundary"] == ["", ""]
    assert next(merged_events([[overflow(3)], [two]]))["boundary"] == ["b", "c"]


def test_an_overflow_of_another_rank_alone_stands_at_its_step():
    steps = [event["step"] for event in merged_events([[overflow(1), overflow(9)], [overflow(5, "a")]])]
    assert steps == [1, 5, 9]


def test_histograms_add_up_over_ranks():
    counts = ExponentCounts("float32", 1, 0, 0, 2.0, 0, (1, 1))
    first = HistogramRecord("main", 1, 8.0, False, {"weights": {"a": counts, "b": counts}}, {"a": (5, 1)})
    second = HistogramRecord("main", 1, 8.0, True, {"weights": {"a": replace(counts, lowest=1)}}, {"a": (7, 2)})
    (found,) = merged_histograms([[first], [second]])
    assert (found.tensors["weights"]["a"].counts, found.tensors["weights"]["a"].zeros) == ((1, 2, 1), 2)
    assert found.tensors["weights"]["b"] == counts  # replicas are counted by the first rank alone
    assert (found.unchanged, found.overflow) == ({"a": (12, 3)}, True)


def test_of_a_sample_on_one_rank_the_numbers_looked_at_add_up():
    counts = ExponentCounts("float32", 1, 0, 0, 2.0, 0, (1, 1))
    first = HistogramRecord("main", 1, 8.0, False, {"weights": {"a": counts, "b": counts}}, {}, {"a": 2})
    second = HistogramRecord("main", 1, 8.0, False, {"weights": {"a": counts}}, {})
    (found,) = merged_histograms([[first], [second]])
    assert found.sampled == {"a": 5}


def test_a_pass_that_was_left_out_names_the_shards_of_all_ranks():
    one = {**overflow(3, "a"), "event": "abandoned", "rank": 0}
    two = {**overflow(3, "b", kind="nan"), "event": "abandoned", "rank": 1}
    later = {**overflow(3, "c"), "event": "abandoned", "rank": 1}
    found = list(merged_events([[one], [two, later]]))
    assert [sorted(event["tensors"]) for event in found] == [[["a", "inf"], ["b", "nan"]], [["c", "inf"]]]
    assert all(event["event"] == "abandoned" and "rank" not in event for event in found)


def written(folder, ranks, events):
    """A run directory of a watched loop without shards, with these events of each rank."""
    directory = create_run(folder, "", "run")
    directory.write_state(RunState("run", (), "python x.py", ranks=ranks).begin())
    directory.write_config("watched: {}\n", ())
    for rank, records in events.items():
        paths = directory.paths if rank == 0 else RunPaths(directory.paths.ranks / str(rank))
        paths.root.mkdir(parents=True, exist_ok=True)
        writer = RecordWriter(paths)
        for record in records:
            writer.take(record)
        writer.close()
    return folder / "run"


def not_finite(kind, step, rank, *names):
    tensors = [[name, "nan"] for name in names]
    fields = {"learner": "main", "rank": rank, "tensors": tensors, "count": len(names), "boundary": ["", ""]}
    return EventRecord(kind, step, fields)


@pytest.mark.parametrize("first", [0, 1])
def test_events_of_all_ranks_are_in_the_order_of_steps_whatever_rank_0_has(first, tmp_path):
    both = OverflowRecord("main", 4, 8.0, "unexpected", "nan", (("a", "nan"),), 1, True, 0)
    own = [both, ScaleRecord("main", 4, 8.0, 4.0, "overflow"), EventRecord("warning", 6, {"message": "x"})]
    others = {
        1: [not_finite("rank_overflow", 2, 1, "a"), not_finite("rank_overflow", 9, 1, "a")],
        2: [not_finite("rank_overflow", 4, 2, "b"), not_finite("abandoned", 5, 2, "b")],
    }
    events = list(read_run(written(tmp_path, 3, ({0: own} if first else {0: []}) | others)).events())
    found = [(one["event"], one["step"], one.get("rank")) for one in events]
    whole = [
        ("rank_overflow", 2, 1),
        ("overflow", 4, None),
        ("rank_overflow", 4, 2),
        ("scale", 4, None),
        ("abandoned", 5, 2),
        ("warning", 6, None),
        ("rank_overflow", 9, 1),
    ]
    assert found == [one for one in whole if first or one[2]]


def test_a_rank_whose_records_are_missing_is_named(tmp_path):
    directory = create_run(tmp_path, "", "run")
    directory.write_state(RunState("run", (), "python x.py", ranks=2).begin())
    directory.write_config("watched: {}\n", ())
    first = RunPaths(directory.paths.ranks / "0")
    first.root.mkdir(parents=True)
    writer = RecordWriter(first)
    writer.take(STEP)
    writer.close()
    with pytest.raises(StorageError, match=r"ranks/1/steps\.jsonl is missing"):
        list(read_run(tmp_path / "run").steps())


def test_records_are_paired_by_learner_and_step_in_whatever_order_ranks_wrote_them():
    other = replace(STEP, learner="other", grad_norm=100.0)
    found = list(merged_steps([[STEP, other], [other, STEP]]))
    assert [(one.learner, one.grad_norm) for one in found] == [
        ("main", pytest.approx(3 * math.sqrt(2))),
        ("other", pytest.approx(100 * math.sqrt(2))),
    ]


def test_the_phase_is_that_of_the_rank_for_which_the_overflow_was_unexpected():
    one, two = {**overflow(3, "a"), "phase": "growth probe"}, {**overflow(3, "a"), "phase": "unexpected", "loss": "nan"}
    (found,) = merged_events([[one], [two]])
    assert (found["phase"], found["loss"]) == ("unexpected", "nan")
