"""The small families are built of what makes the published ones, at any size that leaves them a pixel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.classification.models.small_networks import small_alexnet, small_resnext, small_vgg


def kinds(model, *types):
    return [module for module in model.modules() if isinstance(module, types)]


@pytest.mark.parametrize("side", [1, 9, 32])
def test_alexnet_has_five_convolutions_and_no_normalisation(side):
    model = small_alexnet(num_classes=7, in_channels=1, image_size=side, width=4, hidden=8)
    sizes = [(layer.out_channels, layer.kernel_size[0]) for layer in kinds(model, nn.Conv2d)]
    assert sizes == [(4, 5), (12, 5), (24, 3), (16, 3), (16, 3)]
    assert len(kinds(model, nn.Linear)) == 3
    assert kinds(model, nn.BatchNorm2d) == []
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


def test_vgg_doubles_its_convolutions_and_halves_the_image():
    model = small_vgg(num_classes=7, in_channels=3, image_size=16, widths=(4, 8), hidden=16, dropout=0.0)
    assert [layer.out_channels for layer in kinds(model, nn.Conv2d)] == [4, 4, 8, 8]
    assert kinds(model, nn.Linear)[0].in_features == 8 * 4 * 4
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)


def test_resnext_groups_its_3x3_convolutions_at_half_the_width():
    model = small_resnext(num_classes=7, in_channels=1, widths=(16, 32), blocks=2, cardinality=4)
    grouped = [layer for layer in kinds(model, nn.Conv2d) if layer.groups > 1]
    shapes = [(layer.out_channels, layer.groups, layer.stride[0]) for layer in grouped]
    assert shapes == [(8, 4, 1), (8, 4, 1), (16, 4, 2), (16, 4, 1)]
    assert model(torch.randn(2, 1, 5, 5)).shape == (2, 7)


@pytest.mark.parametrize(
    ("build", "changes", "said"),
    [
        (small_vgg, {"image_size": 7, "widths": (4, 4, 4)}, "model.widths has 3 stages: images of 7 pixels"),
        (small_resnext, {"widths": (24,), "cardinality": 8}, r"model\.widths="),
        (small_resnext, {"widths": (64, 6), "cardinality": 1}, r"model\.widths="),
    ],
)
def test_widths_that_do_not_fit_are_refused(build, changes, said):
    with pytest.raises(ConfigError, match=said):
        build(num_classes=7, in_channels=1, **changes)
