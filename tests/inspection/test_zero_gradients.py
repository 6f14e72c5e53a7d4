"""Parameters that no update reaches are told from those whose gradient is zero at the first step or on one batch."""

from __future__ import annotations

from dataclasses import replace

import faulty_networks
import pytest
import torch
from faulty_networks import WIDTH
from torch import nn

from mptrain.config.compose import compose
from mptrain.inspection.doctor import check_scaling


class LowRank(nn.Module):
    """A low-rank update of the identity."""

    def __init__(self, down, up):
        super().__init__()
        self.down = nn.Parameter(down * torch.randn(4, WIDTH))
        self.up = nn.Parameter(up * torch.randn(WIDTH, 4))

    def forward(self, given):
        return given + given @ self.down.T @ self.up.T


class Branch(nn.Module):
    """A residual branch of two layers with an activation.

    Args:
        weights: Factor of the initial weights.
        bias: Initial bias of the first layer.
        gain: Initial gain of the branch.
        frozen: The gain is not trained.
    """

    def __init__(self, activation, *, weights=1.0, bias=0.0, gain=1.0, frozen=False):
        super().__init__()
        self.inward, self.outward, self.activation = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), activation
        self.gain = nn.Parameter(torch.full((WIDTH,), gain), requires_grad=not frozen)
        with torch.no_grad():
            for layer in (self.inward, self.outward):
                layer.weight.mul_(weights)
                layer.bias.zero_()
            self.inward.bias.fill_(bias)

    def forward(self, given):
        return given + self.gain * self.outward(self.activation(self.inward(given)))


class Nested(nn.Module):
    """Residual branches inside one another, each with a gain of zero: one trains after the other."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        return given + self.outer * (given + self.inner * self.linear(given))


class Experts(nn.Module):
    """Two layers of which the first gets all samples."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, given):
        shares = torch.tensor([1.0, 0.0], dtype=given.dtype)
        return shares[0] * self.experts[0](given) + shares[1] * self.experts[1](given)


class Normed(nn.Module):
    """A bias whose gradient is zero up to rounding: the norm takes it away."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        nn.init.zeros_(self.linear.bias)

    def forward(self, given):
        return self.norm(self.linear(given))


def report_of(make, monkeypatch, precision="fp16_dynamic"):
    fault = replace(faulty_networks.FAULTS["none"], make=make)
    monkeypatch.setitem(faulty_networks.FAULTS, "zero", fault)
    words = (*faulty_networks.with_fault("zero"), "train.batch_size=16", "dataset.train_samples=64")
    return check_scaling(compose((*words, f"precision={precision}")), lambda _: None)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: LowRank(0, 0), {"odd.down", "odd.up"}),
        (lambda: Branch(nn.ReLU(), weights=0.0), {"odd.inward.weight", "odd.inward.bias", "odd.outward.weight"}),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), LowRank(0, 0.1), Branch(nn.Tanh(), weights=0.0, gain=0.0)),
            {
                *(f"odd.2.{layer}.{kind}" for layer in ("inward", "outward") for kind in ("weight", "bias")),
                "odd.2.gain",
            },
        ),
    ],
    ids=["adapter", "layers", "gain"],
)
def test_parameters_that_no_update_reaches_are_found(make, names, monkeypatch):
    (found,) = report_of(make, monkeypatch).findings
    assert (found.kind, set(found.where)) == ("saddle", names)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(0.1, 0),
        lambda: LowRank(0, 0.1),
        lambda: Branch(nn.Tanh(), gain=0.0),
        Nested,
        Normed,
    ],
    ids=["up_zero", "down_zero", "gain_zero", "nested", "norm"],
)
def test_a_gradient_that_is_zero_at_the_first_step_alone_is_nothing_to_report(make, monkeypatch):
    report = report_of(make, monkeypatch)
    assert not report.findings
    assert not any("exactly zero" in note for note in report.notes)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Branch(nn.ReLU(), bias=-100.0), "odd.inward.weight, odd.inward.bias, odd.outward.weight: "),
        (lambda: Branch(nn.Tanh(), gain=0.0, frozen=True), "odd.inward.weight, odd.inward.bias, odd.outward.weight "),
        (Experts, "odd.experts.1.weight, odd.experts.1.bias: "),
    ],
    ids=["units_off", "frozen_gain", "experts"],
)
def test_a_gradient_that_is_zero_for_another_reason_is_a_note(make, named, monkeypatch):
    report = report_of(make, monkeypatch, "bf16")
    assert not report.findings
    (note,) = [note for note in report.notes if "exactly zero" in note]
    assert note.startswith(named)
