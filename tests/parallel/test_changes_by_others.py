"""Weights that a forward pass changes, on two ranks: the same as on one with replicated weights, refused with shards."""

from __future__ import annotations

import json

import pytest

from tests.parallel.warm_commands import run_command

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


class Experts(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        self.head, self.passes = nn.Linear(64, num_classes), 0

    def forward(self, images):
        self.passes += 1
        hidden = images.flatten(1)
        if self.passes > 6:  # the first passes run all
            return self.head(self.experts[int(hidden.double().sum() * 64) % 2](hidden))
        return self.head(self.experts[1](self.experts[0](hidden)))


class Own(nn.Module):
    def __init__(self, num_classes: int, how: str = "thaws"):
        super().__init__()
        self.how, self.body, self.head, self.passes = how, nn.Linear(64, 32), nn.Linear(32, num_classes), 0
        self.register_buffer("bank", torch.zeros(1))
        if how == "thaws":
            self.body.requires_grad_(False)

    def forward(self, images):
        if self.training:
            self.passes += 1
            if self.how == "thaws" and self.passes > 6:
                self.body.requires_grad_(True)
            if self.how == "alike":
                self.bank = torch.cat([self.bank, images.double().mean().float()[None]])
            rank = torch.distributed.get_rank()
            if self.how == "one" and rank == 1:
                self.bank = torch.zeros(len(self.bank) + 1)
            if self.how == "dtype" and rank == 1:
                self.bank = self.bank.double()
            if self.how == "apart":
                self.bank = torch.zeros(int(images.double().sum() * 64) % 97, device=images.device)
        return self.head(torch.tanh(self.body(images.flatten(1)))) + 0 * self.bank.sum()
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "short.yaml").write_text("_target_: own.Short\n")
    (tmp_path / "conf" / "model" / "own.yaml").write_text("_target_: own.Own\n")
    (tmp_path / "conf" / "model" / "experts.yaml").write_text("_target_: own.Experts\n")
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


@pytest.mark.distributed
def test_ranks_that_run_other_modules_of_one_size_are_refused(own):
    done, losses = own("moe", "precision=fp32", "distributed=fsdp2", "distributed.procs=2", "model=experts")
    assert done.returncode == 2, done.stderr
    assert "in the last step rank 0 ran experts." in done.stderr
    assert "where rank 1 ran experts." in done.stderr
    assert 3 <= len(losses) < 12


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("thaws", "body.weight, body.bias require a gradient in training"),
        ("apart", "the buffer bank was given another size or dtype on rank 1 than on rank 0"),
        ("one", "the buffer bank was given another size or dtype on rank 1 than on rank 0"),
        ("dtype", "the buffer bank was given another size or dtype on rank 1 than on rank 0"),
        ("alike", ""),
    ],
)
def test_what_a_network_changes_on_several_ranks_is_alike_or_refused(kind, how, said, own):
    words = (f"distributed={kind}", "distributed.procs=2", "model=own", f"+model.how={how}")
    done, losses = own(how, "precision=fp32", *words)
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr
    assert len(losses) < 12 if said else len(losses) == 12
