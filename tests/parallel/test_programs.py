"""A Python program on two ranks of torchrun: what it gives is trained by both, and its function stops both."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mptrain
from tests.small_runs import environment

pytestmark = pytest.mark.distributed

PROGRAM = """
import os, sys
import torch
import mptrain
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes))
    def forward(self, x):
        return self.layers(x)

x = torch.randn(96, 3, 4, 4, generator=torch.Generator().manual_seed(0))
y = (x.mean((1, 2, 3)) > 0).long()
rank = int(os.environ.get("RANK", 0))

def stop(metrics):
    assert rank == 0, "rank 0 decides"
    return metrics["epoch"] == 2 and "seen enough"

words = ("precision=fp16_dynamic", "train.batch_size=16", "train.epochs=4", "threads=1", "run.name=" + sys.argv[1])
run = mptrain.train(*words, model=Net, data=((x[:64], y[:64]), (x[64:], y[64:])), stop=stop, show=False)
print("rank", rank, run.summary["stopped_early"], run.state.attempts[-1].to_step, flush=True)
"""


def test_two_ranks_train_what_a_program_gives_and_stop_at_the_step_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, begin in (("one", [sys.executable]), ("two", torchrun)):
        command = [*begin, "program.py", name]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        ranks = ("0",) if name == "one" else ("0", "1")
        assert sorted(line for line in done.stdout.splitlines() if line) == [
            f"rank {rank} seen enough 8" for rank in ranks
        ]
    one, two = mptrain.open_run("one"), mptrain.open_run("two")
    assert two.state.ranks == 2
    assert [step.loss for step in two.steps()] == pytest.approx([step.loss for step in one.steps()], rel=1e-3)
