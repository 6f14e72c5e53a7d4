"""Parameters that no update reaches are told from those whose gradient is zero at the first step or on one batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.lab.doctor.check import check_scaling, without_gradient
from mptrain.lab.step.gradients import scaled_gradients
from tests.faulty_networks import WIDTH
from tests.small_runs import parts_of


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


LAYERS = {"odd.inward.weight", "odd.inward.bias", "odd.outward.weight"}
GATED = {"odd.2.gain", *(f"odd.2.{layer}.{kind}" for layer in ("inward", "outward") for kind in ("weight", "bias"))}


@pytest.mark.parametrize(
    ("make", "saddles", "dead"),
    [
        (lambda: LowRank(0, 0), {"odd.down", "odd.up"}, set()),
        (lambda: Branch(nn.ReLU(), weights=0.0), LAYERS, set()),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), LowRank(0, 0.1), Branch(nn.Tanh(), weights=0.0, gain=0.0)),
            GATED,
            set(),
        ),
        (lambda: LowRank(0.1, 0), set(), set()),
        (lambda: LowRank(0, 0.1), set(), set()),
        (lambda: Branch(nn.Tanh(), gain=0.0), set(), set()),
        (Nested, set(), set()),
        (Normed, set(), set()),
        (lambda: Branch(nn.ReLU(), bias=-100.0), set(), LAYERS),
        (lambda: Branch(nn.Tanh(), gain=0.0, frozen=True), set(), {*LAYERS, "odd.outward.bias"}),
        (Experts, set(), {"odd.experts.1.weight", "odd.experts.1.bias"}),
    ],
)
def test_parameters_that_no_update_reaches_are_told_from_others(make, saddles, dead, words_of):
    parts, _ = parts_of(*words_of(make, "precision=fp32"))
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    zero = [name for name, gradient in scaled_gradients(parts, batch, 1.0).items() if not gradient.any()]
    assert [*map(set, without_gradient(parts, batch, zero))] == [saddles, dead]


def test_saddle_is_a_finding_and_another_zero_a_note(words_of):
    (found,) = check_scaling(compose(words_of(lambda: LowRank(0, 0), "precision=bf16")), lambda _: None).findings
    assert (found.kind, set(found.where)) == ("saddle", {"odd.down", "odd.up"})
    report = check_scaling(compose(words_of(Experts, "precision=bf16")), lambda _: None)
    assert not report.findings
    (note,) = [note for note in report.notes if "exactly zero" in note]
    assert note.startswith("odd.experts.1.weight, odd.experts.1.bias: ")
