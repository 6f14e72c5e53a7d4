"""A watch inside the loops of other frameworks sees what it sees in a plain loop."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from small_runs import environment

from mptrain.runlog import read_run

BEHIND = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("framework", "prefix", "moved"),
    [
        ("accelerate", "", []),  # its schedule waits for the update
        ("transformers", "inner.", [4, 9]),
        ("lightning", "inner.", [4, 9]),
        ("manual", "inner.", [4, 9]),
        ("fabric", "", [4, 9]),
    ],
)
def test_a_framework_s_skipped_steps_are_named(framework, prefix, moved, tmp_path):
    pytest.importorskip({"manual": "lightning", "fabric": "lightning"}.get(framework, framework))
    command = [sys.executable, "-m", "tests.integrations.framework_loops", framework]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["skipped"] == {step: [prefix + name for name in BEHIND] for step in ("4", "9")}
    assert found["moved"] == moved
    assert (found["last"]["step"], found["last"]["loss_scale"]) == (12, 256)


@pytest.mark.distributed
@pytest.mark.parametrize("memory", ["copies", "views"])
def test_the_rank_whose_gradients_overflow_is_named(memory, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.integrations.two_ranks", str(tmp_path / "run"), memory]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "run")
    names = [name.removeprefix("net.") for name in BEHIND]
    found = [one for one in run.events() if one["event"].endswith("overflow")]
    assert [(one["event"], one["step"], one.get("rank")) for one in found] == [
        ("overflow", 3, None),
        ("rank_overflow", 3, 1),
    ]
    assert all([name for name, _ in one["tensors"]] == names for one in found)
    assert [one.skipped for one in run.steps()] == [False, False, True, False, False]
