"""Backward passes of watched loops: which update they belong to, with which loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mptrain
from mptrain.runlog import read_run
from tests.integrations.watched_training import Network, train


@pytest.mark.parametrize("to_none", [True, False])
def test_the_loss_of_an_abandoned_update_is_not_added_to_the_next(to_none, tmp_path):
    model, losses = Network(faults=()), []
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        for abandoned in (True, False):
            own.zero_grad(set_to_none=to_none)
            for _ in range(2):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                losses.append(loss.item())
            if not abandoned:
                own.step()
    (step,) = read_run(tmp_path / "run").steps()
    assert step.loss == pytest.approx(sum(losses[-2:]))


def test_a_backward_pass_that_fails_is_no_update_and_the_next_one_counts():
    model = Network(faults=())
    own, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 8)

    def fail(gradient):
        raise ZeroDivisionError

    with mptrain.watch(model, own) as watch:
        h = model.first(x)
        h.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model[4](h).sum().backward()
        own.zero_grad()
        model(x).sum().backward()
        own.step()
    assert (watch.last["step"], watch.last["nonfinite"]) == (1, [])


def test_backward_takes_what_it_takes_unwatched():
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own):
        loss = model(torch.ones(1, 2)).sum()
        torch.autograd.backward((one for one in [loss]), retain_graph=True)
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)], [torch.ones(())])
    assert model.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_pass_between_the_steps_of_two_optimizers_and_the_update_of_their_scaler_is_of_the_second(tmp_path):
    """As a GAN trains: the generator's pass reaches the discriminator, which has already stepped."""
    torch.manual_seed(0)
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    own = [torch.optim.SGD(model.parameters(), 0.0) for model in (one, two)]
    scaler, told = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    with mptrain.watch([one, two], own, scaler, dir=tmp_path / "run"):
        for step in range(3):
            own[1].zero_grad()
            first = two(one(torch.randn(8, 4)).detach()).square().mean()
            scaler.scale(first).backward()
            norm = nn.utils.get_total_norm([one.grad for one in two.parameters()]).item() / scaler.get_scale()
            scaler.step(own[1])
            own[0].zero_grad()
            second = two(one(torch.randn(8, 4))).mean()
            scaler.scale(second * (torch.inf if step == 1 else 1)).backward()
            scaler.step(own[0])
            scaler.update()
            told.append((first.item(), norm, second.item()))
    run = read_run(tmp_path / "run")
    of_first = [(one.loss, one.grad_norm) for one in run.steps() if one.learner == "optimizer1"]
    assert of_first == [pytest.approx((loss, norm), rel=1e-5) for loss, norm, _ in told]
    assert {event["learner"] for event in run.events() if event["event"] == "overflow"} == {"optimizer0"}
    losses = [one.loss for one in run.steps() if one.learner == "optimizer0"]
    assert losses[::2] == [pytest.approx(told[at][2], rel=1e-5) for at in (0, 2)]


def test_losses_of_accumulated_passes_that_reach_other_parameters_are_added_up(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(8, 3), "two": nn.Linear(8, 3), "trunk": nn.Linear(6, 8)})
    own, losses = torch.optim.SGD(model.parameters(), 0.01), []
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        for step in range(4):
            own.zero_grad(set_to_none=step < 2)
            losses.append(0.0)
            for head, weight in (("two", 100.0), ("one", 1.0)) if step % 2 else (("one", 1.0), ("two", 100.0)):
                loss = weight * nn.functional.cross_entropy(model[head](model["trunk"](x)), y)
                loss.backward()
                losses[-1] += loss.item()
            own.step()
    assert [one.loss for one in read_run(tmp_path / "run").steps()] == pytest.approx(losses, rel=1e-5)


def test_the_loss_of_a_pass_with_reentrant_checkpoints_is_counted_once(tmp_path):
    plain = train(True, folder=tmp_path / "plain")[0]
    again = train(True, network=lambda: Network(reentrant=True), folder=tmp_path / "again")[0]
    assert plain == again
    assert [one.loss for one in read_run(tmp_path / "again").steps()] == pytest.approx(again)


def test_an_optimizer_that_steps_within_the_pass_has_the_loss_of_that_pass(tmp_path):
    torch.manual_seed(0)
    model, losses = nn.Linear(4, 1), []
    own = torch.optim.SGD([model.weight], 0.1)

    def step(_):
        own.step()
        own.zero_grad()

    with mptrain.watch(model, own, dir=tmp_path / "run"):
        model.weight.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            losses.append(loss.item())
    assert [one.loss for one in read_run(tmp_path / "run").steps()] == pytest.approx(losses)
