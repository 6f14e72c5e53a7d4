import math

import torch
from torch import nn

from mptrain.engine.module_outputs import distance, each_output, keep_in, relative_error, replace_by


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_outputs_are_kept_as_they_were_said_and_nothing_is_changed():
    model, kept = network(), {}
    inputs = torch.randn(5, 3)
    plain = model(inputs)
    with each_output(model, keep_in(kept)):
        assert torch.equal(model(inputs), plain)
    model(inputs)  # no longer looked at
    assert {name: len(tensors) for name, tensors in kept.items()} == {"0": 1, "1": 1, "2": 1}
    assert (kept["0"][0] < 0).any()  # before the ReLU wrote over it


def test_what_is_put_in_its_place_decides_which_relus_are_on():
    model = network()
    inputs = torch.randn(5, 3)
    dead = {"0": [-torch.ones(5, 4)]}
    with each_output(model, replace_by(dead)):
        model(inputs).sum().backward()
    assert not model[0].weight.grad.any()
    assert model[2].bias.grad.any()


def test_its_gradient_is_that_of_what_it_replaces():
    layer = nn.Linear(3, 1)
    inputs = torch.randn(5, 3)
    with each_output(layer, replace_by({"": [torch.zeros(5, 1)]})):
        output = layer(inputs)
    assert not output.any()
    output.sum().backward()
    assert torch.allclose(layer.weight.grad[0], inputs.sum(0))


def test_what_does_not_fit_is_left_alone():
    layer = nn.Linear(3, 1)
    inputs = torch.randn(5, 3)
    with each_output(layer, replace_by({"": [torch.zeros(4, 1)]})):
        assert torch.equal(layer(inputs), layer(inputs))


def test_relative_errors():
    right = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert relative_error([torch.tensor([3.0]), torch.tensor([4.5])], right) == 0.1
    assert relative_error([torch.tensor([3.0]), torch.tensor([math.nan])], right) == math.inf
    assert relative_error([torch.tensor([3.0])], right) == 0.0
    assert distance(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf
