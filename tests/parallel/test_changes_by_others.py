"""Weights that a forward pass changes, on two ranks: the same as on one with replicated weights, refused with shards."""

from __future__ import annotations

import json

import pytest
from parallel.warm_commands import run_command

OWN = """
import torch
from torch import nn


class Short(nn.Module):
    def __init__(self, num_classes: int, how: str = "copy"):
        super().__init__()
        self.how, self.body, self.head = how, nn.Linear(64, 32), nn.Linear(32, num_classes)

    def forward(self, images):
        short = torch.renorm(self.body.weight.detach().float(), 2, 0, 0.2).to(self.body.weight.dtype)
        if self.how == "copy":
            with torch.no_grad():
                self.body.weight.copy_(short)
        else:
            self.body.weight.data.copy_(short)
        return self.head(torch.tanh(self.body(images.flatten(1))))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "short.yaml").write_text("_target_: own.Short\n")
    words = (
        *("--config-dir", "conf", "model=short", "dataset=digits", "extensions.allow=[own.*]", "run.root=out"),
        *("dataset.train_samples=128", "train.batch_size=32", "train.epochs=3", "optimizer.lr=0.2"),
    )

    def train(name, *more):
        import os

        path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{__file__.rsplit('/tests/', 1)[0]}"
        done = run_command(*words, f"run.name={name}", *more, cwd=tmp_path, PYTHONPATH=path)
        lines = tmp_path / "out" / name / "steps.jsonl"
        return done, [json.loads(line)["loss"] for line in lines.read_text().splitlines()] if lines.exists() else []

    return train


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_replicated_weights_train_as_on_one_rank(precision, own):
    alone, one = own("alone", f"precision={precision}", "train.accumulate=2")
    both, two = own("both", f"precision={precision}", "distributed=ddp", "distributed.procs=2")
    assert (alone.returncode, both.returncode) == (0, 0), both.stderr
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-4 if precision == "fp32" else 0.02)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["copy", "data"])
def test_gathered_weights_lose_the_change_and_it_is_refused(how, own):
    done, _ = own("shards", "precision=fp32", "distributed=fsdp2", "distributed.procs=2", f"+model.how={how}")
    assert done.returncode == 2, done.stderr
    assert "the parameter body.weight is changed in a forward pass, and distributed=fsdp2 frees gathered" in done.stderr
