"""What a user meets: the default command, five at once, a pipe, a wheel in another place."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import TINY, run_command, run_in_process

ROOT = Path(__file__).resolve().parents[2]


def only_run(folder):
    (found,) = folder.glob("outputs/*/*/run.json")
    return found.parent


def test_the_default_command_learns_digits_and_leaves_a_whole_run_directory(tmp_path):
    done = run_command("train.epochs=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "run.json", "config.yaml", "overrides.yaml", "steps.jsonl", "events.jsonl", "epochs.csv", "summary.json", "checkpoints",
    }  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric"] > 0.95
    assert (summary["metric_name"], summary["metric_split"], summary["steps"]) == ("top1", "test", 114)
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    assert len((run / "epochs.csv").read_text().splitlines()) == 4


def test_output_in_a_pipe_has_no_control_characters(tmp_path):
    done = run_command(*TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.process
def test_five_runs_started_at_once_get_five_directories(tmp_path):
    with ThreadPoolExecutor(5) as pool:
        runs = list(pool.map(lambda _: run_command(*TINY, "train.max_steps=2", cwd=tmp_path), range(5)))
    assert [run.returncode for run in runs] == [0] * 5
    folders = list(tmp_path.glob("outputs/*/*/run.json"))
    assert len(folders) == 5
    assert {len((path.parent / "steps.jsonl").read_text().splitlines()) for path in folders} == {2}


def test_eval_gives_the_numbers_of_the_run(tmp_path):
    assert run_in_process(*TINY, "precision=fp16_dynamic", "run.name=run", cwd=tmp_path).returncode == 0
    summary = json.loads((tmp_path / "outputs" / "run" / "summary.json").read_text())
    done = run_in_process("eval", "outputs/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    test_line = next(line for line in done.stdout.splitlines() if line.startswith("split=test"))
    assert f"top1={summary['test']['top1']:.6g}" in test_line
    wide = run_in_process("eval", "outputs/run", "precision.eval=fp32", cwd=tmp_path)
    assert wide.returncode == 0, wide.stderr
    assert "split=test samples=397" in wide.stdout
    best = run_in_process("eval", "outputs/run", "--best", cwd=tmp_path)
    assert best.returncode == 0, best.stderr


def test_the_saved_configuration_trains_the_same_again(tmp_path):
    assert run_in_process(*TINY, "scaler.growth_interval=5", "run.name=one", cwd=tmp_path).returncode == 0
    run = tmp_path / "outputs" / "one"
    state = json.loads((run / "run.json").read_text())
    words = state["command"].replace("run.name=one", "run.name=two").split()[1:]
    assert run_in_process(*words, cwd=tmp_path).returncode == 0
    assert (run / "steps.jsonl").read_bytes() == (tmp_path / "outputs" / "two" / "steps.jsonl").read_bytes()


@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_wheel_carries_its_configs_and_runs_from_another_directory(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "wheel"), str(ROOT)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "mptrain/_data/configs/train.yaml" in names
        assert not any(name.startswith(("tests/", "outputs/")) for name in names)
        archive.extractall(installed)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run_command(*TINY, "train.max_steps=2", cwd=elsewhere, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert only_run(elsewhere)
