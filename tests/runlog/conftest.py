"""What the tests of the run directory share: child processes, and records of every kind."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mptrain
from mptrain.runlog import RunPaths
from mptrain.system.records import (
    EpochRecord,
    EvalRecord,
    EventRecord,
    OverflowRecord,
    ProgressRecord,
    ScaleRecord,
    StepRecord,
)

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mptrain.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def python():
    """Start a child process that runs a piece of Python; it is killed at the end of the test."""
    children = []

    def start(code, *arguments):
        command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        children.append(subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes))
        return children[-1]

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def succeed(python):
    """Run a piece of Python in a child process to its end, which must be in order; returns what it printed."""

    def run(code, *arguments):
        child = python(code, *arguments)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        return out

    return run


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def make_step(step, loss=0.5, grad_norm=1.25):
    return StepRecord("main", step, step, 0, loss, 1024.0, not math.isfinite(grad_norm), False, grad_norm, 0.1)


def make_epoch(epoch, **val):
    return EpochRecord("main", epoch, 10 * epoch, 9 * epoch, 1, 0.1 + epoch, 2.0, 1e-3, val, 1.5, 640.0)


@pytest.fixture(scope="session")
def step_record():
    return make_step


@pytest.fixture(scope="session")
def epoch_record():
    return make_epoch


@pytest.fixture
def some_records():
    """At least one record of each kind, with every kind of non-finite number."""
    return [
        EventRecord("start", 0, {"device": "cpu"}),
        make_step(1),
        make_step(2, loss=math.nan, grad_norm=math.inf),
        OverflowRecord("main", 2, 1024.0, "calibrating", "nan", (("fc.weight", "inf"), ("fc.bias", "nan")), 2, True, 1),
        ScaleRecord("main", 2, 1024.0, 512.0, "overflow"),
        ProgressRecord(2, 10, 0, 1, 100.0, "samples", 0.1, 1 << 20, 3.0, "training"),
        make_step(3, loss=-math.inf),
        EvalRecord("val", 3, 1, 50, {"loss": math.inf, "top1": 0.5}),
        make_epoch(1, loss=math.inf, top1=0.5),
    ]
