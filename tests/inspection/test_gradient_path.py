import torch
from torch import nn

from mptrain.inspection.gradient_path import GradientPath, breaks_proportion
from mptrain.probe.module_trail import LOSS


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
