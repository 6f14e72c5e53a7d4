"""The record writer: strict lines, exact lengths, few system calls, and cutting back to a checkpoint."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.runlog import RecordWriter, RunPaths, truncate_records
from mptrain.runlog.record_writer import BUFFER_BYTES
from mptrain.runlog.run_paths import HISTOGRAMS, RECORD_FILES, STEPS
from mptrain.system.errors import StorageError
from mptrain.system.records import EventRecord


def contents(paths):
    return {name: path.read_bytes() if path.exists() else None for name, path in paths.records().items()}


def strict(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_each_kind_of_record_goes_to_its_file_as_strict_json(paths, some_records):
    writer = RecordWriter(paths)
    for record in some_records:
        writer.take(record)
    writer.close()
    steps, events = ([strict(line) for line in path.read_text().splitlines()] for path in (paths.steps, paths.events))
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[1]["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    assert [event["event"] for event in events] == ["start", "overflow", "scale", "evaluation"]
    assert events[0] == {"event": "start", "step": 0, "device": "cpu"}
    assert events[1]["tensors"] == [["fc.weight", "inf"], ["fc.bias", "nan"]]
    assert (events[2]["from_scale"], events[2]["to_scale"], events[2]["why"]) == (1024.0, 512.0, "overflow")
    assert len(paths.epochs.read_text().splitlines()) == 2


def test_a_file_that_was_removed_takes_nothing_in_silence(paths, some_records):
    writer = RecordWriter(paths)
    writer.take(some_records[0])
    writer.flush()
    paths.events.unlink()
    with pytest.raises(StorageError, match=r"events\.jsonl was removed while the run was writing it"):
        writer.flush()


def test_epochs_have_one_header_and_empty_cells_for_lost_metrics(epoch_record, paths):
    for epoch, val in ((1, {"loss": 0.5, "top1": 0.1}), (2, {"top1": math.nan}), (3, {})):
        writer = RecordWriter(paths)  # each epoch in its own attempt
        writer.take(epoch_record(epoch, **val))
        writer.close()
    rows = list(csv.reader(paths.epochs.read_text().splitlines()))
    header = "learner,epoch,step,updates,skipped,train_loss,loss_scale,lr,val_loss,val_top1,seconds,terms_per_second"
    assert rows[0] == header.split(",")
    assert rows[1][8:10] == ["0.5", "0.1"]
    assert rows[2][8:10] == ["", "nan"]
    assert rows[3][8:10] == ["", ""]
    assert len(rows) == 4


def test_a_metric_that_the_first_epoch_had_not_is_refused(epoch_record, paths):
    writer = RecordWriter(paths)
    writer.take(epoch_record(1, top1=0.5))
    with pytest.raises(ValueError, match="val_f1"):
        writer.take(epoch_record(2, f1=0.5))
    writer.close()


@pytest.mark.parametrize("name", ["event", "step", "nonfinite"])
def test_the_fields_of_an_event_cannot_hide_its_kind_or_step(paths, name):
    writer = RecordWriter(paths)
    with pytest.raises(ValueError, match=name):
        writer.take(EventRecord("warning", 1, {name: 0}))
    writer.close()


def test_records_cost_no_system_call_until_the_buffer_is_full(step_record, paths, monkeypatch):
    writes = []
    really = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(len(data)) or really(descriptor, data))
    writer = RecordWriter(paths)
    for step in range(1, 201):
        writer.take(step_record(step))
    assert writes == []
    writer.flush()
    assert len(writes) == 1
    assert paths.steps.read_bytes().count(b"\n") == 200
    for step in range(201, 2001):
        writer.take(step_record(step))
    assert 2 <= len(writes) <= 10
    assert min(writes[1:]) >= BUFFER_BYTES
    writer.close()
    assert paths.steps.read_bytes().count(b"\n") == 2000


def test_flush_returns_the_exact_length_of_every_file(paths, some_records):
    writer = RecordWriter(paths)
    assert writer.flush() == {name: 0 for name in RECORD_FILES if name != HISTOGRAMS}
    for record in some_records:
        writer.take(record)
    lengths = writer.flush()
    assert lengths == {name: len(content) for name, content in contents(paths).items() if content is not None}
    writer.close()
    writer.close()


@settings(max_examples=25, deadline=None)
@given(before=st.integers(0, 40), after=st.integers(0, 40), torn=st.binary(max_size=30))
def test_a_run_cut_back_goes_on_as_one_undisturbed(step_record, epoch_record, tmp_path_factory, before, after, torn):
    def record(writer, first, last):
        for step in range(first, last):
            writer.take(step_record(step, loss=1 / (step + 1)))
            writer.take(EventRecord("warning", step, {"text": "é" * step}))
            writer.take(epoch_record(step + 1, top1=0.5))

    calm, killed = (RunPaths(tmp_path_factory.mktemp("run")) for _ in range(2))
    writer = RecordWriter(calm)
    record(writer, 0, before + after)
    writer.close()

    writer = RecordWriter(killed)
    record(writer, 0, before)
    lengths = writer.flush()
    flushed = contents(killed)
    record(writer, before, before + after)
    writer.close()
    for path in (killed.steps, killed.events, killed.epochs):  # a line that the kill cut off
        path.write_bytes(path.read_bytes() + torn)

    truncate_records(killed, lengths)
    assert contents(killed) == flushed
    writer = RecordWriter(killed)
    record(writer, before, before + after)
    writer.close()
    assert contents(killed) == contents(calm)


def test_truncation_without_lengths_empties_all_and_makes_no_files(paths):
    truncate_records(paths, {})
    truncate_records(paths, dict.fromkeys(RECORD_FILES, 0))
    assert list(paths.root.iterdir()) == []
    paths.steps.write_text("old\n")
    truncate_records(paths, {})
    assert contents(paths) == {"steps.jsonl": b"", "events.jsonl": None, "epochs.csv": None, "histograms.jsonl": None}


@pytest.mark.parametrize(
    ("events", "lengths", "named"),
    [
        *((events, {"steps.jsonl": 2, "events.jsonl": 8}, r"events\.jsonl.*8") for events in (None, b"", b"one\n")),
        (None, {"steps.jsonl": 3}, "no line end at byte 3"),
        (None, {"../secret": 0}, "secret"),
    ],
)
def test_lengths_that_do_not_fit_are_damage_and_nothing_is_cut(paths, events, lengths, named):
    paths.steps.write_text("a\nb\n")
    if events is not None:
        paths.events.write_bytes(events)
    with pytest.raises(StorageError, match=named):
        truncate_records(paths, lengths)
    assert paths.steps.read_text() == "a\nb\n"


def test_a_full_disk_is_a_storage_error_with_needed_and_free_bytes(step_record, paths):
    writer = RecordWriter(paths)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._files[STEPS]._descriptor)
    os.close(full)
    writer.take(step_record(1))
    writer.take(EventRecord("start", 1, {}))
    with pytest.raises(StorageError, match=r"the disk is full \(\d+ B needed, .* free\)"):
        writer.flush()
    with pytest.raises(StorageError, match="the disk is full"):
        writer.close()
    assert paths.events.read_text() == '{"event": "start", "step": 1}\n'  # the other files are closed in order


def test_a_write_that_the_disk_cut_short_goes_on_where_it_stopped(step_record, paths, monkeypatch):
    really, calls = os.write, []

    def short(descriptor, data):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return really(descriptor, data[:7])

    writer = RecordWriter(paths)
    writer.take(step_record(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(StorageError):
            writer.flush()
    assert paths.steps.stat().st_size == 7
    writer.close()
    assert strict(paths.steps.read_text())["step"] == 1


def test_a_directory_that_cannot_be_written_is_noticed_before_training(paths):
    with pytest.raises(StorageError, match="cannot write"):
        RecordWriter(RunPaths(paths.root / "gone"))


def test_records_are_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.steps.symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match="cannot write"):
        RecordWriter(paths)
    with pytest.raises(StorageError):
        truncate_records(paths, {"steps.jsonl": 0})
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_digest_is_of_the_whole_file_also_after_short_writes(step_record, paths, monkeypatch):
    first = RecordWriter(paths)
    first.take(step_record(1))
    first.close()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:7]))
    second = RecordWriter(paths)
    second.take(step_record(2))
    second.flush()
    assert second.digests() == {
        name: hashlib.sha256(content).hexdigest() for name, content in contents(paths).items() if content is not None
    }
    second.close()


def test_bytes_that_changed_before_the_cut_are_told_and_stay(step_record, paths):
    writer = RecordWriter(paths)
    writer.take(step_record(1))
    lengths, digests = writer.flush(), writer.digests()
    writer.take(step_record(1))
    writer.close()
    assert truncate_records(paths, lengths, digests) == []
    damaged = paths.steps.read_bytes().replace(b'"step"', b'"stop"')
    paths.steps.write_bytes(damaged + b"more\n")
    (note,) = truncate_records(paths, lengths, digests)
    assert note.startswith(f"{paths.steps} is damaged: its first {len(damaged)} bytes")
    assert paths.steps.read_bytes() == damaged
    assert truncate_records(paths, lengths) == []  # of a checkpoint that knew no digests


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        *(("learner", "leaRner", "columns"), ("val_top1", "vam_top1", "columns"), ("seconds", "secondr", "columns")),
        ("val_top1", "val_tmp1", r"\['val_top1'\]"),  # a header of epochs, but not of this run's
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_a_row(epoch_record, paths, old, new, named):
    writer = RecordWriter(paths)
    writer.take(epoch_record(1, top1=0.5))
    writer.close()
    content = paths.epochs.read_text()
    assert old in content
    paths.epochs.write_text(content.replace(old, new, 1))
    with pytest.raises(StorageError, match=rf"epochs\.csv, line 1 is damaged: .*{named}"):
        RecordWriter(paths).take(epoch_record(2, top1=0.5))
