"""What a user meets: the default command, five at once, a pipe, a wheel in another place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.small_runs import TINY, command, environment, run_command, run_in_process

ROOT = Path(__file__).resolve().parents[2]


def only_run(folder):
    (found,) = folder.glob("outputs/*/*/run.json")
    return found.parent


def test_the_default_command_learns_digits_and_leaves_a_whole_run(tmp_path):
    done = run_command("train.epochs=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(letter.isprintable() or letter == "\n" for letter in done.stdout + done.stderr)  # in a pipe
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


@pytest.mark.process
def test_runs_started_at_once_get_directories_of_their_own(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: run_command(*TINY, "train.max_steps=2", cwd=tmp_path), range(3)))
    assert [run.returncode for run in runs] == [0] * 3
    folders = list(tmp_path.glob("outputs/*/*/run.json"))
    assert len(folders) == 3
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
        assert {"mptrain/_data/configs/train.yaml", "mptrain/cli/SKILL.md", "mptrain/cli/schemas/runs.json"} <= {*names}
        assert not any(name.startswith(("tests/", "outputs/")) for name in names)
        archive.extractall(installed)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run_command(*TINY, "train.max_steps=2", cwd=elsewhere, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert only_run(elsewhere)


CODE = """
import sys
from mptrain.cli.main import main
code = main({words!r})
print(code, *sorted({heavy!r} & sys.modules.keys()))
"""
HEAVY = {"torch._dynamo", "torch._inductor", "sympy", "scipy.stats", "matplotlib", "sklearn", "pandas", "triton"}


@pytest.mark.process
def test_a_run_needs_neither_the_compiler_nor_statistics_nor_figures(tmp_path):
    for precision in ("amp_dynamic", "fp16_dynamic"):
        words = [*TINY, "device=cpu", f"precision={precision}", "train.max_steps=2"]
        found = subprocess.run(
            [sys.executable, "-c", CODE.format(words=words, heavy=HEAVY)],
            capture_output=True, text=True, check=True, cwd=tmp_path, env=environment(),
        )  # fmt: skip
        assert found.stdout.splitlines()[-1] == "0"


@pytest.mark.process
def test_ctrl_c_at_any_moment_of_a_start_shows_no_traceback(tmp_path):
    for moment in range(6):
        run = subprocess.Popen(
            command(*TINY, "train.epochs=50"), cwd=tmp_path, env=environment(), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(0.2 + 0.25 * moment)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=120)
        assert run.returncode in (130, -signal.SIGINT), said
        assert "Traceback" not in said
        assert "error" not in said.replace("error: interrupted by SIGINT", "")


SWEPT = (
    "model=cnn", "precision=fp16_dynamic", "scaler.init_scale=16777216", "dataset.image_size=8",
    "dataset.train_samples=160", "train.batch_size=16", "train.epochs=2", "threads=1",
)  # fmt: skip


@pytest.mark.process
def test_a_forked_job_and_a_fresh_process_write_the_same_records(tmp_path):
    swept = run_command("-m", *SWEPT, "seed=3,4", "run.name=swept", "--jobs", "2", cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    alone = run_command(*SWEPT, "seed=4", "run.name=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    (job,) = (tmp_path / "outputs" / "swept").glob("001-*/steps.jsonl")
    expected = (tmp_path / "outputs" / "alone" / "steps.jsonl").read_bytes()
    assert expected.count(b"\n") == 20
    assert b'"overflow": true' in expected
    assert job.read_bytes() == expected
