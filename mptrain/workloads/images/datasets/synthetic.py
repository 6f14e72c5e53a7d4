"""Synthetic images of any size, for speed measurements and for experiments without files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from mptrain.system.errors import ConfigError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.random_streams import mix
from mptrain.workloads.images.augmentation import Shifting
from mptrain.workloads.images.image_dataset import MemoryDataset, Samples

_NATIVE_SIZE = 32
_CELLS = 4  # the pattern of a class is a grid of 4x4 grey values, enlarged to the image
_PATTERN = 40.0  # standard deviation of the pattern over its cells, on the scale 0 to 255
_NOISE = 40.0  # standard deviation of the noise of each pixel, on the scale 0 to 255


@dataclass(kw_only=True, eq=False)
class Synthetic(MemoryDataset):
    """Data set of images and labels drawn from a seed, for speed measurements and experiments without files.

    Images have the requested size and channels, by default 32 pixels and 3 channels; ``samples`` are for training and
    validation. Training images are shifted by up to two pixels if ``augment`` is set. ``learnable`` gives each class
    its own pattern under the noise; otherwise labels are unpredictable. ``seed`` is separate from the seed of the run,
    so runs with other seeds see the same data. Fewer than two ``classes`` raise `ConfigError`.
    """

    classes: PositiveInt = 10
    samples: PositiveInt = 2048
    test_samples: PositiveInt = 256
    learnable: bool = True
    seed: NonNegativeInt = 0
    val_samples: NonNegativeInt = 256

    name = "synthetic"
    shifting = Shifting(pixels=2, flip=False)

    @override
    def read(self) -> tuple[Samples, Samples]:
        if self.classes < 2:
            raise ConfigError(
                f"dataset.classes={self.classes}: a classifier needs two or more", "set dataset.classes to 2 or more"
            )
        size, depth = self.image_size or _NATIVE_SIZE, self.channels or 3
        generator = torch.Generator().manual_seed(mix(self.seed) >> 1)
        patterns = torch.randn(self.classes, depth, _CELLS, _CELLS, generator=generator) * _PATTERN
        if not self.learnable:
            patterns.zero_()
        patterns = F.interpolate(patterns, size=(size, size), mode="nearest") + 127.5
        self.class_names = tuple(f"class {number}" for number in range(self.classes))
        self.mean, self.std = (0.5,) * depth, ((_PATTERN**2 + _NOISE**2) ** 0.5 / 255,) * depth
        return _draw(self.samples, patterns, generator), _draw(self.test_samples, patterns, generator)


#: Name of the data set in configurations.
make_synthetic = Synthetic


def _draw(samples: int, patterns: Tensor, generator: torch.Generator) -> Samples:
    targets = torch.randint(len(patterns), (samples,), generator=generator)
    images = torch.empty((samples, *patterns.shape[1:]), dtype=torch.uint8)
    # In chunks, because all images as floats would need four times the memory.
    for some, labels in zip(torch.split(images, 256), torch.split(targets, 256), strict=True):
        noise = torch.randn(some.shape, generator=generator) * _NOISE
        some.copy_((patterns[labels] + noise).round().clamp(0, 255))
    return images, targets
