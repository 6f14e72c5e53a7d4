"""Small versions of published classifiers for small images, which train in seconds on a CPU."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MinLen
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.classification.models.convnet import require_pixels

Widths = Annotated[tuple[PositiveInt, ...], MinLen(1)]


def small_alexnet(
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    width: PositiveInt = 16,
    hidden: PositiveInt = 128,
    dropout: BelowOneOrZero = 0.5,
) -> nn.Sequential:
    """Build a small AlexNet (Krizhevsky et al. 2012): two 5x5 and three 3x3 convolutions, overlapping pools, dropout.

    Like the version of 2014, it has no normalisation. The first convolution has ``width`` channels, the others have 3,
    6, 4 and 4 times as many, as published. Dropout precedes both hidden layers.
    """
    wide, wider, widest = 3 * width, 4 * width, 6 * width
    layers = [
        *(nn.Conv2d(in_channels, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Conv2d(width, wide, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Conv2d(wide, widest, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(widest, wider, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(wider, wider, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
    ]
    side = -(-image_size // 8)
    return nn.Sequential(*layers, *_dense(wider * side * side, hidden, num_classes, dropout))


def small_vgg(
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    widths: Widths = (16, 32, 64),
    hidden: PositiveInt = 128,
    dropout: BelowOneOrZero = 0.5,
) -> nn.Sequential:
    """Build a small VGG (Simonyan and Zisserman 2014): stages of two 3x3 convolutions and a pool, no normalisation.

    Dropout precedes both hidden layers. Images that are too small for the pools raise `ConfigError`.
    """
    layers: list[nn.Module] = []
    for width in widths:
        for channels in (in_channels, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        in_channels = width
    for layer in layers:
        if isinstance(layer, nn.Conv2d):  # as in torchvision; with the default, activations shrink in every layer
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    side = require_pixels(image_size, widths, pools=len(widths))
    return nn.Sequential(*layers, *_dense(in_channels * side * side, hidden, num_classes, dropout))


def small_resnext(
    *,
    num_classes: int,
    in_channels: int,
    widths: Widths = (64, 128, 256),
    blocks: PositiveInt = 1,
    cardinality: PositiveInt = 8,
) -> nn.Sequential:
    """Build a small ResNeXt (Xie et al. 2016): a 3x3 convolution, then torchvision's grouped bottlenecks.

    ``widths`` has the channels of each stage's output; all stages but the first halve the image. A 3x3 convolution has
    half as many, in ``cardinality`` groups. Widths must be multiples of 4 and of twice ``cardinality``, otherwise there
    is a `ConfigError`.
    """
    from torchvision.models.resnet import Bottleneck

    if any(width % 4 or (width // 2) % cardinality for width in widths):
        raise ConfigError(
            f"model.widths={list(widths)} with model.cardinality={cardinality}: each width must be divisible by 4 "
            f"and by {2 * cardinality}, twice the cardinality",
            "use such widths, or a smaller model.cardinality",
        )
    channels = widths[0] // 2
    layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
    layers.append(nn.ReLU())
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            shortcut = None
            if channels != width or stride > 1:
                shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            # The grouped convolution has planes * base_width / 64 * groups channels: half of the block's output.
            grouped = {"groups": cardinality, "base_width": 128 // cardinality}
            layers.append(Bottleneck(channels, width // 4, stride, shortcut, **grouped))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def _dense(features: int, hidden: int, num_classes: int, dropout: float) -> list[nn.Module]:
    return [
        nn.Flatten(),
        *(nn.Dropout(dropout), nn.Linear(features, hidden), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, num_classes),
    ]
