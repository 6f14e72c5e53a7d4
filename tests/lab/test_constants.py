"""A number that half precision does not hold is a finding where it changes what the step computes, and hides no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mptrain.engine.module_trail import LOSS


class Computes(nn.Module):
    """Computes something of its input."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, given):
        return self.compute(given)


def underflows(given):
    """The product of many shares is too small for FP16; the large number makes it as large as others again."""
    shares = torch.sigmoid(given[:, :20] - 0.5)
    product = shares[:, 0]
    for at in range(1, 20):
        product = product * shares[:, at]
    return given + torch.tanh(product[:, None] * 1e6)


def sharpens(given):
    """Cosines that are close to one another, divided by a small number; the epsilon of the norm does not matter."""
    keys = F.normalize(given[:8] * 0.05 + 4, dim=1)
    shares = ((F.normalize(given * 0.05 + 4, dim=1) @ keys.T) / 5e-4).softmax(1)
    return given + shares @ given[:8]


def units(given):
    """Charges in coulombs."""
    return torch.tanh(given * 1.6e-7 * 6e6)


@pytest.mark.parametrize(("compute", "operator"), [(underflows, "mul"), (sharpens, ""), (units, "mul")])
def test_a_harmless_number_does_not_hide_the_operator_at_fault(compute, operator, examined):
    (found,) = examined(lambda: Computes(compute)).findings
    assert (found.kind in ("output", "narrow"), found.where) == (True, ("odd",))
    assert f"rounding {operator} alone makes it" in found.what if operator else "softmax" in found.what


def test_a_harmless_number_in_the_loss_does_not_hide_its_cancellation(examined):
    report = examined(nn.Identity, "task._target_=tests.faulty_networks.BendingLoss")
    assert [(one.kind, one.where) for one in report.findings] == [("output", (LOSS,))]


SOUND = {
    "epsilon beside one": (lambda x: x / (x.abs().mean(1, keepdim=True) + 1e-8), "1e-08 rounds to zero in FP16"),
    "epsilon of a norm": (F.normalize, "1e-12 rounds to zero in FP16"),
    "large factor": (lambda x: (x * 2.0**-9) * 1e5 / 200, ""),
    "large limit": (lambda x: x.clamp(-1e4, 1e4), ""),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_number_that_changes_nothing_is_a_note_at_most(name, examined):
    compute, said = SOUND[name]
    report = examined(lambda: Computes(compute))
    assert not report.findings
    noted = [note for note in report.notes if note.startswith("odd: ") and "autocast" not in note]
    assert len(noted) == bool(said)
    assert all(said in note and "changes no result on this batch" in note for note in noted)


def divides_by_nothing(given):
    """Groups of four, some of which are zero, divided by their sums and an epsilon."""
    groups = (given > 2).to(given.dtype).view(len(given), -1, 4)
    return given + (groups / (groups.sum(2, keepdim=True) + 1e-8)).flatten(1)


def root_of_nothing(given):
    """A root whose derivative at zero only an epsilon keeps finite."""
    return given + ((given * (given > 0)).square().view(len(given), -1, 4).sum(2) + 1e-10).sqrt().repeat(1, 4)


@pytest.mark.parametrize("compute", [divides_by_nothing, root_of_nothing])
def test_an_epsilon_that_vanishes_where_it_is_needed_is_a_finding(compute, examined):
    found = examined(lambda: Computes(compute)).findings
    assert (found[0].kind, found[0].where) == ("constant", ("odd",))
    assert "rounds to zero in FP16" in found[0].what
    assert "changes no result" not in found[0].what
    assert found[0].hint.endswith("odd]")


def test_an_epsilon_that_vanishes_without_effect_hides_no_fault_of_the_same_operator(examined):
    report = examined(lambda: Computes(lambda given: given.relu() + 1e-8 + ((given * 0.01 + 1000) - 1000)))
    assert {one.kind for one in report.findings} == {"constant", "output"}
    assert "rounding add alone makes it" in report.findings[-1].what


def test_a_tensor_filled_with_a_number_that_half_precision_rounds_to_zero_is_found(examined):
    def filled(given):
        return given + torch.tanh(given.square() / (given * 0 + torch.full_like(given, 1e-8)).clamp(min=0)) * (
            given > 0
        )

    (found,) = examined(lambda: Computes(filled)).findings
    assert found.where == ("odd",)
