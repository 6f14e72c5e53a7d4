"""``mptrain reproduce``: plain commands, runs that go on where they stopped, and a verdict with an exit code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mptrain.runlog.sweeps import read_sweep, write_sweep
from mptrain.study.sweep.points import validate
from mptrain.study.sweep.runner import refresh_status
from mptrain.system.records import EvalRecord, EventRecord
from tests.small_runs import run_command, run_in_process
from tests.study.comparison.fake_runs import some_summary, write_run

RECIPE = """
title: Mine
claim: It works.
source: a paper, section 1
base: [model=mlp, dataset.image_size=8, train.epochs=1]
arms:
  fp32: [precision=fp32]
  amp: [precision=amp_dynamic]
reference: fp32
seeds: [0, 1, 2]
margin: 0.05
expect:
  - {arm: amp, measure: top1, equals: fp32, within: 0.05}
  - {arm: amp, measure: skip_rate, below: 0.5}
smoke: [train.max_steps=2]
"""


class Jobs:
    """Stands in for `run_sweep`: writes run directories as they would be, by what ``ends`` says of arm and seed."""

    def __init__(self):
        self.ends = {}
        self.ran = []
        self.code = None

    def __call__(self, sweep, composer, program, watch):
        stock = refresh_status(sweep)
        for job in stock.jobs:
            if job.status == "done":
                continue
            seed = int(job.varied[-1].removeprefix("seed="))
            end = self.ends.get((job.arm, seed), 0.95 + seed / 1000)
            if end == "waiting":
                continue
            self.ran.append((job.arm, seed))
            stock = stock.with_job(self._run(sweep, job, composer, seed, end))
        write_sweep(stock)
        done = all(job.status == "done" for job in stock.jobs)
        return stock, self.code if self.code is not None else 0 if done else 7

    def _run(self, sweep, job, composer, seed, end):
        shutil.rmtree(sweep.folder / job.name, ignore_errors=True)
        config = composer.compose(job.overrides).yaml
        if end in ("numerics", "disk"):
            code = 4 if end == "numerics" else 6
            write_run(sweep.folder, job.name, config=config, records=(), end=("failed", end, code, 3))
            return replace(job, status="failed", code=code, reason=end)
        metrics = {"loss": 1 - end, "top1": end}
        records = (
            EventRecord("start", 0, {"initial_weights": f"weights {seed}"}),
            EventRecord("data_order", 0, {"epoch": 0, "order": f"{seed}", "first_batch": f"{seed}", "samples": 10}),
            EvalRecord("val", 30, 1, 200, metrics),
            EvalRecord("test", 30, 1, 397, metrics),
        )
        summary = some_summary(val=metrics, test=metrics, metric=end)
        write_run(sweep.folder, job.name, config=config, records=records, summary=summary)
        return replace(job, status="done", code=0, seconds=1.0)


@pytest.fixture
def jobs(monkeypatch):
    found = Jobs()
    monkeypatch.setattr("mptrain.study.sweep.runner.run_sweep", found)
    monkeypatch.setattr("mptrain.study.sweep.processes.warm_up", lambda program: None)
    monkeypatch.setattr(
        "mptrain.study.recipe.reproduction.check", lambda points, composer, program: validate(points, composer)
    )
    monkeypatch.setattr(
        "mptrain.report.html_and_markdown.write_report", lambda folder: SimpleNamespace(html=folder / "report.html")
    )
    return found


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe into ``mine``; pairs of texts are replaced in it."""

    def write(*changes):
        text = RECIPE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "recipe.yaml").write_text(text)

    write()
    return write


def verdict(tmp_path, name="mine"):
    return json.loads((tmp_path / "outputs" / "recipes" / name / "verdict.json").read_text())


def test_a_dry_run_prints_the_plain_commands_and_runs_nothing(terminal, jobs, recipe, tmp_path):
    (tmp_path / "conf").mkdir()
    words = ("train.batch_size=64", "dataset.workers=0", "--config-dir", "conf")
    assert terminal("reproduce", "mine", "--dry-run", *words) == 0
    assert not jobs.ran
    assert not (tmp_path / "outputs").exists()
    commands = [line for line in terminal.out.splitlines() if line.startswith("mptrain ")]
    assert len(commands) == 6
    words = "model=mlp dataset.image_size=8 train.epochs=1 precision=amp_dynamic seed=2 train.batch_size=64"
    assert commands[-1] == f"mptrain --config-dir=conf {words} dataset.workers=0"
    for text in ("mine: Mine", "It works.", "a paper, section 1", "6 runs; about 1 minute", "amp top1 equals fp32"):
        assert text in terminal.out


def test_the_commands_of_a_dry_run_are_quoted_for_a_shell_and_run(terminal, jobs, recipe):
    recipe(("train.epochs=1]", 'train.epochs=1, "model.hidden=[16, 8]"]'))
    terminal("reproduce", "mine", "--dry-run")
    [command] = [line for line in terminal.out.splitlines() if "precision=fp32 seed=1" in line]
    assert terminal(*shlex.split(command)[1:]) == 0
    [config] = terminal.trained
    assert (config.seed, config.model.arguments["hidden"]) == (1, (16, 8))


