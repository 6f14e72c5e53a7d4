"""The suite for a GPU goes through on a CPU, so that a rare GPU is not spent on its mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.goals import GOALS
from benchmarks.results import read


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_goal_of_the_gpu_suite_is_reached_in_a_rehearsal(tmp_path):
    words = ["--suite", "gpu", "--rehearse", "--no-peers", "--budget", "60", "--out", str(tmp_path / "gpu.json")]
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "benchmarks.run", *words], cwd=root, env={**os.environ}, check=True)
    results = read(tmp_path / "gpu.json")
    assert results.failures == {}
    assert {row.goal for row in results.measurements} == {name for name in GOALS if name.startswith("G")}
    what = {row.what for row in results.measurements}
    assert "share of the device's time: convolutions and products" in what
