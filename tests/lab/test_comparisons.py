"""A choice at a near tie is no fault; one that follows from a wrong number is found by the module that chooses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.config.compose import compose
from mptrain.engine.module_trail import ModuleTrail
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.lab.doctor.check import check_scaling
from mptrain.lab.step.module_tensors import Comparisons, alike
from tests.faulty_networks import WIDTH


class Chooses(nn.Module):
    """A module that chooses rows of a table by a function of what it is given, within one forward."""

    def __init__(self, rows=48):
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(rows, WIDTH))
        nn.init.normal_(self.lift.weight, std=0.5)


class Experts(Chooses):
    """A router sends each sample to two of its experts, which another module has."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Embedding(48, WIDTH)

    def forward(self, given):
        shares, chosen = (self.lift(given) @ self.table.T).topk(2)
        return self.out(given + (shares.softmax(1)[..., None] * self.experts(chosen)).sum(1))


class Neighbours(Chooses):
    """Adds the differences to the nearest other samples of a batch."""

    def forward(self, given):
        lifted = self.lift(given)
        near = (lifted[:, None] - lifted).square().sum(2).topk(4, largest=False).indices[:, 1:]
        return self.out(given + (lifted[near] - lifted[:, None]).amax(1))


class Winners(Chooses):
    """Only the largest quarter of the numbers of a row stay, and a hard sample of a distribution is added."""

    def forward(self, given):
        scores = self.lift(given) @ self.table.T
        kept = torch.where(scores >= scores.kthvalue(36, 1, keepdim=True).values, scores, 0)
        return self.out(given + (kept / 32 + F.gumbel_softmax(scores, hard=True)) @ self.table)


class Energies(Chooses):
    """Takes the row of the largest energy, of which many are infinite in FP16."""

    def forward(self, given):
        energy = ((self.lift(given) @ self.table.T) * 200).square()
        return self.out(given + self.table[energy.argmax(1)])


class Saturated(Chooses):
    """Takes the row of the largest probability, of which all are 1 in FP16."""

    def forward(self, given):
        return self.out(given + self.table[torch.sigmoid(self.lift(given) @ self.table.T + 10).argmax(1)])


class Expanded(Chooses):
    """Takes the nearest row by |a|^2 - 2ab + |b|^2, far from 0."""

    def forward(self, given):
        far, rows = self.lift(given) + 24, self.table + 24
        squares = far.square().sum(1, keepdim=True) - 2 * far @ rows.T + rows.square().sum(1)
        return self.out(given + self.table[squares.argmin(1)])


class Active(Chooses):
    """Lets through what has a power, of which FP16 has none."""

    def forward(self, given):
        power = (self.lift(given) * 1e-5).square()
        return self.out(torch.where(power > 0, given, 0.0))


class Later(Chooses):
    """Averages over earlier positions of a long text, which FP16 does not tell apart."""

    def __init__(self):
        super().__init__()
        self.position = 5000 + torch.arange(WIDTH)

    def forward(self, given):
        at = self.position.to(given.dtype)
        earlier = (at[:, None] > at).to(given.dtype)
        return self.out(given @ (earlier.T / (1 + earlier.sum(1))))


class Gaps(Chooses):
    """Divides by deviations from 300, by 1 where there is none."""

    def forward(self, given):
        gap = (self.lift(given) * 0.02 + 300) - 300
        return self.out(torch.where(gap == 0, given, given / 2))


SOUND = (Experts, Neighbours, Winners)
FAULTY = (Energies, Saturated, Expanded, Active, Later, Gaps)


@pytest.mark.parametrize(("make", "precision"), [*((make, "fp16_dynamic") for make in SOUND), (Experts, "bf16")])
def test_choice_at_near_ties_is_no_fault(make, precision, words_of):
    config = compose(words_of(make, f"precision={precision}"))
    assert not check_scaling(config, lambda _: None).findings
    found = diagnose_config(config).examination
    assert (found.cause, found.also) == ("none", ()), found.verdict


@pytest.mark.long
@pytest.mark.parametrize("make", FAULTY)
def test_choice_by_wrong_numbers_is_found(make, words_of):
    config = compose(words_of(make, "precision=fp16_dynamic"))
    found = check_scaling(config, lambda _: None).findings
    assert found[0].where == ("odd",)
    found = diagnose_config(config).examination
    assert (found.cause, found.module) == ("forward", "odd")


@pytest.mark.parametrize(
    ("what", "own", "said", "same"),
    [
        ("a near tie", [0.5, 1.25, 2.001, 3.5], [0.5, 1.25, 2.0, 3.5], True),
        ("a sum that comes near 0", [-1.2, 1e-3, 1.1], [-1.2, -1e-3, 1.1], True),
        ("a number beside a mask", [-1e9, 1.5, 2.5], [-1e9, 1.5, 2.7], False),
        ("infinity", [7e4, 9.5e4, 1.5], [math.inf, math.inf, 1.5], False),
        ("no number", [0.5, 2.5], [math.nan, 2.5], False),
        ("underflow", [0.5, 1e-9, 2.5], [0.5, 0.0, 2.5], False),
        ("positions", [4097.0, 4098.0, 4500.0], [4096.0, 4098.0, 4500.0], False),
        ("numbers that are not told apart", [0.99999, 0.99998, 0.99997], [1.0, 1.0, 1.0], False),
    ],
)
def test_numbers_are_alike_where_rounding_explains_it(what, own, said, same):
    own, said = torch.tensor(own, dtype=torch.float64), torch.tensor(said).half()
    assert torch.equal(alike(" compares by gt", said, own), said.double() if same else own), what


def test_equality_has_no_near_ties_around_zero():
    own, said = torch.tensor([-1.25, 1e-3, 1.5]), torch.tensor([-1.25, 0.0, 1.5])
    assert torch.equal(alike(" compares by eq", said, own), own)


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x.max(1),
        lambda x: x.min(dim=1, keepdim=True),
        lambda x: x.topk(2),
        lambda x: x.sort(stable=True, dim=1, descending=True),
        lambda x: x.kthvalue(2),
        lambda x: x.cummax(1),
    ],
)
def test_picked_values_have_the_indices_of_what_is_compared(pick):
    given = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]], requires_grad=True)
    other = torch.tensor([[2.0, 1.0, 3.0], [4.0, 5.0, 6.0]])
    with Comparisons(ModuleTrail(), lambda key, value: other):
        values, indices = pick(given)
        whole = given.max()
    wanted = pick(other).indices
    assert torch.equal(indices, wanted)
    assert torch.equal(values, given.gather(1, wanted.view(2, -1)).view(wanted.shape))
    assert whole.item() == 6
    assert torch.autograd.grad(values.sum(), given)[0].sum() == values.numel()
