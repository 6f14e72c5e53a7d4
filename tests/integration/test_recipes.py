"""The recipes that come with mptrain, as a user runs them: their smoke arms, and one that is false by construction."""

from __future__ import annotations

import json
import re

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
