"""The recipes that come with mptrain, as a user runs them: their smoke arms, and one that is false by construction."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from mptrain.config.catalogue import recipes_folder
from tests.small_runs import run_in_process

pytestmark = pytest.mark.process

NAMES = sorted(path.parent.name for path in recipes_folder().glob("*/recipe.yaml"))

#: Networks of the published sizes: gigabytes of weights and checkpoints.
LARGE = "ilsvrc12_top1"

#: One of every kind: metrics and intervals, texts, a course over steps.
OFTEN = ("dynamic_matches_fp32", "parity_translation")


def smoke(name, tmp_path):
    found = run_in_process("reproduce", name, "--smoke", "--jobs", "2", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in NAMES if name != LARGE]
)
def test_everything_that_a_recipe_needs_runs(tmp_path, name):
    said = smoke(name, tmp_path)
    counted = re.search(
        r"^smoke: (\d+) of (\d+) runs? done(?:, (\d+) failed because of (?:its|their) numerics)?", said, re.MULTILINE
    )
    assert counted is not None
    assert int(counted[1]) + int(counted[3] or 0) == int(counted[2])
    report = f"outputs/recipes/{name}-smoke/report.html"
    assert said.endswith(f"\nreport={report}\n")
    assert (tmp_path / report).is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_networks_of_the_published_table_run(tmp_path):
    words = ("reproduce", LARGE, "--smoke", "--jobs", "1", "run.root=out")
    found = run_in_process(*words, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "21 of 21 runs done" in found.stdout


FALSE = """
title: Two seeds are one
claim: A network is as good as chance.
source: nobody
base: [model=mlp, train.epochs=2, dataset.train_samples=400, checkpoint.every_epochs=null, threads=1]
arms:
  fp32: [precision=fp32]
  fp16: [precision=fp16_dynamic]
reference: fp32
seeds: [0, 1, 2]
margin: 0.05
expect:
  - {arm: fp16, measure: top1, below: fp32, by: 0.5}
  - {arm: fp16, measure: skip_rate, below: 0.5}
needs: {gpu: optional, minutes: 0.2, data: none}
smoke: [train.max_steps=2]
"""


def test_an_expectation_that_is_false_ends_with_5_and_says_by_how_much(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text(FALSE)
    found = run_in_process("reproduce", "mine", "--jobs", "2", cwd=tmp_path)
    assert found.returncode == 5, found.stdout + found.stderr
    assert re.search(r"not met +fp16 top1 below fp32 by 0\.5", found.stdout)
    assert re.search(r"off by 0\.[45]", found.stdout)
    assert "NOT REPRODUCED: 1 of 2 expectations met, 1 not met" in found.stdout
    kept = json.loads((tmp_path / "outputs/recipes/mine/verdict.json").read_text())
    assert [one["outcome"] for one in kept["expectations"]] == ["not met", "met"]
    assert "NOT REPRODUCED" in (tmp_path / "outputs/recipes/mine/report.html").read_text()


FINE_TUNED = """
title: Fine-tuning from one network
claim: Rounded weights learn as much at their best rate.
source: nobody
base: [model=mlp, dataset.image_size=8, dataset.train_samples=400, train.max_steps=30, threads=1]
start: [optimizer.lr=0.1, train.max_steps=40]
groups:
  low: [optimizer.lr=1e-4]
  high: [optimizer.lr=1e-2]
arms:
  fp32: [precision=fp32]
  bf16: [precision=bf16_pure]
reference: fp32
seeds: [5, 6]
margin: 0.05
expect:
  - {arm: best/bf16, measure: top1, equals: best/fp32, within: 0.2}
smoke: [train.max_steps=2]
"""


def test_arms_start_from_a_run_that_is_trained_once_and_before_them(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text(FINE_TUNED)
    found = run_in_process("reproduce", "mine", "--jobs", "2", cwd=tmp_path)
    assert found.returncode in (0, 5), found.stdout + found.stderr  # two seeds may decide nothing
    folder = tmp_path / "outputs" / "recipes"
    first = folder / "mine-start" / "000-start"
    assert json.loads((first / "run.json").read_text())["status"] == "done"
    runs = sorted(path.parent for path in (folder / "mine").glob("*/run.json"))
    assert len(runs) == 8
    kept = next(iter(runs)) / "events.jsonl"
    assert "outputs/recipes/mine-start/000-start (step 40)" in kept.read_text()
    starts = {
        record["initial_weights"]
        for run in runs
        for record in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if "initial_weights" in record
    }
    assert len(starts) == 1  # whatever the seed
    assert "8 runs and one whose weights they start from" in found.stdout
    assert "best/bf16 top1 equals best/fp32" in found.stdout
    report = (folder / "mine" / "report.html").read_text()
    assert "each arm is in the group whose mean metric in the last validation is best" in report
    moment = (first / "summary.json").stat().st_mtime_ns
    for run in runs[:2]:
        shutil.rmtree(run)
    again = run_in_process("reproduce", "mine", cwd=tmp_path)
    assert again.returncode == found.returncode
    assert (first / "summary.json").stat().st_mtime_ns == moment
    assert "first the run whose weights" not in again.stdout
    for run in runs:
        assert (run / "run.json").exists()
    shutil.rmtree(folder / "mine-start")  # to save space: nothing is trained that is not needed
    assert run_in_process("reproduce", "mine", cwd=tmp_path).returncode == found.returncode
    assert not (folder / "mine-start").exists()
    shutil.rmtree(runs[0])
    again = run_in_process("reproduce", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert "has runs that started from weights which are not there any more" in again.stderr
    (tmp_path / "mine" / "recipe.yaml").write_text(FINE_TUNED.replace("train.max_steps=40", "train.max_steps=50"))
    other = run_in_process("reproduce", "mine", cwd=tmp_path)
    assert other.returncode == 2
    assert "has runs that started from the weights of another run" in other.stderr
    assert "remove or rename outputs/recipes/mine and outputs/recipes/mine-start" in other.stderr


def test_arms_are_not_trained_without_the_run_that_they_start_from(tmp_path):
    (tmp_path / "mine").mkdir()
    text = FINE_TUNED.replace("start: [", "start: [model.weights=nowhere.pt, ")
    (tmp_path / "mine" / "recipe.yaml").write_text(text)
    found = run_in_process("reproduce", "mine", cwd=tmp_path)
    assert (found.returncode, "nowhere.pt" in found.stderr) == (6, True), found.stdout + found.stderr
    assert not (tmp_path / "outputs").exists()
    text = FINE_TUNED.replace("start: [optimizer.lr=0.1", "start: [optimizer.lr=1e30, precision=fp32")
    (tmp_path / "mine" / "recipe.yaml").write_text(text)
    found = run_in_process("reproduce", "mine", cwd=tmp_path)
    assert found.returncode != 0
    assert "no verdict: 1 of 1 runs did not finish" in found.stdout
    assert not (tmp_path / "outputs" / "recipes" / "mine").exists()
