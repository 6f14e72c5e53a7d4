"""The folder of a recipe: ended runs, arithmetic and a verdict in strict JSON."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from comparison.fake_runs import some_summary, write_run

from mptrain.config.compose import Composer
from mptrain.config.targets import PACKAGES, Target
from mptrain.errors import ConfigError, StorageError
from mptrain.recipe.expectations import Finding
from mptrain.recipe.recipe import Recipe
from mptrain.recipe.reproduction import RecipeVerdict, Reproduction, compute, folder_of, measured, plan, write_verdict
from mptrain.runlog.lock import hold_lock
from mptrain.runlog.strict_json import parse_strict, restore_nonfinite
from mptrain.runlog.sweeps import Sweep, SweepJob, SweepPaths, write_sweep
from mptrain.sweep.runner import refresh_status

RECIPE = Recipe("mine", Path("mine/recipe.yaml"), "Mine", "It works.", "me")


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


def test_arithmetic_is_computed_by_name():
    target = Target("mptrain.numerics.demonstrations.sequential_sum", {"terms": 6000}, PACKAGES["arithmetic"])
    assert compute(replace(RECIPE, arithmetic={"sum": target}))["sum"]["value"] == 2048


def test_arithmetic_that_returns_no_numbers_is_refused():
    target = Target("mptrain.numerics.formats.scale_in_words", {"scale": 8.0}, ("mptrain.numerics",))
    with pytest.raises(ConfigError, match=r"arithmetic\.sum: .* does not return a mapping of names to numbers"):
        compute(replace(RECIPE, arithmetic={"sum": target}))


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
    verdict = RecipeVerdict(tuple(Finding("", outcome, "") for outcome in outcomes))
    assert verdict.word == word
    assert verdict.count("met") == outcomes.count("met")


def test_a_verdict_is_strict_json_and_keeps_numbers_that_are_not_finite(tmp_path):
    verdict = RecipeVerdict((Finding("a.sum = inf within 0", "met", "a.sum is inf", {"n": 1, "off": math.inf}),))
    reproduction = Reproduction(RECIPE, False, ("train.epochs=3",), tmp_path, (), Composer())
    path = write_verdict(reproduction, verdict, {"a": {"sum": math.inf, "lost": math.nan, "mean": 8.3}})
    found = restore_nonfinite(parse_strict(path.read_text()))
    assert (found["schema"], found["verdict"], found["words"]) == (2, "REPRODUCED", ["train.epochs=3"])
    assert found["expectations"][0]["statistics"]["off"] == math.inf
    assert found["arithmetic"]["a"]["sum"] == math.inf
    assert math.isnan(found["arithmetic"]["a"]["lost"])
