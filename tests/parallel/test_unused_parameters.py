"""Parameters without a gradient on some ranks, in some steps: trained where they are looked for, else an error that says so."""

from __future__ import annotations

import json

import pytest

from tests.parallel.warm_commands import run_command
from tests.small_runs import environment

pytestmark = pytest.mark.distributed

#: A network whose side branch is used by whom, and when: by (rank, forward pass in training, the rehearsal's is 0).
NET = """
import os
import torch
from torch import nn
from torch import distributed as dist

def used(rank, passes):
    return {"always": True, "never": False, "on the first rank": rank == 0, "at first": passes < 5 or rank == 0}[os.environ["USED"]]

class Net(nn.Module):
    def __init__(self, num_classes, **facts):
        super().__init__()
        self.passes = -1
        self.main, self.side = nn.Linear(64, num_classes), nn.Linear(64, num_classes)

    def forward(self, images):
        images = images.flatten(1)
        self.passes += self.training
        rank = dist.get_rank() if dist.is_initialized() else 0
        out = self.main(images)
        return out + self.side(images) if used(rank, self.passes) else out
"""
WORDS = (
    *("model._target_=some.Net", "extensions.allow=[some.*]", "dataset.image_size=8", "dataset.channels=1"),
    *("dataset.train_samples=96", "train.batch_size=12", "train.epochs=2", "run.name=r", "distributed.procs=2"),
    "precision=fp16_dynamic",
)


def train(folder, used, *words):
    (folder / "some.py").write_text(NET)
    path = f"{environment()['PYTHONPATH']}:{folder}"
    return run_command(*WORDS, *words, cwd=folder, PYTHONPATH=path, USED=used)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "outputs/r/steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "used", ["on the first rank", *(pytest.param(w, marks=pytest.mark.slow) for w in ("always", "never"))]
)
def test_what_the_first_batch_leaves_out_is_looked_for(tmp_path, used):
    found = []
    for name, words in (("by itself", ()), ("asked", ("distributed.find_unused_parameters=true",))):
        (tmp_path / name).mkdir()
        ended = train(tmp_path / name, used, *words)
        assert ended.returncode == 0, ended.stderr
        found.append(losses(tmp_path / name))
    assert len(found[0]) == 16
    assert found[0] == found[1]


def test_what_a_later_batch_leaves_out_ends_the_run_until_asked(tmp_path):
    ended = train(tmp_path, "at first")
    assert ended.returncode == 2, ended.stderr
    assert "rank 1: side.weight has no gradient in this batch, but every parameter had one in the first" in ended.stderr
    assert "resume with mptrain resume RUN distributed.find_unused_parameters=true" in ended.stderr
    assert "Traceback" not in ended.stderr
    path = f"{environment()['PYTHONPATH']}:{tmp_path}"
    words = ("resume", "r", "distributed.find_unused_parameters=true", "extensions.allow=[some.*]")
    again = run_command(*words, cwd=tmp_path, PYTHONPATH=path, USED="at first")
    assert again.returncode == 0, again.stderr
    assert len(losses(tmp_path)) == 16
