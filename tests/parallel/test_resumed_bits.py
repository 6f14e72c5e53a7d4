"""Three ranks and more, whose sums depend on the place of a gradient in what is sent: a resumed run has every bit of an undisturbed one."""

from __future__ import annotations

import pytest

from tests.faults.attempts import computed
from tests.faults.references import state_of
from tests.parallel.warm_commands import run_command
from tests.small_runs import environment

pytestmark = pytest.mark.distributed

#: A network that computes its first pass of a run otherwise than all later ones, those after a resume too.
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, kind, **facts):
        super().__init__()
        self.kind = kind
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.one, self.other = (nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, num_classes)) for _ in range(2))

    def forward(self, images):
        images, first = images.flatten(1), bool(self.passes == 0)
        if self.training:
            self.passes += 1
        if first and self.kind == "leaves out":
            return self.one(images)
        branches = (self.other, self.one) if first else (self.one, self.other)
        return branches[0](images) + branches[1](images)
"""
SMALL = ("model=mlp", "model.hidden=[48,40]", "dataset.train_samples=96", "train.batch_size=12")
LARGE = (*SMALL, "precision=fp16_dynamic", "model.hidden=[512,512,512]", "scaler.init_scale=1048576")
OWN = (
    *("model._target_=own_net.Net", "extensions.allow=[own_net]", "dataset.image_size=8", "dataset.channels=1"),
    *("dataset.train_samples=96", "train.batch_size=12"),
)
GAN = (
    "model=dcgan",
    "model.width=4",
    "model.latent=8",
    "dataset.image_size=16",
    "dataset.train_samples=96",
    "train.batch_size=12",
)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        pytest.param(3, (*SMALL, "precision=fp32"), id="one bucket"),
        pytest.param(3, LARGE, id="several buckets"),
        pytest.param(3, (*OWN, "+model.kind=leaves out", "precision=fp32"), id="the first batch leaves out"),
        pytest.param(3, (*OWN, "+model.kind=turns round", "precision=amp_dynamic"), id="the first batch turns round"),
        *(
            pytest.param(ranks, words, marks=pytest.mark.slow)
            for ranks, words in (
                (4, (*SMALL, "precision=amp_dynamic", "optimizer=adamw", "train.ema_decay=0.9")),
                (3, (*SMALL, "precision=fp16_dynamic", "train.accumulate=6")),
                (3, (*SMALL, "precision=fp16_dynamic", "distributed.reduce=gradients")),
                (3, (*SMALL, "precision=fp32", "distributed.find_unused_parameters=true")),
                (3, (*SMALL, "precision=fp32", "train.batch_size=11")),
                (3, (*SMALL, "precision=fp16_dynamic", "distributed=fsdp2")),
                (4, (*SMALL, "precision=fp32", "distributed=fsdp2")),
                (3, (*GAN, "precision=fp32")),
            )
        ),
    ],
)
def test_a_resumed_run_has_every_bit_of_an_undisturbed_one(tmp_path, ranks, words):
    (tmp_path / "own_net.py").write_text(NET)
    path = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tmp_path}"}
    words = (
        *words,
        "schedule=constant",
        "checkpoint.every_epochs=null",
        "train.epochs=2",
        f"distributed.procs={ranks}",
    )
    allow = [word for word in words if word.startswith("extensions.allow")]
    for way in (
        (*words, "train.max_steps=7", "run.name=whole"),
        (*words, "train.max_steps=3", "run.name=cut"),
        ("resume", "cut", "train.max_steps=7", *allow),
    ):
        ended = run_command(*way, cwd=tmp_path, **path)
        assert ended.returncode == 0, ended.stderr
    whole, cut = (tmp_path / "outputs" / name for name in ("whole", "cut"))
    assert (whole / "steps.jsonl").read_bytes() == (cut / "steps.jsonl").read_bytes()
    assert computed(state_of, whole) == computed(state_of, cut)
