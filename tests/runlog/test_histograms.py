"""histograms.jsonl: written, read back as it was, cut back with a checkpoint, and refused where it is damaged."""

from __future__ import annotations

import json
import math

import pytest

from mptrain.runlog import RecordWriter, RunDirectory, RunState, truncate_records
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import StorageError
from tests.histograms_by_hand import look


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


@pytest.fixture
def run(paths):
    """A run in progress that takes histograms, and reads them back."""

    class Run:
        def __init__(self):
            RunDirectory(paths).write_state(RunState(id="x", argv=(), command="mptrain", device="cpu").begin())

        def take(self, *records):
            writer = RecordWriter(paths)
            for record in records:
                writer.take(record)
            lengths = writer.flush()
            writer.close()
            return lengths

        def read(self):
            return list(read_run(paths.root).histograms())

    return Run()


def test_what_was_written_is_read_back_equal(run):
    records = sampled_steps(3)
    run.take(*records)
    assert run.read() == records


def test_lines_are_strict_json_also_for_a_scale_that_is_none(run, paths):
    records = [look(1, {"a": [1.0]}, scale=math.inf)]
    run.take(*records)
    json.loads(paths.histograms.read_text(), parse_constant=pytest.fail)
    assert run.read() == records


def test_the_file_is_there_only_where_something_was_looked_at(run, paths):
    run.take()
    assert not paths.histograms.exists()
    assert run.read() == []


def test_looks_after_a_checkpoint_are_taken_back_with_it(run, paths):
    first, second = sampled_steps(2)
    before = run.take()
    lengths = run.take(first)
    run.take(second)
    truncate_records(paths, lengths)
    assert run.read() == [first]
    run.take(second)  # the attempt that goes on
    assert run.read() == [first, second]
    truncate_records(paths, before)  # a checkpoint before the first look knew of no such file
    assert run.read() == []


def test_a_line_that_was_half_written_is_left_out(run, paths):
    run.take(*sampled_steps(2))
    paths.histograms.write_bytes(paths.histograms.read_bytes()[:-20])
    assert [record.step for record in run.read()] == [1]


def updated(*path, **change):
    """Change fields below a path of keys; a field whose new value is Ellipsis goes."""

    def damage(fields):
        for key in path:
            fields = fields[key]
        fields.update(change)
        for key in [key for key, value in change.items() if value is ...]:
            del fields[key]

    return damage


COUNTS = {
    "counts": (..., [-1], ["1"]), "more": (1,), "largest": ("x", -1.0, True), "zeros": ("1",), "inf": (1.5,), "nan": (None,),
    "dtype": (16,), "lowest": (0.5, 10**9),
}  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        *(updated(unchanged={"0.weight": pair}) for pair in ([1], ["some", "few"], [4, -1])),
        *(updated(tensors=tensors) for tensors in (..., [1])),
        *(updated(**{name: value}) for name, value in {"other": 1, "step": "2", "loss_scale": "x", "overflow": 1, "learner": None}.items()),
        *(updated("tensors", "updates", "0.weight", **{name: value}) for name, values in COUNTS.items() for value in values),
    ],
)  # fmt: skip
def test_damage_is_named_by_file_and_line(run, paths, damage):
    run.take(*sampled_steps(2))
    one, two = paths.histograms.read_text().splitlines()
    fields = json.loads(two)
    damage(fields)
    paths.histograms.write_text(f"{one}\n{json.dumps(fields)}\n")
    found = read_run(paths.root).histograms()
    assert next(found).step == 1
    with pytest.raises(StorageError, match=r"histograms\.jsonl, line 2 is damaged"):
        next(found)


@pytest.mark.parametrize("left", [None, b"", b"{}\n", b"x" * 9999])
def test_a_run_goes_on_without_the_histograms_that_were_lost(run, paths, left):
    first, second = sampled_steps(2)
    lengths = run.take(first)
    assert truncate_records(paths, lengths) == []
    paths.histograms.unlink()
    if left is not None:
        paths.histograms.write_bytes(left)
    (note,) = truncate_records(paths, lengths)
    assert str(paths.histograms) in note
    run.take(second)
    assert run.read() == [second]
