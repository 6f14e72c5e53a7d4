"""Inception v2: GoogLeNet with batch normalisation, built from its published table because torchvision has none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.fields import PositiveFloat

Pool = Literal["avg", "max", "pass"]


class Row(NamedTuple):
    """Row of Inception v2's published table: numbers of filters in the branches of one Inception block, 0 for none.

    They are those of the 1x1 convolution, of the 3x3 convolution (``out3``) and the 1x1 convolution before it, of each
    of two 3x3 convolutions (``out33``) and the 1x1 convolution before them, and of the 1x1 convolution after the pool
    (``project``). The pool ``pass`` is a max-pool without projection, in a block that halves the image.
    """

    name: str
    single: int
    reduce3: int
    out3: int
    reduce33: int
    out33: int
    pool: Pool
    project: int


#: Ioffe and Szegedy 2015, figure 5. Its column of output sizes gives 576 for 4c and 4d and 1024 for 4e, but the filters
#: of these rows add up to 608, 608 and 1056, which all implementations use.
TABLE = (
    Row("3a", 64, 64, 64, 64, 96, "avg", 32),
    Row("3b", 64, 64, 96, 64, 96, "avg", 64),
    Row("3c", 0, 128, 160, 64, 96, "pass", 0),
    Row("4a", 224, 64, 96, 96, 128, "avg", 128),
    Row("4b", 192, 96, 128, 96, 128, "avg", 128),
    Row("4c", 160, 128, 160, 128, 160, "avg", 128),
    Row("4d", 96, 128, 192, 160, 192, "avg", 128),
    Row("4e", 0, 128, 192, 192, 256, "pass", 0),
    Row("5a", 352, 192, 320, 160, 224, "avg", 128),
    Row("5b", 352, 192, 320, 192, 224, "max", 128),
)


def bn_inception(*, num_classes: int, in_channels: int = 3, width: PositiveFloat = 1.0) -> nn.Sequential:
    """Build Inception v2, or BN-Inception (Ioffe and Szegedy, *Batch normalization*, 2015, arXiv 1502.03167, figure 5).

    At width 1 with three channels and 1,000 classes it has 11,285,224 parameters: the 11,295,240 of the common
    definitions (Caffe, MXNet, pretrained-models.pytorch) minus the biases of its 10,016 filters, which are redundant
    before a normalisation. The scales and shifts of the normalisation are trained. As in those definitions, the first
    convolution is a plain one, where the paper uses a separable one to save time, and there is no auxiliary head.
    Convolutions are initialised as in He et al. 2015. All pools are padded by one pixel, which gives the sizes of the
    table at 224 pixels and supports images of any size. ``width`` scales all numbers of filters, rounded to the nearest
    multiples of four, at least 4.
    """

    def filters(published: int) -> int:
        return max(4, round(published * width / 4) * 4) if published else 0

    stem = (filters(64), filters(192))
    layers: dict[str, nn.Module] = {
        "conv1": _convolution(in_channels, stem[0], 7, stride=2),
        "pool1": nn.MaxPool2d(3, stride=2, padding=1),
        "conv2_reduce": _convolution(stem[0], stem[0], 1),
        "conv2": _convolution(stem[0], stem[1], 3),
        "pool2": nn.MaxPool2d(3, stride=2, padding=1),
    }
    channels = stem[1]
    for row in TABLE:
        layers[f"block{row.name}"] = block = Inception(channels, row, filters)
        channels = block.out_channels
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": nn.Linear(channels, num_classes)}
    return nn.Sequential(OrderedDict(layers))


class Inception(nn.Module):
    """Inception block: parallel branches (1x1, 3x3, twice 3x3 and a pool) with concatenated channels."""

    def __init__(self, in_channels: int, row: Row, filters: Callable[[int], int]) -> None:
        super().__init__()
        counts = (row.single, row.reduce3, row.out3, row.reduce33, row.out33, row.project)
        single, reduce3, out3, reduce33, out33, project = map(filters, counts)
        stride = 2 if row.pool == "pass" else 1
        self.one = _convolution(in_channels, single, 1) if single else None
        self.three = nn.Sequential(_convolution(in_channels, reduce3, 1), _convolution(reduce3, out3, 3, stride=stride))
        self.twice = nn.Sequential(
            _convolution(in_channels, reduce33, 1),
            _convolution(reduce33, out33, 3),
            _convolution(out33, out33, 3, stride=stride),
        )
        pool = nn.AvgPool2d if row.pool == "avg" else nn.MaxPool2d
        self.pool = nn.Sequential(pool(3, stride=stride, padding=1))
        if project:
            self.pool.append(_convolution(in_channels, project, 1))
        self.out_channels = single + out3 + out33 + (project or in_channels)

    @override
    def forward(self, images: Tensor) -> Tensor:
        first = [] if self.one is None else [self.one(images)]
        return torch.cat([*first, self.three(images), self.twice(images), self.pool(images)], dim=1)


def _convolution(in_channels: int, out_channels: int, side: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())
