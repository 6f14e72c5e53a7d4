"""The folder of a recipe: ended runs, arithmetic and a verdict in strict JSON."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mptrain.config.compose import Composer
from mptrain.runlog.directory import hold_lock
from mptrain.runlog.strict_json import parse_strict, restore_nonfinite
from mptrain.runlog.sweeps import Sweep, SweepJob, SweepPaths, write_sweep
from mptrain.study.recipe.expectations import ExpectationResult
from mptrain.study.recipe.reproduction import RecipeVerdict, Reproduction, folder_of, measured, plan, write_verdict
from mptrain.study.sweep.runner import refresh_status
from mptrain.system.errors import StorageError
from tests.study.comparison.fake_runs import some_summary, write_run
from tests.study.recipe.some_recipe import some_recipe

RECIPE = some_recipe()


def sweep_of(folder, count):
    jobs = tuple(SweepJob(number, f"{number:03d}", (), (), "a" if number < 2 else "b") for number in range(count))
    return Sweep(folder, "recipe", (), (), "train", 1, jobs)


def test_a_run_that_failed_numerically_has_ended_and_others_have_not(tmp_path):
    write_run(tmp_path, "000", summary=some_summary())
    write_run(tmp_path, "001", end=("failed", "only overflows", 4, 3))
    write_run(tmp_path, "002", end=("failed", "disk full", 6, 3))
    write_run(tmp_path, "003", end=("preempted", "SIGTERM", 75, 3))
    write_run(tmp_path, "004", end=None)
    stands = refresh_status(sweep_of(tmp_path, 6))
    assert [stands.has_ended(job) for job in stands.jobs] == [True, True, False, False, False, False]
    assert (stands.jobs[1].status, stands.jobs[1].code, stands.jobs[1].reason) == ("failed", 4, "only overflows")


def test_runs_are_measured_arm_by_arm(tmp_path):
    for name in ("000", "001", "002"):
        write_run(tmp_path, name, summary=some_summary())
    found = measured(sweep_of(tmp_path, 3))
    assert {arm: len(runs) for arm, runs in found.items()} == {"a": 2, "b": 1}
    assert found["b"][0].metrics["top1"] == 0.9


def test_a_recipe_that_is_being_run_is_not_written_over(tmp_path):
    (tmp_path / "recipe.yaml").write_text("title: new\n")
    folder = tmp_path / "recipes" / "mine"
    folder.mkdir(parents=True)
    write_sweep(sweep_of(folder, 0))
    before = (folder / "sweep.json").read_bytes()
    recipe = replace(RECIPE, path=tmp_path / "recipe.yaml")
    with hold_lock(SweepPaths(folder).lock), pytest.raises(StorageError, match="is being written by"):
        plan(Reproduction(recipe, False, (), folder, (), Composer()), 2)
    assert (folder / "sweep.json").read_bytes() == before
    assert not (folder / "recipe.yaml").exists()


def test_smoke_runs_have_a_folder_of_their_own():
    assert folder_of(RECIPE, "outputs", smoke=False) == Path("outputs/recipes/mine")
    assert folder_of(RECIPE, "outputs", smoke=True) == Path("outputs/recipes/mine-smoke")


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        (("met", "met"), "REPRODUCED"),
        (("met", "undecided"), "NOT REPRODUCED"),
        (("not met", "met"), "NOT REPRODUCED"),
        ((), ""),
    ],
)
def test_one_expectation_that_is_not_met_is_enough(outcomes, word):
    verdict = RecipeVerdict(tuple(ExpectationResult("", outcome, "") for outcome in outcomes))
    assert verdict.word == word
    assert verdict.count("met") == outcomes.count("met")


def test_a_verdict_is_strict_json_and_keeps_numbers_that_are_not_finite(tmp_path):
    verdict = RecipeVerdict((ExpectationResult("a loss below 1", "not met", "a inf", {"n": 1, "off": math.inf}),))
    reproduction = Reproduction(RECIPE, False, ("train.epochs=3",), tmp_path, (), Composer())
    found = restore_nonfinite(parse_strict(write_verdict(reproduction, verdict).read_text()))
    assert (found["schema"], found["verdict"], found["words"]) == (2, "NOT REPRODUCED", ["train.epochs=3"])
    assert found["expectations"][0]["statistics"]["off"] == math.inf
