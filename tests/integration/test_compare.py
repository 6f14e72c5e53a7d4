"""``mptrain compare`` as a user runs it."""

from __future__ import annotations

import json
import re

import pytest

from mptrain.runlog.sweeps import SweepPaths
from mptrain.study.comparison.results import read_comparisons
from tests.small_runs import TINY, run_in_process

pytestmark = pytest.mark.process

SHORT = (*TINY, "train.epochs=2", "threads=1")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    words = ("precision=fp32,fp16_dynamic", "seed=0,1,2", "run.name=c")
    finished = run_in_process("compare", *SHORT, *words, "--jobs", "2", "--margin", "0.2", cwd=folder)
    return folder, finished


def test_arms_are_trained_and_judged_from_one_command(compared):
    folder, finished = compared
    assert finished.returncode == 0, finished.stderr
    assert "6/6 points valid: 2 arms (fp32, fp16_dynamic) x 3 seeds" in finished.stdout
    comparison = read_comparisons(SweepPaths(folder / "outputs/c").comparison)[""]
    assert [result.arm.name for result in comparison.arms] == ["fp32", "fp16_dynamic"]
    assert [run.seed for run in comparison.arms[1].arm.runs] == [0, 1, 2]
    assert comparison.arms[1].difference.n == 3
    assert comparison.arms[1].verdict.word in finished.stdout
    assert not [objection for objection in comparison.objections if objection.fatal]
    checks = " ".join(comparison.checks)
    for what in ("initial weights", "orders of the training samples", "first batches"):
        assert what in checks
    assert (folder / "outputs/c/report.html").stat().st_size > 10_000
    assert "fp16_dynamic" in (folder / "outputs/c/report.md").read_text()


def test_a_comparison_goes_on_where_it_was_broken_off_and_is_judged_again(compared):
    folder, _ = compared
    run = next((folder / "outputs/c").glob("004-*/run.json"))
    state = json.loads(run.read_text())
    before = (folder / "outputs/c/000-precision=fp32,seed=0/run.json").read_text()
    run.write_text(json.dumps({**state, "status": "preempted"}))
    finished = run_in_process("resume", "outputs/c", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    assert "1/1 missing points valid, 5 done before" in finished.stdout
    assert re.search(
        r"^- fp16_dynamic (is (equivalent|undecided|worse|better)|.*neither has learned)", finished.stdout, re.MULTILINE
    )
    assert (folder / "outputs/c/000-precision=fp32,seed=0/run.json").read_text() == before


def test_runs_that_exist_are_compared_by_their_directories(compared):
    folder, _ = compared
    runs = sorted(str(path.parent.relative_to(folder)) for path in (folder / "outputs/c").glob("*/run.json"))
    finished = run_in_process("compare", *runs, "--metric", "loss", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    (place,) = (folder / "outputs/comparisons").glob("*/*")
    comparison = read_comparisons(SweepPaths(place).comparison)[""]
    assert (comparison.metric, comparison.higher_is_better) == ("loss", False)
    assert {(place / run.path).resolve() for result in comparison.arms for run in result.arm.runs} == {
        (folder / run).resolve() for run in runs
    }
    assert (place / "report.html").exists()


def test_runs_that_differ_in_more_than_they_claim_are_refused_by_their_keys(compared, tmp_path):
    folder, _ = compared
    for name, seed in (("b", 0), ("b1", 1)):
        changed = ("precision=fp16_dynamic", "train.batch_size=32", f"seed={seed}", f"run.name={name}")
        other = run_in_process(*SHORT, *changed, cwd=tmp_path)
        assert other.returncode == 0, other.stderr
    first, second = (str(next(folder.glob(f"outputs/c/*-precision=fp32,seed={seed}"))) for seed in (0, 1))
    words = ("compare", first, second, "b", "b1")
    refused = run_in_process(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "train.batch_size is 16 in fp32, 32 in fp16_dynamic" in refused.stderr
    assert "first batches" in refused.stderr
    assert not (tmp_path / "outputs/comparisons").exists()
    mistyped = run_in_process(*words, "--by", "train.batchsize", cwd=tmp_path)
    assert mistyped.returncode == 2
    assert "did you mean train.batch_size?" in mistyped.stderr
    claimed = run_in_process(*words, "--by", "train.batch_size", cwd=tmp_path)
    assert claimed.returncode == 0, claimed.stderr
    assert "undecided" in claimed.stdout
    insisted = run_in_process(*words, "--anyway", cwd=tmp_path)
    assert insisted.returncode == 0
    assert "Not comparable: " in insisted.stdout
