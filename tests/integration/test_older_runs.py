"""Every command that reads what mptrain 0.1 wrote refuses it in one line, and leaves it as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mptrain import __version__
from mptrain.cli.main import main

WRITTEN = Path(__file__).resolve().parents[1] / "written_by_0_1"
OLD, SWEEP, RECIPE = "outputs/old", "outputs/sweep", "outputs/recipes/two_cliffs-smoke"
TINY = ("model=mlp", "model.hidden=[2]", "dataset.image_size=8", "dataset.train_samples=32", "train.epochs=1")
JOBS = ("000-precision=fp32", "001-precision=fp16_dynamic")

#: Command lines, and the folders that the message names.
REFUSED = {
    "resume": (["resume", OLD], [OLD]),
    "resume by name": (["resume", "old", "train.epochs=2"], [OLD]),
    "resume the newest": (["resume", "last"], [OLD, *(f"{SWEEP}/{name}" for name in JOBS)]),
    "train under its name": ([*TINY, "run.name=old"], [OLD]),
    "go on where there is one": ([*TINY, "run.name=old", "run.resume=auto"], [OLD]),
    "go on in any case": ([*TINY, "run.name=old", "run.resume=must"], [OLD]),
    "begin with its weights": ([*TINY, f"model.weights={OLD}"], [OLD]),
    "report": (["report", OLD], [OLD]),
    "report the newest": (["report", "last"], [OLD, *(f"{SWEEP}/{name}" for name in JOBS)]),
    "eval": (["eval", OLD], [OLD]),
    "export": (["export", OLD], [OLD]),
    "replay": (["replay", OLD], [OLD]),
    "replay another rule": (["replay", OLD, "scaler=static"], [OLD]),
    "diagnose": (["diagnose", OLD], [OLD]),
    "recommend": (["recommend", OLD], [OLD]),
    "recommend from a sweep": (["recommend", OLD, "--sweep", SWEEP], [SWEEP]),
    "check its scales": (["doctor", *TINY, f"model.weights={OLD}"], [OLD]),
    "compare a run": (["compare", OLD, f"{SWEEP}/{JOBS[0]}"], [OLD, f"{SWEEP}/{JOBS[0]}"]),
    "compare the runs of a folder": (["compare", "runs"], [f"runs/{name}" for name in "abc"]),
    "compare a sweep": (["compare", SWEEP], [SWEEP]),
    "report of a sweep": (["report", SWEEP], [SWEEP]),
    "resume a sweep": (["resume", SWEEP], [SWEEP]),
    "sweep under its name": (["-m", *TINY, "seed=0,1", "run.name=sweep"], [SWEEP]),
    "go on with a sweep": (["-m", *TINY, "seed=0,1", "run.name=sweep", "run.resume=auto"], [SWEEP]),
    "search in its folder": (["-m", "hydra/sweeper=basic", *TINY, "seed=0,1", "run.name=sweep", "run.resume=auto"], [SWEEP]),
    "train from its configuration": (["--config-dir", OLD, "--config-name", "config", "run.name=again"], [OLD]),
    "compare under its name": (["compare", *TINY, "precision=fp32,bf16_pure", "run.name=sweep", "run.resume=auto"], [SWEEP]),
    "reproduce": (["reproduce", "two_cliffs", "--smoke"], [RECIPE]),
    "report of a recipe": (["report", RECIPE], [RECIPE]),
    "report of a comparison alone": (["report", "outputs/compared"], ["outputs/compared"]),
}  # fmt: skip


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with a run, a sweep, a recipe and a comparison as 0.1 left them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MPTRAIN_TRACEBACK", raising=False)
    runs = [OLD, *(f"{SWEEP}/{name}" for name in JOBS), *(f"runs/{name}" for name in "abc")]
    for run in runs:
        shutil.copytree(WRITTEN / "run", run)
    for folder in (SWEEP, RECIPE):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(WRITTEN / "sweep.json", folder)
    Path(SWEEP, "multirun.yaml").write_text("hydra: {}\n")
    Path("outputs/compared").mkdir()
    Path("outputs/compared/comparison.json").write_text('{"schema": 1, "groups": []}\n')
    return tmp_path


def content(folder):
    """Every file with its bytes and time of change, and every folder."""
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_refuses_what_0_1_wrote_and_leaves_it_as_it_is(world, case, capfd):
    words, folders = REFUSED[case]
    before = content(world)
    assert main(words) == 6
    printed = capfd.readouterr()
    lines = printed.err.splitlines()
    (error,) = [line for line in lines if line.startswith("error:")]
    assert all(folder in error for folder in folders)
    assert "written by mptrain 0.1" in error
    assert error.endswith(f", which mptrain {__version__} cannot read")
    assert lines[lines.index(error) + 1].startswith("hint: read ")
    assert "Traceback" not in printed.err + printed.out
    assert content(world) == before


def test_a_run_says_itself_which_version_wrote_it(world, capfd):
    assert main(["eval", OLD]) == 6
    assert capfd.readouterr().err.splitlines() == [
        f"error: {OLD} was written by mptrain 0.1.0, which mptrain {__version__} cannot read",
        "hint: read it with mptrain 0.1.0, or train again in another folder",
    ]


def test_many_runs_are_counted_rather_than_listed(world, capfd):
    for name in "defg":
        shutil.copytree("runs/a", f"runs/{name}")
    assert main(["compare", "runs"]) == 6
    error = capfd.readouterr().err.splitlines()[0]
    assert "runs/d and 3 more were written by mptrain 0.1.0, which" in error
    assert "runs/e" not in error


@pytest.mark.parametrize("run", [OLD, "old", "last"])
def test_completion_says_nothing_about_an_old_run(world, run, capfd):
    before = content(world)
    assert main(["completion", "query", "fish", "resume", run, "--", "train."]) == 0
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""
    assert content(world) == before


def test_a_newer_run_is_the_last_one_beside_old_ones(world, capfd):
    assert main([*TINY, "train.batch_size=16", "run.name=new"]) == 0
    capfd.readouterr()
    assert main(["export", "last"]) == 0
    assert "outputs/new/export/" in capfd.readouterr().out


def test_weights_that_0_1_exported_are_taken(world):
    assert main([*TINY, "train.batch_size=16", f"model.weights={WRITTEN / 'weights.pt'}"]) == 0
