"""histograms.jsonl: written, read back as it was, cut back with a checkpoint, and refused where it is damaged."""

from __future__ import annotations

import json
import math

import pytest
from histograms_by_hand import look

from mptrain.runlog import RecordWriter, RunDirectory, RunState, truncate_records
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import StorageError


def write(paths, *records):
    RunDirectory(paths).write_state(RunState(id="x", argv=(), command="mptrain", device="cpu").begin())
    writer = RecordWriter(paths)
    for record in records:
        writer.take(record)
    writer.close()


def sampled_steps(count):
    return [
        look(
            step,
            {"0": [0.5 * step, 0.0, math.inf], "": [2.0**-30]},
            {"0.weight": []},
            scale=2.0**step,
            overflow=step == 2,
            unchanged={"0.weight": (4, step)},
            updates={"0.weight": [1e-9]},
        )
        for step in range(1, count + 1)
    ]


def test_what_was_written_is_read_back_equal(paths):
    records = sampled_steps(3)
    write(paths, *records)
    assert list(read_run(paths.root).histograms()) == records


def test_lines_are_strict_json_also_for_a_scale_that_is_none(paths):
    records = [look(1, {"a": [1.0]}, scale=math.inf)]
    write(paths, *records)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(paths.histograms.read_text(), parse_constant=refuse)
    assert list(read_run(paths.root).histograms()) == records


def test_the_file_is_there_only_where_something_was_looked_at(paths):
    write(paths)
    assert not paths.histograms.exists()
    assert list(read_run(paths.root).histograms()) == []


def test_looks_after_a_checkpoint_are_taken_back_with_it(paths):
    first, second = sampled_steps(2)
    RunDirectory(paths).write_state(RunState(id="x", argv=(), command="mptrain", device="cpu").begin())
    writer = RecordWriter(paths)
    before = writer.flush()
    writer.take(first)
    lengths = writer.flush()
    writer.take(second)
    writer.close()
    truncate_records(paths, lengths)
    assert list(read_run(paths.root).histograms()) == [first]
    again = RecordWriter(paths)  # the attempt that goes on
    again.take(second)
    again.close()
    assert list(read_run(paths.root).histograms()) == [first, second]
    truncate_records(paths, before)  # a checkpoint before the first look knew of no such file
    assert list(read_run(paths.root).histograms()) == []


def test_a_line_that_was_half_written_is_left_out(paths):
    write(paths, *sampled_steps(2))
    content = paths.histograms.read_bytes()
    paths.histograms.write_bytes(content[:-20])
    assert [record.step for record in read_run(paths.root).histograms()] == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("tensors"),
        lambda fields: fields.update(tensors=[1]),
        lambda fields: fields["tensors"]["updates"]["0.weight"].pop("counts"),
        lambda fields: fields["tensors"]["updates"]["0.weight"].update(more=1),
        lambda fields: fields.update(unchanged={"0.weight": [1]}),
        lambda fields: fields.update(unchanged={"0.weight": ["some", "few"]}),
        lambda fields: fields.update(other=1),
        lambda fields: fields.update(step="2"),
        lambda fields: fields.update(loss_scale="x"),
        lambda fields: fields.update(overflow=1),
        lambda fields: fields.update(learner=None),
        lambda fields: fields.update(unchanged={"0.weight": [4, -1]}),
        *(
            lambda fields, change=change: fields["tensors"]["updates"]["0.weight"].update(change)
            for change in (
                {"largest": "x"},
                {"largest": -1.0},
                {"largest": True},
                {"zeros": "1"},
                {"inf": 1.5},
                {"nan": None},
                {"dtype": 16},
                {"lowest": 0.5},
                {"lowest": 10**9},
                {"counts": [-1]},
                {"counts": ["1"]},
            )
        ),
    ],
)
def test_damage_is_named_by_file_and_line(paths, change):
    write(paths, *sampled_steps(2))
    one, two = paths.histograms.read_text().splitlines()
    fields = json.loads(two)
    change(fields)
    paths.histograms.write_text(f"{one}\n{json.dumps(fields)}\n")
    found = read_run(paths.root).histograms()
    assert next(found).step == 1
    with pytest.raises(StorageError, match=r"histograms\.jsonl, line 2 is damaged: it is not a histogram record"):
        next(found)


@pytest.mark.parametrize("left", [None, b"", b"{}\n", b"x" * 9999])
def test_a_run_goes_on_without_the_histograms_that_were_lost(paths, left):
    """They are only looks: gone, or begun anew by an attempt that had lost them."""
    first, second = sampled_steps(2)
    RunDirectory(paths).write_state(RunState(id="x", argv=(), command="mptrain", device="cpu").begin())
    writer = RecordWriter(paths)
    writer.take(first)
    lengths = writer.flush()
    writer.close()
    assert truncate_records(paths, lengths) == []
    paths.histograms.unlink()
    if left is not None:
        paths.histograms.write_bytes(left)
    (note,) = truncate_records(paths, lengths)
    assert str(paths.histograms) in note
    assert "histograms of all steps so far are lost" in note
    again = RecordWriter(paths)
    again.take(second)
    again.close()
    assert list(read_run(paths.root).histograms()) == [second]
