import math

import pytest
import torch
from torch import nn

from mptrain.engine.module_trail import LOSS
from mptrain.lab.step.module_tensors import (
    GradientPath,
    OutputReplacement,
    breaks_proportion,
    distance,
    hook_outputs,
    record_outputs,
    relative_error,
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_outputs_are_kept_as_they_were_said_and_nothing_is_changed():
    model, kept = network(), {}
    inputs = torch.randn(5, 3)
    plain = model(inputs)
    with hook_outputs(model, record_outputs(kept)):
        assert torch.equal(model(inputs), plain)
    model(inputs)  # no longer looked at
    assert {name: len(tensors) for name, tensors in kept.items()} == {"0": 1, "1": 1, "2": 1}
    assert (kept["0"][0] < 0).any()  # before the ReLU wrote over it


def test_what_is_put_in_its_place_decides_which_relus_are_on():
    model = network()
    inputs = torch.randn(5, 3)
    dead = {"0": [-torch.ones(5, 4)]}
    with hook_outputs(model, OutputReplacement(dead)):
        model(inputs).sum().backward()
    assert not model[0].weight.grad.any()
    assert model[2].bias.grad.any()


def test_its_gradient_is_that_of_what_it_replaces():
    layer = nn.Linear(3, 1)
    inputs = torch.randn(5, 3)
    with hook_outputs(layer, OutputReplacement({"": [torch.zeros(5, 1)]})):
        output = layer(inputs)
    assert not output.any()
    output.sum().backward()
    assert torch.allclose(layer.weight.grad[0], inputs.sum(0))


def test_what_does_not_fit_is_left_alone():
    layer = nn.Linear(3, 1)
    inputs = torch.randn(5, 3)
    with hook_outputs(layer, OutputReplacement({"": [torch.zeros(4, 1)]})):
        assert torch.equal(layer(inputs), layer(inputs))


def test_relative_errors():
    right = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert relative_error([torch.tensor([3.0]), torch.tensor([4.5])], right) == 0.1
    assert relative_error([torch.tensor([3.0]), torch.tensor([math.nan])], right) == math.inf
    assert relative_error([torch.tensor([3.0])], right) == 0.0
    assert distance(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.last = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True))

    def forward(self, given):
        return self.last(self.inner(given) * 2)


def test_a_module_that_only_hands_on_what_another_says_is_left_out():
    model, kept = nn.Sequential(Doubles(), nn.Sequential(nn.Linear(2, 2))), {}
    with hook_outputs(model, record_outputs(kept)):
        model(torch.randn(5, 3))
    assert list(kept) == ["0.inner", "0 to 0.last", "0.last.0", "0.last.1", "1.0"]


def test_arithmetic_between_modules_is_the_work_of_the_module_around_them():
    class Around(Doubles):
        def forward(self, given):
            return super().forward(given) * 2

    model, kept = Around(), {}
    with hook_outputs(model, record_outputs(kept)):
        output = model(torch.randn(5, 3))
    assert list(kept) == ["inner", " to last", "last.0", "last.1", ""]
    assert torch.equal(kept[""][0], output)


def test_a_modules_own_error_is_what_it_adds_to_that_of_what_it_is_given():
    model, inputs, said = network(), torch.randn(5, 3), {}
    with hook_outputs(model, record_outputs(said)):
        model(inputs)
    said["0"][0] = said["0"][0] * 2  # the first is wrong; the others do what they do with that
    said["1"][0] = said["0"][0].relu()
    said["2"][0] = model[2](said["1"][0]).detach()
    said["2"][0][0, 0] = math.inf
    replacement = OutputReplacement(said)
    with hook_outputs(model, replacement):
        model(inputs)
    assert replacement.own_error("0") == pytest.approx(1.0)
    assert replacement.own_error("1") < 1e-6
    assert replacement.own_error("2") == math.inf


def test_what_is_infinite_before_is_not_a_modules_own_error():
    model, inputs, said = network(), torch.randn(5, 3), {}
    with hook_outputs(model, record_outputs(said)):
        model(inputs)
    said["0"][0] = torch.full((5, 4), math.inf)
    said["1"][0], said["2"][0] = said["0"][0], model[2](said["0"][0]).detach()
    replacement = OutputReplacement(said)
    with hook_outputs(model, replacement):
        output = model(inputs)
    assert replacement.own_error("0") == math.inf
    assert [replacement.own_error(name) for name in ("1", "2")] == [0.0, 0.0]
    assert not output.isfinite().any()


def test_infinities_that_ought_to_be_there_do_not_hide_the_error_of_what_is_finite():
    right = torch.tensor([-math.inf, 3.0, 4.0])
    assert relative_error([right], [right]) == 0.0
    assert relative_error([torch.tensor([-math.inf, 3.0, 9.0])], [right]) == 1.0
    assert relative_error([torch.tensor([0.0, 3.0, 4.0])], [right]) == math.inf
    assert relative_error([torch.tensor([math.inf, 3.0, 4.0])], [right]) == math.inf


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 1e-3)


class Clips(nn.Module):
    def forward(self, given):
        return Clip.apply(given)


class ClipsBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given):
        return self.other(Clip.apply(self.one(given)))


class ClipsItsWeight(nn.Linear):
    def forward(self, given):
        return nn.functional.linear(given, Clip.apply(self.weight))


def broken(model, *wrong, loss=torch.Tensor.sum):
    torch.manual_seed(0)
    inputs = torch.randn(6, 4)
    paths = GradientPath(1.0), GradientPath(2.0**20)
    for path in paths:
        with path.followed(model):
            (loss(model(inputs)) * path.scale).backward()
        model.zero_grad()
    return breaks_proportion(*paths, wrong, 2.0**-7)


def test_nothing_is_broken_where_gradients_are_in_proportion():
    assert broken(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4))) == ()


def test_the_module_that_clips_is_named_and_not_those_that_it_feeds():
    inner = nn.Sequential(nn.Linear(4, 4), Clips(), nn.Linear(4, 4))
    assert broken(nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4)), "0", "1.0") == ("1.1",)


def test_what_stands_between_modules_is_their_parents():
    assert broken(nn.Sequential(nn.Linear(4, 4), ClipsBetween()), "0", "1.one") == ("1",)


def test_a_parameter_alone_may_be_wrong():
    model = nn.Sequential(nn.Linear(4, 4), ClipsItsWeight(4, 4, bias=False), nn.Linear(4, 4))
    assert broken(model, "1") == ("1",)


def test_the_loss_may_be_to_blame():
    assert broken(nn.Linear(4, 4), "", loss=lambda logits: Clip.apply(logits).sum()) == (LOSS,)


def test_a_module_that_is_called_twice_is_followed_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given):
            return self.layer(Clip.apply(self.layer(given)))

    path, model = GradientPath(1.0), Twice()
    with path.followed(model):
        model(torch.randn(6, 4)).sum().backward()
    assert {(place.call, place.side) for place in path.kept if place.module == "layer"} == {
        (0, "output"),
        (1, "input"),
        (1, "output"),
    }
    assert not model.layer._forward_hooks
