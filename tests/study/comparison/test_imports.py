"""Comparing needs no torch: it must work where only records are, and at once."""

from __future__ import annotations

import subprocess
import sys

from tests.small_runs import environment
from tests.study.comparison.fake_runs import some_summary, write_run, yaml_of

CODE = """
import pkgutil, sys, importlib
from pathlib import Path
import mptrain.study.comparison.results
assert {"scipy", "numpy", "torch", "omegaconf"}.isdisjoint(sys.modules), "reading a kept comparison"
from mptrain.study.comparison.statistics import mean_interval
mean_interval([1.0, 2.0])
assert {"scipy.stats", "scipy.integrate"}.isdisjoint(sys.modules), "intervals of a sweep"
for module in pkgutil.iter_modules(mptrain.study.comparison.__path__):
    importlib.import_module(f"mptrain.study.comparison.{module.name}")
from mptrain.study.comparison.arms import group_into_arms
from mptrain.study.comparison.compare_arms import compare
from mptrain.study.comparison.run_measures import measure
from mptrain.runlog import read_run
found = compare(group_into_arms([measure(read_run(Path(name))) for name in sys.argv[1:]]))
assert [one.arm.name for one in found.arms] == ["fp32", "amp_dynamic"], found
assert {"torch", "hydra"}.isdisjoint(sys.modules), "comparing"
"""


def test_comparing_imports_no_torch_and_reading_no_scipy(tmp_path):
    runs = [
        write_run(tmp_path, mode, config=yaml_of(0, mode), summary=some_summary()) for mode in ("fp32", "amp_dynamic")
    ]
    command = [sys.executable, "-W", "error", "-c", CODE, *(str(run.paths.root) for run in runs)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
