"""A watch or its records fail: the training goes on, and what was not looked at is said in the run and its report."""

from __future__ import annotations

import contextlib
import json
import warnings

import pytest
import torch

import mptrain
from mptrain.integrations.run_files import rank_files
from mptrain.runlog import read_run
from mptrain.system.records import EventRecord
from tests.integrations.alone_and_watched import both, loss_of, model_of, report_of, watching


@pytest.mark.parametrize("scaled", [False, True])
def test_a_watch_that_fails_records_no_more_and_the_training_goes_on(scaled, tmp_path, monkeypatch):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    with mptrain.watch(model, own, scaler, every=0, dir=tmp_path / "run") as watch:
        for step in range(6):
            if step == 3:
                monkeypatch.setattr(watch.learners[0].passes, "look", lambda: 1 / 0)
                expected = pytest.warns(UserWarning, match="has stopped, and training goes on: ZeroDivisionError")
            with expected if step == 3 else contextlib.nullcontext():
                own.zero_grad()
                scaler.scale(loss_of(model)).backward()
                scaler.step(own)
                scaler.update()
            watch.step(0.5)
    run = read_run(tmp_path / "run")
    assert [one.step for one in run.steps()] == [1, 2, 3]
    what = "steps after 3: ZeroDivisionError: division by zero"
    assert run.state.reason == f"not looked at: {what}"
    assert [one["what"] for one in run.events() if one["event"] == "not_looked_at"] == [what]
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert "not everything looked at" in " ".join(report_of(tmp_path / "run").split())


def test_records_that_fail_are_said_to_be_lost_where_the_loop_ends(tmp_path, monkeypatch):
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    watch = mptrain.watch(model, own, every=0, dir=tmp_path / "run")
    own.zero_grad()
    loss_of(model).backward()
    own.step()
    monkeypatch.setattr(watch.learners[0].updates._log, "digest", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="lost are the last records: ZeroDivisionError"):
        watch.close()
    assert read_run(tmp_path / "run").state.reason.startswith("not looked at: the last records: ZeroDivisionError")


def test_histograms_that_fail_are_no_silence(tmp_path, monkeypatch):
    monkeypatch.setattr("mptrain.engine.histograms.count_exponents", lambda *_: 1 / 0)
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)
    said = pytest.warns(UserWarning, match="leaves the histograms of an update out")
    with said, mptrain.watch(model, own, every=1, dir=tmp_path / "run"):
        for _ in range(3):
            own.zero_grad()
            loss_of(model).backward()
            own.step()
    reason = "not looked at: histograms of an update: ZeroDivisionError: division by zero"
    assert read_run(tmp_path / "run").state.reason == reason


def test_what_another_rank_has_not_looked_at_is_in_the_report(tmp_path):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for _ in range(3):
                own.zero_grad()
                loss_of(model).backward()
                own.step()

    both(loop, dir=tmp_path / "run")
    assert report_of(tmp_path / "run").endswith("3 updates in 3 steps, none skipped.")
    files = rank_files(tmp_path / "run", 1, sharded=False)
    files.take(EventRecord("not_looked_at", 2, {"learner": "main", "what": "steps after 2", "rank": 1}))
    files.close()
    assert [one["rank"] for one in read_run(tmp_path / "run").events() if one["event"] == "not_looked_at"] == [1]
    assert report_of(tmp_path / "run").endswith("none of these skipped, not everything looked at.")


def test_a_full_disk_keeps_steps_rather_than_histograms(tmp_path, monkeypatch):
    from mptrain.runlog import record_writer

    write, room = record_writer.write_all, [6000]

    def full(descriptor, pending):
        if len(pending) > room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= len(pending)
        write(descriptor, pending)

    monkeypatch.setattr(record_writer, "write_all", full)
    model = model_of()
    own = torch.optim.SGD(model.parameters(), 0.1)

    def loop():
        with mptrain.watch(model, own, every=1, dir=tmp_path / "run") as watch:
            for _ in range(40):
                own.zero_grad()
                loss_of(model).backward()
                own.step()
                watch.flush()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop()
    assert [str(one.message).partition(":")[0].rpartition(" ")[2] for one in said] == ["histograms", "records"]
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert len(lines) > 10
    assert [json.loads(one)["step"] for one in lines] == [*range(1, len(lines) + 1)]
    assert (tmp_path / "run" / "histograms.jsonl").read_bytes() == b""