def test_a_dry_run_checks_the_keys_of_a_recipe_and_names_the_arm(terminal, jobs, recipe):
    assert terminal("reproduce", "mine", "--dry-run", "train.epochs=many") == 2
    assert "train.epochs=many" in terminal.err
    assert not terminal.out
    assert not jobs.ran
    recipe(("amp: [precision=amp_dynamic]", "amp: [precision=amp_dynamic, scaler.init_scal=8]"))
    assert terminal("reproduce", "mine", "--dry-run") == 2
    assert "(precision=amp_dynamic scaler.init_scal=8 seed=2): unknown key 'scaler.init_scal'" in terminal.err


def test_a_dry_run_imports_no_torch(recipe, tmp_path):
    found = run_command("reproduce", "mine", "--dry-run", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert found.returncode == 0
    assert "mptrain.study.recipe.catalogue" in found.stderr
    assert not re.search(r"\| +(torch|scipy|matplotlib)$", found.stderr, re.MULTILINE)


def test_a_claim_that_holds_is_reproduced(terminal, jobs, recipe, tmp_path):
    assert terminal("reproduce", "mine") == 0
    assert "REPRODUCED: 2 of 2 expectations met" in terminal.out
    assert re.search(r"^amp .*equivalent", terminal.out, re.MULTILINE)
    found = verdict(tmp_path)
    facts = {"recipe": "mine", "title": "Mine", "claim": "It works.", "source": "a paper, section 1"}
    assert found.items() >= {**facts, "verdict": "REPRODUCED"}.items()
    said = [(one["text"], one["outcome"]) for one in found["expectations"]]
    assert said == [("amp top1 equals fp32 within 0.05", "met"), ("amp skip_rate below 0.5", "met")]
    assert all(letter.isprintable() or letter == "\n" for letter in terminal.out)
    folder = tmp_path / "outputs" / "recipes" / "mine"
    assert (folder / "recipe.yaml").read_text() == RECIPE
    assert f"report={(folder / 'report.html').relative_to(tmp_path)}" in terminal.out


def test_an_expectation_false_by_construction_ends_with_5_and_says_by_how_much(terminal, jobs, recipe, tmp_path):
    recipe(("equals: fp32, within: 0.05", "below: fp32, by: 0.5"))
    jobs.ends = {("amp", seed): 0.9 + seed / 100 for seed in range(3)}
    assert terminal("reproduce", "mine") == 5
    assert "NOT REPRODUCED: 1 of 2 expectations met, 1 not met" in terminal.out
    [one, _] = verdict(tmp_path)["expectations"]
    assert one["outcome"] == "not met"
    assert one["statistics"]["off"] == pytest.approx(0.5 - (0.951 - 0.91))
    assert "off by 0.459" in one["numbers"]
    assert "off by 0.459" in " ".join(terminal.out.split())


@pytest.mark.long
def test_what_has_ended_is_judged_again_but_not_run_again(terminal, jobs, recipe):
    jobs.ends = {("amp", seed): "numerics" for seed in range(3)}
    recipe(("measure: top1, equals: fp32, within: 0.05", "measure: failed, equals: 1"))
    assert terminal("reproduce", "mine") == 0
    assert len(jobs.ran) == 6
    jobs.ran.clear()
    assert terminal("reproduce", "mine") == 0
    assert "6 of them already finished" in terminal.out
    recipe(("measure: top1, equals: fp32, within: 0.05", "measure: failed, below: 1"))
    assert terminal("reproduce", "mine") == 5
    assert not jobs.ran


def test_a_run_that_failed_for_another_reason_leaves_no_verdict_and_is_run_again(terminal, jobs, recipe, tmp_path):
    jobs.ends = {("amp", 1): "disk"}
    assert terminal("reproduce", "mine", "train.batch_size=64") == 7
    assert "no verdict: 1 of 6 runs did not finish" in terminal.out
    assert "REPRODUCED" not in terminal.out
    assert not (tmp_path / "outputs" / "recipes" / "mine" / "verdict.json").exists()
    [command] = re.findall(r"^to run the rest: mptrain (.*)$", terminal.out, re.MULTILINE)
    jobs.ends, jobs.ran = {}, []
    assert terminal(*shlex.split(command)) == 0
    assert jobs.ran == [("amp", 1)]


def test_a_changed_arm_says_so_and_how_to_start_anew(terminal, jobs, recipe):
    terminal("reproduce", "mine")
    recipe(("[precision=amp_dynamic]", "[precision=amp_static]"))
    assert terminal("reproduce", "mine") == 2
    assert "amp has other overrides or seeds" in terminal.err
    assert "or add run.root=DIR" in terminal.err
    assert terminal("reproduce", "mine", "run.root=elsewhere") == 0


def test_a_signal_ends_it_and_runs_of_other_defaults_are_not_mixed_in(terminal, jobs, recipe, tmp_path):
    jobs.ends, jobs.code = {("amp", 2): "waiting"}, 130
    assert terminal("reproduce", "mine") == 130
    config = next((tmp_path / "outputs" / "recipes" / "mine").glob("001-*")) / "config.yaml"
    config.write_text(config.read_text().replace("batch_size: 32", "batch_size: 16"))
    assert terminal("reproduce", "mine") == 2
    assert "arm fp32 with other defaults: train.batch_size was 16, now 32" in terminal.err


def test_a_smoke_run_is_short_and_not_judged(terminal, jobs, recipe, tmp_path):
    jobs.ends = {("amp", 0): "numerics"}
    assert terminal("reproduce", "mine", "--smoke") == 0
    said = "smoke: 1 of 2 runs done, 1 failed because of its numerics (amp); expectations are not checked on shortened runs"
    report = "report=outputs/recipes/mine-smoke/report.html"
    assert terminal.out.endswith(f"{said}\n{report}\n")
    sweep = read_sweep(tmp_path / "outputs" / "recipes" / "mine-smoke")
    assert all("train.max_steps=2" in job.overrides for job in sweep.jobs)
    assert (sweep.kind, sweep.plan["recipe"], sweep.plan["smoke"]) == ("recipe", "mine", True)


def test_a_smoke_run_finds_expectations_about_nothing(terminal, jobs, recipe):
    recipe(("measure: top1", "measure: top7"))
    assert terminal("reproduce", "mine", "--smoke") == 2
    assert "no run has a measure 'top7'" in terminal.err


def test_jobs_and_place_are_the_users(terminal, jobs, recipe, tmp_path):
    assert terminal("reproduce", "--jobs", "2", "mine", "run.root=there") == 0
    assert read_sweep(tmp_path / "there" / "recipes" / "mine").parallel == 2


def test_a_recipe_that_needs_a_gpu_is_refused_where_there_is_none(terminal, jobs, recipe, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe(("smoke:", "needs: {gpu: required}\nsmoke:"))
    assert terminal("reproduce", "mine") == 3
    assert "the same command with --smoke" in terminal.err
    assert terminal("reproduce", "mine", "--smoke") == 0


def test_a_recipe_without_expectations_has_numbers_and_no_verdict(terminal, jobs, recipe, tmp_path):
    recipe((RECIPE[RECIPE.index("expect:") : RECIPE.index("smoke:")], ""))
    assert terminal("reproduce", "mine") == 0
    assert "this recipe has no expectations" in terminal.out
    assert verdict(tmp_path)["verdict"] is None


def test_groups_are_compared_each_by_itself(terminal, jobs, recipe, tmp_path):
    recipe(("arms:\n", "groups: {sgd: [optimizer=sgd], adam: [optimizer=adam]}\narms:\n"))
    assert terminal("reproduce", "mine") == 0
    assert [one["text"] for one in verdict(tmp_path)["expectations"]][:2] == [
        "sgd/amp top1 equals sgd/fp32 within 0.05",
        "adam/amp top1 equals adam/fp32 within 0.05",
    ]
    assert len(re.findall(r"^(?:sgd|adam)$", terminal.out, re.MULTILINE)) == 2


def test_recipes_are_listed_with_claim_and_cost(terminal):
    assert terminal("list", "recipes") == 0
    assert re.search(r"^two_cliffs: Loss scales between two cliffs$", terminal.out, re.MULTILINE)
    assert re.search(r"^  claim   Below one loss scale", terminal.out, re.MULTILINE)
    assert re.search(r"^  cost    \d+ runs; about \d+ minutes on 2 CPU cores$", terminal.out, re.MULTILINE)
    assert "the GPU that it needs" in terminal.out


def test_names_of_recipes_complete_with_their_titles(terminal):
    assert terminal("completion", "query", "zsh", "reproduce", "two_") == 0
    assert terminal.out == "two_cliffs\tLoss scales between two cliffs\n"
    terminal("completion", "query", "zsh", "reproduce", "two_cliffs", "train.epo")
    assert terminal.out.startswith("train.epochs=")


@pytest.mark.slow
def test_a_recipe_runs_from_start_to_verdict_and_goes_on(recipe, tmp_path):
    recipe(("seeds: [0, 1, 2]", "seeds: [0, 1]"), ("within: 0.05", "within: 0.0000001"), ("epochs=1", "epochs=3"))
    found = run_in_process("reproduce", "mine", "--jobs", "2", cwd=tmp_path)
    assert found.returncode == 5, found.stderr
    assert "NOT REPRODUCED" in found.stdout
    again = run_in_process("reproduce", "mine", cwd=tmp_path)
    assert again.returncode == 5
    assert "4 of them already finished" in again.stdout
    assert "job=" not in again.stdout
    assert verdict(tmp_path)["verdict"] == "NOT REPRODUCED"
    assert "NOT REPRODUCED" in (tmp_path / "outputs" / "recipes" / "mine" / "report.html").read_text()
