"""Parameters outside of the model, that thaw, or that share memory: trained as they should be, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mptrain.engine.buffer_guard import Thawed
from mptrain.engine.rehearsal import rehearse
from mptrain.run.build.parallelism import require_still_shared, sharing_memory
from mptrain.system.errors import ConfigError
from tests.engine.plain_loops import Meter, Net, first_batches, new_loop, trained


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))


class InList(Net):
    def __init__(self):
        super().__init__()
        self.extra = [Scale(), torch.zeros(10, requires_grad=True)]

    def forward(self, images):
        return super().forward(images) * self.extra[0].log_scale.exp() + self.extra[1]


class InObject(Net):
    def __init__(self):
        super().__init__()
        self.meter = Meter()
        self.meter.weight = nn.Parameter(torch.ones(10))

    def forward(self, images):
        return super().forward(images) * self.meter.weight


class Late(Net):
    """Makes a parameter in its first pass."""

    def forward(self, images):
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(10))
        return super().forward(images) * self.gain


@pytest.mark.parametrize("mode", ["fp32", "fp16_dynamic"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (InList, r"extra\[1\].* get a gradient and would never be trained"),
        (InObject, "meter.weight gets a gradient"),
        (Late, r"a tensor of shape \(10,\) gets a gradient"),
    ],
)
def test_parameters_that_the_model_does_not_register_are_refused(make, named, mode, monkeypatch):
    with pytest.raises(ConfigError, match=named):
        trained(make, monkeypatch, f"precision={mode}")


def test_parameters_of_the_task_are_refused_before_training(monkeypatch):
    loop = new_loop(Net, monkeypatch, "precision=amp_dynamic")
    parts = loop.parts
    [learner] = parts.learners
    vars(parts.task)["balance"] = balance = Scale()
    loss = learner.objective.loss

    def weighted(model, batch):
        return loss(model, batch) * torch.exp(-balance.log_scale).sum() + balance.log_scale.sum()

    object.__setattr__(learner.objective, "loss", weighted)
    with pytest.raises(ConfigError, match=r"task.balance.log_scale gets a gradient"):
        rehearse(parts, first_batches(loop)[0])
    balance.requires_grad_(False)
    rehearse(parts, first_batches(loop)[0])


class Legitimate(Net):
    """Leaves that are no parameters to train: inputs, what a pass makes, frozen parts, and what the model trains."""

    def __init__(self):
        super().__init__()
        self.teacher, self.noise = [Net().requires_grad_(False)], torch.zeros(64, requires_grad=True)

    def forward(self, images):
        if self.training:
            if self.noise.grad is not None:
                self.noise.data += 0.1 * self.noise.grad.sign()
                self.noise.grad = None
            else:
                self.noise.data += 1e-4
            images = images.flatten(1).requires_grad_() + self.noise.to(images.dtype)
            fresh = torch.zeros(10, requires_grad=True)
            outputs = super().forward(images)
            (slope,) = torch.autograd.grad(outputs.sum(), self.noise, create_graph=True)
            return outputs + fresh + slope.sum() * 0 + self.teacher[0].to(images.dtype)(images) * 0
        return super().forward(images)


def test_leaves_that_are_no_parameters_are_left_alone(monkeypatch):
    for mode in ("fp32", "fp16_dynamic"):
        trained(Legitimate, monkeypatch, f"precision={mode}")


class Thaws(Net):
    def __init__(self, after=3):
        super().__init__()
        self.body.requires_grad_(False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.after = after

    def forward(self, images):
        if self.training:
            self.passes += 1
            self.body.requires_grad_(bool(self.passes > self.after))
        return super().forward(images)


@pytest.mark.parametrize("mode", ["fp32", "fp16_dynamic"])
def test_a_parameter_that_thaws_is_refused_in_that_step(mode, monkeypatch):
    for after, steps in ((3, 3), (0, 0)):
        loop = new_loop(lambda after=after: Thaws(after), monkeypatch, f"precision={mode}", "train.max_steps=5")
        del loop.parts.loaders["val"], loop.parts.loaders["test"]
        with pytest.raises(Thawed, match=r"body.weight.* require a gradient in training") as caught:
            loop.run()
        assert loop.progress.step == steps
        assert "torch.no_grad()" in caught.value.hint


class Shares(Net):
    def __init__(self, how):
        super().__init__()
        self.twin = nn.Linear(64, 16)
        if how == "data":
            self.twin.weight.data = self.body.weight.data
        elif how == "rows":
            self.twin.weight = nn.Parameter(self.body.weight.data[8:])
        else:
            flat = torch.randn(32, 64)
            self.body.weight.data, self.twin.weight.data = flat[::2], flat[1::2]

    def forward(self, images):
        return self.head(self.features(images) + F.pad(self.twin(images.flatten(1))[:, :8], (0, 8)))


def test_parameters_with_one_memory_stay_equal_or_are_refused(monkeypatch):
    for how in ("data", "rows"):
        for mode in ("fp16_dynamic", "bf16", "fp16_pure"):
            with pytest.raises(ConfigError, match=r"body.weight and twin.weight share memory"):
                new_loop(lambda how=how: Shares(how), monkeypatch, f"precision={mode}", "precision.force=true")
        with pytest.raises(ConfigError, match="share memory"):
            require_still_shared(sharing_memory(Shares(how)), sharded=True)
    loop, _ = trained(lambda: Shares("data"), monkeypatch, "precision=amp_dynamic")
    assert torch.equal(loop.parts.model.body.weight, loop.parts.model.twin.weight)
    assert not sharing_memory(Shares("interleaved"))
