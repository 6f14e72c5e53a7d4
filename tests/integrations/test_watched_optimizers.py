"""Optimizers and scalers of watched loops: several, wrapped, of a kind of their own, or stepped past the scaler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mptrain
from mptrain.runlog import read_run
from mptrain.system.errors import UsageError
from tests.integrations.watched_training import BEHIND, Network, names, overflows


def test_the_activations_of_an_optimizer_are_those_of_its_own_modules(tmp_path):
    models = {"one": Network(faults=()), "other": Network(faults=())}
    own = [torch.optim.SGD(model.parameters(), 0.1) for model in models.values()]
    with mptrain.watch(models, own, every=1, dir=tmp_path / "run"):
        both = sum(model(torch.randn(4, 8)).square().mean() for model in models.values())
        both.backward()
        for optimizer in own:
            optimizer.step()
    found = {one.learner: {*one.tensors["activations"]} for one in read_run(tmp_path / "run").histograms()}
    assert found == {f"optimizer{at}": {f"{name}.{layer}" for layer in range(5)} for at, name in enumerate(models)}


def test_two_optimizers_of_two_models_have_a_row_each():
    one, two = Network(faults=()), Network(faults=(3,))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (one, two)]
    scaler, events = torch.amp.GradScaler("cpu", init_scale=8.0), []
    with mptrain.watch({"g": one, "d": two}, optimizers, scaler) as watch:
        watch.on_event(events.append)
        for _ in range(5):
            for model, own in zip((one, two), optimizers, strict=True):
                own.zero_grad()
                scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
                scaler.step(own)
            scaler.update()
    (found,) = overflows(events).values()
    assert (found.learner, found.step, names(found)) == ("optimizer1", 3, [f"d.{name}" for name in BEHIND])
    assert watch.last["optimizer0/step"] == watch.last["optimizer1/step"] == 5


def test_lbfgs_sparse_and_unused_parameters_are_recorded():
    model = nn.ModuleDict({"table": nn.Embedding(10, 4, sparse=True), "unused": nn.Linear(2, 2)})
    own, events = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own) as watch:
        watch.on_event(events.append)
        for at in range(3):
            own.zero_grad()
            (model["table"](torch.tensor([1, 1, 2])).sum() * (torch.inf if at == 1 else 1)).backward()
            own.step()
    assert {step: names(one) for step, one in overflows(events).items()} == {2: ["table.weight"]}

    model = Network(faults=())
    own = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(4, 8)

    def closure():
        own.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with mptrain.watch(model, own) as watch:
        for _ in range(2):
            own.step(closure)
    assert watch.last["step"] == 2


def test_an_optimizer_beside_the_scaler_is_recorded_without_a_scale():
    one, two = Network(faults=()), Network(faults=())
    scaled, plain = (torch.optim.SGD(model.parameters(), 0.1) for model in (one, two))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch([one, two], [scaled, plain], scaler) as watch:
        scaler.scale(one(torch.randn(4, 8)).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        two(torch.randn(4, 8)).sum().backward()
        plain.step()
    assert (watch.last["optimizer0/loss_scale"], watch.last["optimizer1/loss_scale"]) == (8, 1)


def test_a_rate_that_is_a_tensor_is_recorded_as_it_was(tmp_path):
    model, rate = Network(faults=()), torch.tensor(0.5)
    own = torch.optim.SGD(model.parameters(), lr=rate)
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        for _ in range(3):
            own.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            own.step()
            rate *= 0.5
    assert [one.lr for one in read_run(tmp_path / "run").steps()] == [0.5, 0.25, 0.125]


def test_gradients_that_are_unscaled_but_not_stepped_are_no_update():
    model = Network(faults=())
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch(model, own, scaler) as watch:
        for step in range(4):
            own.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).sum()).backward()
            scaler.unscale_(own)
            if step % 2:
                scaler.step(own)
            scaler.update()
    assert watch.last["step"] == 2


def test_a_loop_that_unscales_and_steps_itself_is_recorded(tmp_path):
    torch.manual_seed(0)
    model = Network(faults=(3,))
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    losses, norms = [], []
    with mptrain.watch(model, own, scaler, dir=tmp_path / "run"):
        for _ in range(5):
            own.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(own)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                own.step()
                losses.append(loss.item()), norms.append(norm.item())
            scaler.update()
    found = list(read_run(tmp_path / "run").steps())
    assert [one.loss for one in found] == pytest.approx(losses, rel=1e-6)
    assert [one.grad_norm for one in found] == pytest.approx(norms, rel=1e-5)
    assert [(one.loss_scale, one.skipped, one.overflow) for one in found] == [(8.0, False, False)] * 2 + [
        (4.0, False, False)
    ] * 2


class Clipping(torch.optim.AdamW):
    """An optimizer whose step does something, and then the step of its base."""

    def step(self, closure=None):
        return super().step(closure)


class Twice(Clipping):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Clipping, Twice])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_calls_the_step_of_its_base_is_one_update(kind, scaled):
    for base in (torch.optim.AdamW, Clipping):
        base([torch.zeros(1, requires_grad=True)])  # from here on torch hooks the steps of this class too
    model, events = Network(faults=()), []
    own = kind(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    with mptrain.watch(model, own, scaler) as watch:
        watch.on_event(events.append)
        for step in range(4):
            own.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).sum()).backward()
            if step == 1:
                with pytest.raises(ZeroDivisionError):
                    own.step(lambda: 1 / 0)
            scaler.step(own)
            scaler.update()
    assert (watch.last["step"], events) == (4, [])


class Unrated(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def test_an_optimizer_without_a_rate_and_losses_told_as_numbers_are_taken(tmp_path):
    model = nn.Linear(3, 1)
    own = Unrated(model.parameters())
    with mptrain.watch(model, own, dir=tmp_path / "run") as watch:
        for loss in (0.5, torch.tensor([[2.0]])):
            model(torch.ones(2, 3)).sum().backward()
            own.step()
            watch.step(loss)
        model(torch.ones(2, 3)).sum().backward()
        own.step()
        with pytest.raises(UsageError, match=r"the loss of a step has the shape \[2\]"):
            watch.step(torch.ones(2))
    found = list(read_run(tmp_path / "run").steps())
    assert [one.loss for one in found[:2]] == [0.5, 2.0]
    assert all(math.isnan(one.lr) for one in found)
