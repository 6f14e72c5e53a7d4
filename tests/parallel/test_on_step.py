"""A program's function looks at each step of two ranks: one of them ends the run of both, by its word or its error."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mptrain
from tests.parallel.test_programs import PROGRAM
from tests.small_runs import environment

pytestmark = pytest.mark.distributed

FUNCTIONS = """
def looks(view):
    assert view.batch.inputs.shape == (8, 3, 4, 4)  # this rank's part
    torch.rand(3), view.model.eval()
    if rank == 1 and view.step == 3:
        view.stop("rank 1 has seen enough")

def fails(view):
    if rank == 1 and view.step == 2:
        raise KeyError("mine")

def changes(view):
    if rank == 1 and view.step == 2:
        view.model.layers[1].weight.mul_(2)

words = ("precision=fp16_dynamic", "train.batch_size=16", "threads=1", "run.name=run", "distributed=" + sys.argv[1])
data = ((x[:64], y[:64]), (x[64:], y[64:]))
try:
    run = mptrain.train(*words, model=Net, data=data, on_step=globals()[sys.argv[2]], show=False)
    line = f"{run.summary['stopped_early']} {run.state.attempts[-1].to_step}"
except mptrain.MptrainError as error:
    line = str(error).splitlines()[0]
sys.stdout.write(f"{rank} {line}\\n")  # at once: both ranks write to one pipe
"""


ENOUGH = ["0 rank 1 has seen enough 3", "1 rank 1 has seen enough 3"]
FAILED = "on_step= failed at step 2: KeyError: 'mine'"
CHANGED = "on_step= changed the parameter layers.1.weight at step 2, and it may only look"


@pytest.mark.parametrize(
    ("kind", "function", "printed"),
    [
        ("ddp", "looks", ENOUGH),
        ("fsdp2", "looks", ENOUGH),
        ("ddp", "fails", [f"0 rank 1: {FAILED}", f"1 {FAILED}"]),
        ("fsdp2", "changes", [f"0 rank 1: {CHANGED}", f"1 {CHANGED}"]),
    ],
    ids=["stop", "stop of shards", "error", "changed shard"],
)
def test_one_rank_ends_the_run_of_both(tmp_path, monkeypatch, kind, function, printed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM.partition("def stop")[0] + FUNCTIONS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "program.py", kind, function]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert sorted(line for line in done.stdout.splitlines() if line) == printed, done.stderr
    run = mptrain.open_run("run")
    assert (run.state.status, run.state.ranks) == ("done" if function == "looks" else "failed", 2)
    assert [step.step for step in run.steps()] == [*range(1, 4 if function == "looks" else 3)]
