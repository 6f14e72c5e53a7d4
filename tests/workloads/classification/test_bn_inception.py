"""Inception v2 is the published table, row by row, and takes images of any size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.workloads.classification.models.bn_inception import TABLE, bn_inception

#: Ioffe and Szegedy 2015, figure 5, read anew: rows of 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3, pool and
#: projection. Sizes at 224 pixels follow; channels are the sums of the filters.
PUBLISHED = {
    "3a": ((64, 64, 64, 64, 96, "avg", 32), (256, 28)),
    "3b": ((64, 64, 96, 64, 96, "avg", 64), (320, 28)),
    "3c": ((0, 128, 160, 64, 96, "pass", 0), (576, 14)),
    "4a": ((224, 64, 96, 96, 128, "avg", 128), (576, 14)),
    "4b": ((192, 96, 128, 96, 128, "avg", 128), (576, 14)),
    "4c": ((160, 128, 160, 128, 160, "avg", 128), (608, 14)),
    "4d": ((96, 128, 192, 160, 192, "avg", 128), (608, 14)),
    "4e": ((0, 128, 192, 192, 256, "pass", 0), (1056, 7)),
    "5a": ((352, 192, 320, 160, 224, "avg", 128), (1024, 7)),
    "5b": ((352, 192, 320, 192, 224, "max", 128), (1024, 7)),
}


def test_every_block_is_the_published_one_at_224_pixels():
    with torch.device("meta"):
        model, images = bn_inception(num_classes=1000), torch.empty(2, 3, 224, 224)
    found = {}
    for name, layer in model.named_children():
        images = layer(images)
        found[name] = tuple(images.shape[1:3])
    stem = {"conv1": (64, 112), "pool1": (64, 56), "conv2_reduce": (64, 56), "conv2": (192, 56), "pool2": (192, 28)}
    assert {name: found[name] for name in stem} == stem
    assert found["pool"] == (1024, 1)
    assert {row.name: tuple(row[1:]) for row in TABLE} == {name: row for name, (row, _) in PUBLISHED.items()}
    for name, (row, size) in PUBLISHED.items():
        pool, block = row[5], getattr(model, f"block{name}")
        assert found[f"block{name}"] == size, name
        assert isinstance(block.pool[0], nn.AvgPool2d if pool == "avg" else nn.MaxPool2d)
        convolutions = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
        assert sum(layer.stride == (2, 2) for layer in convolutions) == (2 if pool == "pass" else 0)


@pytest.mark.parametrize("side", [1, 5, 32, 75])
def test_images_of_any_size_reach_the_classifier(side):
    model = bn_inception(num_classes=3, in_channels=1, width=0.125).double()  # no name of a part hides a method
    logits = model(torch.randn(2, 1, side, side, dtype=torch.float64))
    assert logits.shape == (2, 3)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_width_scales_all_filters_to_multiples_of_four():
    with torch.device("meta"):
        model = bn_inception(num_classes=3, width=0.1)
    widths = {module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)}
    assert all(width % 4 == 0 for width in widths)
    assert min(widths) == 4
    assert model.conv1[0].out_channels == 8  # 6.4 rounded up
