"""Gradients that a loop changes between the pass and the update have the norm and the names that were applied."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mptrain
from mptrain.runlog import read_run
from mptrain.system.records import OverflowRecord
from tests.integrations.alone_and_watched import both, loss_of, model_of, norm_of, watching


def halve(parameters):
    for one in parameters:
        one.grad.data.div_(2)  # no version of the gradient moves


def replace(parameters):
    for one in parameters:
        one.grad = one.grad * 3


def noise(parameters):
    generator = torch.Generator().manual_seed(1)
    for one in parameters:
        one.grad.add_(torch.randn(one.shape, generator=generator))


@pytest.mark.parametrize("change", [halve, replace, noise])
def test_gradients_that_change_before_the_update_have_the_norm_that_was_applied(change, tmp_path):
    norms = []

    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            for _ in range(4):
                own.zero_grad()
                loss_of(model).backward()
                before = norm_of(model.parameters())
                change([*model.parameters()])
                norms.append((before, norm_of(model.parameters())))
                own.step()

    both(loop, dir=tmp_path / "run")
    steps, norms = [*read_run(tmp_path / "run").steps()], norms[4:]
    assert [one.applied_norm for one in steps] == pytest.approx([after for _, after in norms], rel=1e-4)
    expected = [after if change is replace else before for before, after in norms]  # else the passes' are gone
    assert [one.grad_norm for one in steps] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("at", ["data", "replaced", "in_place"])
def test_an_infinity_that_is_written_after_the_pass_is_named(scaled, at):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        with watching(seen, watched, model, own, scaler):
            for step in range(1, 5):
                own.zero_grad()
                scaler.scale(loss_of(model)).backward()
                if step == 2:
                    grad = model[2].bias.grad
                    if at == "replaced":
                        model[2].bias.grad = grad * math.inf
                    else:
                        (grad.data if at == "data" else grad).fill_(math.inf)
                scaler.step(own)
                scaler.update()

    seen, _ = both(loop)
    first = next(one for one in seen if isinstance(one, OverflowRecord))
    assert (first.step, first.skipped, [name for name, _ in first.tensors]) == (2, scaled, ["2.bias"])


def test_gradients_set_by_hand_have_the_norm_as_applied(tmp_path):
    def loop(model, seen, watched):
        own = torch.optim.SGD(model.parameters(), 0.1)
        x, y = torch.randn(16, 6), torch.randint(3, (16,))

        def loss(weights):
            return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        with watching(seen, watched, model, own):
            for _ in range(3):
                grads = torch.func.grad(loss)({name: one.detach() for name, one in model.named_parameters()})
                for name, one in model.named_parameters():
                    one.grad = grads[name]
                own.step()
        return norm_of(model.parameters())

    _, norm = both(loop, dir=tmp_path / "run")
    *_, last = read_run(tmp_path / "run").steps()
    assert (last.step, last.grad_norm, last.applied_norm) == (3, *[pytest.approx(norm, rel=1e-4)] * 2)


def test_parameters_that_are_frozen_at_first_are_looked_at_from_their_first_gradient(tmp_path):
    norms = []

    def loop(model, seen, watched):
        model.requires_grad_(False)
        own = torch.optim.SGD(model.parameters(), 0.1)
        with watching(seen, watched, model, own):
            model.requires_grad_(True)
            for _ in range(3):
                own.zero_grad()
                loss_of(model).backward()
                norms.append(norm_of(model.parameters()))
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                own.step()

    both(loop, dir=tmp_path / "run")
    steps = [*read_run(tmp_path / "run").steps()]
    assert [one.grad_norm for one in steps] == pytest.approx(norms[3:], rel=1e-4)
    assert all(math.isfinite(one.loss) for one in steps)


def test_an_overflow_stays_on_record_if_the_optimizer_is_given_parameters_before_its_step(tmp_path):
    model, more = model_of(), nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(nn.ModuleList([model, more]), own, every=0, dir=tmp_path / "run"):
        (loss_of(model) * math.inf).backward()
        own.add_param_group({"params": [*more.parameters()]})
        own.step()
    (overflow,) = [one for one in read_run(tmp_path / "run").events() if one["event"] == "overflow"]
    assert {name for name, _ in overflow["tensors"]} == {f"0.{name}" for name, _ in model.named_parameters()}
