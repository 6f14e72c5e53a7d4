"""What doctor says of updates of half-precision weights that rounding loses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mptrain
from mptrain.config.compose import compose
from mptrain.lab.doctor.updates import lost_in_run
from mptrain.optimizer import stochastic
from mptrain.system.errors import ConfigError
from tests.small_runs import TINY


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.GELU(), nn.Linear(50, 10)).to(dtype)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def examined(model, optimizer, **more):
    torch.manual_seed(1)
    batch = torch.randn(16, 30), torch.randint(0, 10, (16,))
    return mptrain.doctor(model, loss_fn, batch, precision=None, optimizer=optimizer, **more)


def finding_of(report):
    return next((finding for finding in report.findings if finding.kind == "lost_updates"), None)


def test_a_model_of_bf16_weights_is_taken_as_it_is_and_its_next_update_is_examined():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = examined(model, optimizer)
    finding = finding_of(report)
    assert report.ok
    assert finding.minor
    assert "1.weight" in finding.where
    assert "without a master copy" in finding.what
    assert "mptrain.optimizer.stochastic(optimizer), tried on this step" in finding.hint
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_warm_up_is_examined_at_its_peak_and_optimizers_with_attributes_of_their_own_are_copied():
    class Own(torch.optim.SGD):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            self.factor = 1e-3

        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= self.factor
            return super().step(closure)

    model = network()
    for optimizer in (torch.optim.AdamW(model.parameters(), lr=2e-5), Own(model.parameters(), lr=1.0)):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        assert finding_of(examined(model, optimizer)) is not None


def test_what_loses_nothing_is_no_finding_and_what_was_not_looked_at_is_said():
    class LazyMasters(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                master = self.state[parameter].setdefault("master_param", parameter.detach().float())
                master -= 1e-6 * parameter.grad
                parameter.copy_(master)

    class Refuses(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("not without its engine")

    model = network()
    assert finding_of(examined(model, LazyMasters(model.parameters(), lr=1.0))) is None
    assert finding_of(examined(model, stochastic(torch.optim.AdamW(model.parameters(), lr=2e-5)))) is None
    report = examined(model, Refuses(model.parameters(), lr=1.0))
    assert "was not looked at: ValueError: not without its engine" in report.notes[-1]
    assert "give optimizer=" in examined(model, None).notes[-1]


def test_a_model_without_half_weights_has_to_be_given_a_precision():
    with pytest.raises(ConfigError, match="no half precision"):
        examined(network(torch.float32), None)


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16_pure"])
def test_a_run_without_master_weights_is_told_what_its_first_update_loses(precision):
    words = (*TINY, "optimizer=adamw", "optimizer.lr=1e-5", f"precision={precision}")
    what, hint = lost_in_run(compose(words))
    assert "change nothing" in what
    assert "FP32 master weights" in hint
    assert ("bf16_stochastic, tried on this step" in hint) == (precision == "bf16_pure")


def test_runs_that_lose_nothing_have_no_note_and_updates_in_place_are_said_to_be_unseen():
    for precision in ("bf16", "bf16_stochastic", "bf16_kahan", "amp_bf16"):
        assert lost_in_run(compose((*TINY, f"precision={precision}"))) == ()
    words = (*TINY, "precision=bf16_pure", "precision.optimizer_state=parameters")
    assert "not looked at" in lost_in_run(compose(words))[0]


class Wraps(torch.optim.Optimizer):
    """Steps another optimizer, as that of accelerate does."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure=None):
        self.inner.step()


def half_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 5)).bfloat16()
    return model, (torch.randn(8, 20), torch.randint(0, 5, (8,)))


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs.to(torch.bfloat16)).float(), targets)


def test_an_optimizer_that_steps_another_is_left_alone_and_named():
    model, batch = half_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_of(model, batch).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mptrain.doctor(model, loss_of, batch, precision=None, optimizer=Wraps(inner))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not inner.state
    assert any("was not looked at" in note and "Wraps steps another optimizer" in note for note in found.notes)


def test_a_batch_of_half_precision_is_taken_too():
    model, (inputs, targets) = half_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def plain(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    found = mptrain.doctor(model, plain, (inputs.bfloat16(), targets), precision=None, optimizer=optimizer)
    assert found.summary.startswith("Sequential in its own bfloat16: ")
    (lost,) = [finding for finding in found.findings if "of the updates change nothing" in finding.what]
    assert "; of all weights, " in lost.what
    assert "(on average by all of them)" in lost.hint


def test_what_is_lost_is_said_even_if_no_remedy_can_be_tried(monkeypatch):
    def refused(optimizer):
        raise ConfigError("it counts its steps")

    monkeypatch.setattr("mptrain.lab.doctor.updates.stochastic", refused)
    model, batch = half_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = mptrain.doctor(model, loss_of, batch, precision=None, optimizer=optimizer)
    (lost,) = [finding for finding in found.findings if "of the updates change nothing" in finding.what]
    assert lost.hint.startswith("FP32 weights keep them")
    assert "tried on this step" not in lost.hint
