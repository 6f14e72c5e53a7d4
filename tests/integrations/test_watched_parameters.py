"""Parameters of watched loops: tied, frozen, added later, replaced, and with gradients of every kind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mptrain
from mptrain.runlog import read_run
from tests.integrations.watched_training import Network, names, overflows


def test_parameters_added_later_are_watched_from_their_first_gradient():
    model, more = Network(faults=()), nn.Linear(4, 4)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(nn.ModuleList([model, more]), own) as watch:
        for at in range(4):
            if at == 2:
                own.add_param_group({"params": more.parameters()})
            own.zero_grad()
            (more(model(torch.randn(4, 8))).sum() * (torch.inf if at == 3 else 1)).backward()
            own.step()
        watch.flush()
        assert watch.last["step"] == 4
        assert "1.weight" in watch.last["nonfinite"]


def test_tied_and_frozen_parameters_have_one_name_and_one_that_thaws_is_seen():
    model = Network(faults=())
    model[0].bias.requires_grad = False
    model.add_module("tied", nn.Linear(16, 16))
    model.tied.weight = model[2].weight
    own, events = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own) as watch:
        watch.on_event(events.append)
        for step in range(1, 4):
            model[0].bias.requires_grad = step == 3
            own.zero_grad()
            loss = model[4](model.tied(model.first(torch.randn(4, 8)))).sum()
            (loss * (torch.inf if step > 1 else 1)).backward()
            own.step()
    found = {step: names(one) for step, one in overflows(events).items()}
    all_names = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias", "tied.bias"]
    assert found == {2: [name for name in all_names if name != "0.bias"], 3: all_names}


@pytest.mark.parametrize("rows", [[1], [1, 2, 2]])
def test_the_norm_of_a_sparse_gradient_is_that_of_its_dense_form(rows, tmp_path):
    model = nn.Embedding(10, 4, sparse=True)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, dir=tmp_path / "run"):
        model(torch.tensor(rows)).square().sum().backward()
        norm = model.weight.grad.to_dense().norm().item()
        own.step()
    assert next(read_run(tmp_path / "run").steps()).grad_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("every", [0, 2])
def test_a_parameter_that_takes_the_place_of_another_is_watched(tmp_path, every):
    model = nn.Linear(3, 2)
    own, norms = torch.optim.SGD(model.parameters(), 0.1), []
    with mptrain.watch(model, own, every=every, dir=tmp_path / "run"):
        for step in range(6):
            if step == 3:
                model.weight = nn.Parameter(torch.ones(2, 3))
                own.param_groups[0]["params"][0] = model.weight
            own.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            norms.append(nn.utils.get_total_norm([one.grad for one in model.parameters()]).item())
            own.step()
    assert [one.grad_norm for one in read_run(tmp_path / "run").steps()] == pytest.approx(norms, rel=1e-5)


def test_complex_gradients_count_with_both_their_parts():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model, own = nn.ParameterList([parameter]), torch.optim.SGD([parameter], 0.1)
    with mptrain.watch(model, own, every=0) as watch:
        for imaginary, overflow in ((2.0, False), (math.nan, True)):
            parameter.grad = torch.complex(torch.ones(3), torch.full((3,), imaginary))
            own.step()
            watch.flush()
            assert bool(watch.last["nonfinite"]) is overflow
            if not overflow:
                assert watch.last["grad_norm"] == pytest.approx(nn.utils.get_total_norm([parameter.grad]).item())


def test_gradients_set_by_hand_are_unscaled_once(tmp_path):
    model = nn.Linear(4, 1)
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    with mptrain.watch(model, own, scaler, dir=tmp_path / "run"):
        grads = torch.autograd.grad(scaler.scale(model(torch.ones(2, 4)).mean()), list(model.parameters()))
        for one, grad in zip(model.parameters(), grads, strict=True):
            one.grad = grad
        scaler.step(own)
        scaler.update()
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters()]).item()
    assert next(read_run(tmp_path / "run").steps()).grad_norm == pytest.approx(norm, rel=1e-5)
