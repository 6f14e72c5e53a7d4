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
def test_alexnet_has_its_five_convolutions_three_linear_layers_and_no_normalisation(side):
    model = small_alexnet(num_classes=7, in_channels=1, image_size=side, width=4, hidden=8)
    assert [(layer.out_channels, layer.kernel_size[0]) for layer in kinds(model, nn.Conv2d)] == [
        (4, 5),
        (12, 5),
        (24, 3),
        (16, 3),
        (16, 3),
    ]
    assert len(kinds(model, nn.Linear)) == 3
    assert kinds(model, nn.BatchNorm2d) == []
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


def test_vgg_doubles_its_convolutions_and_halves_the_image_at_the_end_of_each_stage():
    model = small_vgg(num_classes=7, in_channels=3, image_size=16, widths=(4, 8), hidden=16, dropout=0.0)
    assert [layer.out_channels for layer in kinds(model, nn.Conv2d)] == [4, 4, 8, 8]
    assert kinds(model, nn.Linear)[0].in_features == 8 * 4 * 4
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)


def test_vgg_refuses_images_that_its_pools_swallow():
    with pytest.raises(ConfigError, match=r"model.widths has 3 stages: images of 7 pixels are too small"):
        small_vgg(num_classes=7, in_channels=3, image_size=7, widths=(4, 4, 4))
    assert small_vgg(num_classes=7, in_channels=1, image_size=8, widths=(4, 4, 4))(torch.zeros(1, 1, 8, 8)).shape == (
        1,
        7,
    )


def test_resnext_groups_its_3x3_convolutions_at_half_the_width():
    model = small_resnext(num_classes=7, in_channels=1, widths=(16, 32), blocks=2, cardinality=4)
    grouped = [layer for layer in kinds(model, nn.Conv2d) if layer.groups > 1]
    assert [(layer.out_channels, layer.groups, layer.stride[0]) for layer in grouped] == [
        (8, 4, 1),
        (8, 4, 1),
        (16, 4, 2),
        (16, 4, 1),
    ]
    assert model(torch.randn(2, 1, 5, 5)).shape == (2, 7)


@pytest.mark.parametrize(("widths", "cardinality"), [((24,), 8), ((64, 6), 1)])
def test_resnext_refuses_widths_that_do_not_divide(widths, cardinality):
    with pytest.raises(ConfigError, match=r"model\.widths="):
        small_resnext(num_classes=7, in_channels=1, widths=widths, cardinality=cardinality)
