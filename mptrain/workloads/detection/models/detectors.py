"""Builders of detectors. torchvision is imported only when a detector is built, because the import takes a second.

All detectors have the same interface. Called with images ``[N, C, side, side]``, true boxes float32 ``[N, M, 4]`` and
their classes int64 ``[N, M]`` (-1 for padding), a network returns its losses by name, float32 ``[N]`` each. Called with
images alone, it returns a list of N mappings with ``boxes`` ``[D, 4]``, ``labels`` ``[D]`` and ``scores`` ``[D]``.
Training and evaluation mode differ only in BatchNorm. Boxes are left, upper, right, lower in pixels of the images.
Classes count from 0, without the background.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt

#: Aspect ratios of SSD300's default boxes on each map, their sizes as fractions of the side, and the strides of the
#: maps in pixels (Liu et al. 2016, section 3, and the authors' code for COCO, as in torchvision).
_RATIOS = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
_SCALES = [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05]
_STRIDES = [8, 16, 32, 64, 100, 300]

#: Sizes of the small network's default boxes as fractions of the side: 14 to 45 pixels for a side of 64.
_SMALL_SCALES = [0.22, 0.36, 0.54, 0.7]

#: Standard deviation of the small network's initial class weights. All classes are then about equally likely, and the
#: initial loss is 4 ln(1 + classes).
_UNDECIDED = 0.001

_COLOURS = 3
_SMALLEST = 32  # smallest side in pixels for which the last map is not empty


def ssd300_vgg16(*, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Build the detector SSD300 on VGG-16 (Liu et al. 2016) with torchvision's initialisation, no pretrained weights.

    Images that do not have 3 channels and 300x300 pixels raise `ConfigError`.
    """
    _require_colours("ssd300_vgg16", in_channels)
    if image_size != _STRIDES[-1]:
        raise ConfigError(
            f"dataset.image_size={image_size}: ssd300_vgg16 takes images of 300x300 pixels",
            "set dataset.image_size=300",
        )
    from torchvision.models import vgg16
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator

    from mptrain.workloads.detection.models.single_shot import SingleShot, WideNormVGG

    trunk = WideNormVGG(vgg16(weights=None).features, highres=False)
    generator = DefaultBoxGenerator(_RATIOS, scales=_SCALES, steps=_STRIDES)
    return SingleShot(trunk, generator, num_classes, in_channels=in_channels, image_size=image_size)


def fasterrcnn_resnet50(
    *, num_classes: int, in_channels: int, frozen_norms: bool = False, trained_stages: Annotated[int, Ge(0), Le(5)] = 5
) -> nn.Module:
    """Build the detector Faster R-CNN (Ren et al. 2015) on a ResNet-50 feature pyramid, without pretrained weights.

    The feature pyramid is that of Lin et al. 2017. With ``frozen_norms``, for weights loaded with ``model.weights``,
    BatchNorm keeps its loaded statistics and gains, as published. ``trained_stages`` is the number of backbone stages
    to train, counted from the last; 3 as published, 5 for all. Images without 3 channels raise `ConfigError`.
    """
    _require_colours("fasterrcnn_resnet50", in_channels)
    from mptrain.workloads.detection.models.faster_rcnn import FasterRCNN

    return FasterRCNN(num_classes, frozen_norms=frozen_norms, trained_stages=trained_stages)


def ssd_small(*, num_classes: int, in_channels: int, image_size: int, width: PositiveInt = 16) -> nn.Module:
    """Build a small SSD detector with BatchNorm for small images and quick experiments.

    It has seven convolutions, three feature maps, and default boxes of 0.2 to 0.7 of the side. ``width`` is the number
    of channels at half the image's side; the feature maps have four times as many. Images that are too small for three
    maps raise `ConfigError`.
    """
    if image_size < _SMALLEST:
        raise ConfigError(
            f"dataset.image_size={image_size}: ssd_small halves the side five times",
            f"set dataset.image_size={_SMALLEST} or more",
        )
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator

    from mptrain.workloads.detection.models.single_shot import SingleShot, SmallTrunk

    generator = DefaultBoxGenerator([[2], [2], [2]], scales=_SMALL_SCALES)
    model = SingleShot(
        SmallTrunk(in_channels, width), generator, num_classes, in_channels=in_channels, image_size=image_size
    )
    for layer in model.head.classification_head.module_list:
        torch.nn.init.normal_(layer.weight, std=_UNDECIDED)
    return model


def _require_colours(name: str, in_channels: int) -> None:
    if in_channels != _COLOURS:
        raise ConfigError(
            f"dataset.channels={in_channels}, but {name} takes images of 3 channels", "set dataset.channels=3"
        )
