"""Points that go through submitit leave what they leave without it, also those that were killed or queued again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import fake_slurm
from tests.small_runs import command, environment, run_command

pytestmark = pytest.mark.process

pytest.importorskip("submitit")
WORDS = ("model=mlp", "train.epochs=100", "log.ring=10", "checkpoint.every_epochs=5", "seed=0,1")


def wait_for(folder, condition, timeout=120):
    deadline = time.monotonic() + timeout
    while True:
        found = folder.glob("*/run.json")
        states = {path.parent.name: json.loads(path.read_text()) for path in found}
        if condition(states):
            return states
        assert time.monotonic() < deadline, states
        time.sleep(0.05)


@pytest.mark.slow
def test_what_was_killed_or_queued_again_has_the_records_of_what_was_not(tmp_path, monkeypatch):
    home = fake_slurm.install(tmp_path / "bin", sys.executable)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    assert run_command("-m", *WORDS, "run.name=pool", cwd=tmp_path).returncode == 0
    sweep = subprocess.Popen(
        command("-m", "--launcher", "slurm", *WORDS, "run.name=mine"),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    folder = tmp_path / "outputs" / "mine"
    for name, number in (("000-seed=0", signal.SIGKILL), ("001-seed=1", signal.SIGUSR1)):
        saved = folder / name / "checkpoints"
        states = wait_for(folder, lambda _, saved=saved: any(saved.glob("*.pt")))
        os.kill(states[name]["attempts"][-1]["pid"], number)
    printed, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 7
    assert "to run the rest: mptrain resume outputs/mine --launcher slurm" in printed
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "done"]
    assert jobs[0]["reason"].endswith("without a result")

    done = run_command("resume", "outputs/mine", "--launcher", "slurm", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    states = wait_for(folder, bool)
    assert [len(state["attempts"]) for _, state in sorted(states.items())] == [2, 2]
    for name in states:
        assert (folder / name / "steps.jsonl").read_bytes() == (
            tmp_path / "outputs/pool" / name / "steps.jsonl"
        ).read_bytes()
