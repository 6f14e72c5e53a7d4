"""Every command that reads what another version of mptrain wrote refuses it in one line, and leaves it as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mptrain import __version__
from mptrain.cli.main import main

OLD, SWEEP, RECIPE = "outputs/old", "outputs/sweep", "outputs/recipes/two_cliffs-smoke"
TINY = ("model=mlp", "model.hidden=[2]", "dataset.image_size=8", "dataset.train_samples=32", "train.epochs=1")
JOBS = ("000-precision=fp32", "001-precision=fp16_dynamic")

#: Command lines, and the folders that the message names.
REFUSED = {
    "resume": (["resume", OLD], [OLD]),
    "resume the newest": (["resume", "last"], ["outputs/"]),
    "train under its name": ([*TINY, "run.name=old"], [OLD]),
    "go on where there is one": ([*TINY, "run.name=old", "run.resume=auto"], [OLD]),
    "begin with its weights": ([*TINY, f"model.weights={OLD}"], [OLD]),
    "report": (["report", OLD], [OLD]),
    "eval": (["eval", OLD], [OLD]),
    "export": (["export", OLD], [OLD]),
    "replay": (["replay", OLD], [OLD]),
    "diagnose": (["diagnose", OLD], [OLD]),
    "recommend": (["recommend", OLD], [OLD]),
    "recommend from a sweep": (["recommend", OLD, "--sweep", SWEEP], [SWEEP]),
    "check its scales": (["doctor", *TINY, f"model.weights={OLD}"], [OLD]),
    "compare a run": (["compare", OLD, f"{SWEEP}/{JOBS[0]}"], [OLD]),
    "compare the runs of a folder": (["compare", "runs"], ["runs/a"]),
    "compare a sweep": (["compare", SWEEP], [SWEEP]),
    "resume a sweep": (["resume", SWEEP], [SWEEP]),
    "go on with a sweep": (["-m", *TINY, "seed=0,1", "run.name=sweep", "run.resume=auto"], [SWEEP]),
    "search in its folder": (["-m", "hydra/sweeper=basic", *TINY, "seed=0,1", "run.name=sweep", "run.resume=auto"], [SWEEP]),
    "train from its configuration": (["--config-dir", OLD, "--config-name", "config", "run.name=again"], [OLD]),
    "reproduce": (["reproduce", "two_cliffs", "--smoke"], [RECIPE]),
    "report of a recipe": (["report", RECIPE], [RECIPE]),
    "report of a comparison alone": (["report", "outputs/compared"], ["outputs/compared"]),
}  # fmt: skip


def written_by_another_version(folder, name, schema):
    """Write a file of a run or sweep as another version leaves it, with the configuration beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"schema": schema, "versions": {"mptrain": "0.1.0"}, "jobs": []}))
    (folder / "config.yaml").write_text("seed: 0\n")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with runs, a sweep, a recipe and a comparison of another version."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MPTRAIN_TRACEBACK", raising=False)
    for run in (OLD, *(f"{SWEEP}/{name}" for name in JOBS), *(f"runs/{name}" for name in "abc")):
        written_by_another_version(Path(run), "run.json", 1)
    for folder in (SWEEP, RECIPE):
        written_by_another_version(Path(folder), "sweep.json", 1)
    Path(SWEEP, "multirun.yaml").write_text("hydra: {}\n")
    written_by_another_version(Path("outputs/compared"), "comparison.json", 1)
    return tmp_path


def content(folder):
    """Every file with its bytes and time of change, and every folder."""
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_refuses_what_another_version_wrote_and_leaves_it_as_it_is(world, case, capfd):
    words, folders = REFUSED[case]
    before = content(world)
    assert main(words) == 6
    printed = capfd.readouterr()
    lines = printed.err.splitlines()
    (error,) = [line for line in lines if line.startswith("error:")]
    assert all(folder in error for folder in folders)
    assert "was written by mptrain 0.1.0" in error
    assert f"in schema 1; mptrain {__version__} reads schema" in error
    assert lines[lines.index(error) + 1].startswith("hint: use the version of mptrain that wrote it")
    assert "Traceback" not in printed.err + printed.out
    assert content(world) == before


@pytest.mark.parametrize("run", [OLD, "old", "last"])
def test_completion_says_nothing_about_an_old_run(world, run, capfd):
    before = content(world)
    assert main(["completion", "query", "fish", "resume", run, "--", "train."]) == 0
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""
    assert content(world) == before


def test_a_run_of_a_newer_version_is_refused_likewise(world, capfd):
    written_by_another_version(Path(OLD), "run.json", 99)
    assert main(["eval", OLD]) == 6
    assert f"{OLD}/run.json was written by mptrain 0.1.0 in schema 99; mptrain" in capfd.readouterr().err


def test_a_newer_run_is_the_last_one_beside_old_ones(world, capfd):
    assert main([*TINY, "train.batch_size=16", "run.name=new"]) == 0
    capfd.readouterr()
    assert main(["export", "last"]) == 0
    assert "outputs/new/export/" in capfd.readouterr().out
