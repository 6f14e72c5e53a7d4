"""Calls that are repeated, inputs that are shared, and functions that are transformed are told apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from tests.faulty_networks import WIDTH, Changes, clip


class Repeats(nn.Module):
    """A part under activation checkpointing, called for two views of its input."""

    def __init__(self, part, *, reentrant):
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, given):
        first = checkpoint(self.part, given * 2, use_reentrant=self.reentrant)
        return first - checkpoint(self.part, given.roll(1, 0), use_reentrant=self.reentrant)


def part():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def clamping_part():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Changes(clip), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parts_that_are_computed_again_are_sound_and_their_faults_are_found(reentrant, examined):
    assert not examined(lambda: Repeats(part(), reentrant=reentrant)).findings
    (found,) = examined(lambda: Repeats(clamping_part(), reentrant=reentrant)).findings
    assert found.kind == "proportion"
    assert all(name.startswith("odd") for name in found.where)


class Fan(nn.Module):
    """Four readers of one input."""

    def __init__(self, bad):
        super().__init__()
        self.sound = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bad = bad

    def forward(self, given):
        return sum(one(given) for one in self.sound) + self.bad(given)


class Writes(nn.Module):
    """Writes to what it is given."""

    def forward(self, given):
        return given.mul_(0.5)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.writes = nn.Linear(WIDTH, WIDTH), Writes()

    def forward(self, given):
        return self.writes(self.before(given))


def test_only_the_reader_that_is_wrong_is_blamed(examined):
    (found,) = examined(lambda: Fan(Changes(clip))).findings
    assert (found.kind, found.where) == ("proportion", ("odd.bad",))
    assert not examined(InPlace).findings


class Transforms(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH)
        self.several = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.1)

    def forward(self, given):
        def one(row):
            return torch.tanh(self.layer(row))

        if self.kind == "vmap":
            return vmap(one)(given)
        if self.kind == "weights":
            named = lambda weight: functional_call(self.layer, {"weight": weight, "bias": self.layer.bias}, (given,))  # noqa: E731
            return self.layer(given) + vmap(named)(self.several).mean(0)
        if self.kind == "jvp":
            return sum(jvp(one, (given,), (torch.ones_like(given) * 0.1,)))
        return given + vmap(jacrev(one))(given).mean(1)


@pytest.mark.parametrize("kind", ["vmap", "weights", "jvp", "jacrev"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_transformed_functions_are_examined_and_sound(kind, examined):
    assert not examined(lambda: Transforms(kind)).findings
