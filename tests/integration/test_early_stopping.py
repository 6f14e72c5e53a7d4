"""A run that stops early is a finished run: in its files and its report, for resume, sweeps and comparisons, on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.several_ranks import trained_alone, trained_by
from tests.small_runs import TINY, run_in_process

#: No metric of the digits improves by 10, so the second validation without improvement is the third.
STOPS = ("train.epochs=8", "train.early_stopping={patience:2,min_delta:10}")
WORDS = (*TINY, "precision=fp32", "run.name=r", *STOPS)


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def state():
    return json.loads(Path("outputs/r/run.json").read_text())


def test_a_run_that_stopped_says_so_everywhere_and_how_to_go_on(tmp_path):
    done = run_in_process(*WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eval=test step=18" in done.stdout
    assert "stopped     early: top1 did not improve by more than 10 for 2 validations; best 0." in done.stdout
    assert "mptrain resume outputs/r train.early_stopping=null\n" in done.stdout
    why = json.loads(Path("outputs/r/summary.json").read_text())["stopped_early"]
    assert state()["status"] == "done"
    assert state()["reason"] == f"stopped early: {why}"
    assert run_in_process("report", "r", cwd=tmp_path).returncode == 0
    for page in Path("outputs/r").rglob("report.*"):
        text = page.read_text()
        assert f"stopped early: {why}" in text
        assert "stopped_early" in text
        assert "of 48 planned" in text
    again = run_in_process("resume", "r", cwd=tmp_path)
    assert again.returncode == 0
    assert "outputs/r is already done" in again.stdout
    assert "stopped     early: top1" in again.stdout
    longer = run_in_process("resume", "r", "train.epochs=10", cwd=tmp_path)
    assert longer.returncode == 2
    assert f"outputs/r stopped early: {why}; there is nothing left to do" in " ".join(longer.stderr.split())
    assert "set train.early_stopping=null, or train.early_stopping.patience=4" in " ".join(longer.stderr.split())
    gone_on = run_in_process("resume", "r", "train.early_stopping=null", cwd=tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr
    assert "eval=test step=48" in gone_on.stdout
    assert "stopped" not in gone_on.stdout
    assert state()["reason"] == ""


@pytest.mark.process
def test_comparisons_and_sweeps_take_such_runs_as_finished(tmp_path):
    words = (*TINY, *STOPS, "threads=1")
    compared = run_in_process("compare", *words, "precision=fp32,amp_bf16", "seed=0,1", cwd=tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    swept = run_in_process("-m", *words, "precision=fp32", "seed=0", cwd=tmp_path)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    states = [json.loads(path.read_text()) for path in tmp_path.rglob("run.json")]
    assert [one["status"] for one in states] == ["done"] * 5
    assert all(one["reason"].startswith("stopped early: top1") for one in states)


@pytest.mark.distributed
def test_all_ranks_stop_and_reduce_together():
    words = [*TINY, "precision=fp32", *STOPS, "schedule=plateau", "schedule.patience=0", "schedule.threshold=10",
             "schedule.threshold_mode=abs"]  # fmt: skip
    alone = trained_alone(*words, "train.accumulate=2")
    (answers,) = trained_by(2, words)
    assert [len(answer["steps"]) for answer in answers] == [18, 18]
    rates = [[step["lr"] for step in answer["steps"]] for answer in (alone, *answers)]
    assert rates[0] == rates[1] == rates[2]
    assert len(set(rates[0])) == 2
