"""Made-up images: for measuring speed, and for trying things out at any size without files."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mptrain.errors import ConfigError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.faulty_samples import OnError
from mptrain.workloads.base.random_streams import mix
from mptrain.workloads.images.augment import Augmentation
from mptrain.workloads.images.image_dataset import Channels, Choices, ImageDataset, Normalise, Stored, in_memory

_NATIVE_SIZE = 32
_CELLS = 4  # a class' pattern is a grid of 4x4 grey values, enlarged to the image
_PATTERN = 40.0  # standard deviation of the pattern over its cells, of 255
_NOISE = 40.0  # standard deviation of the noise on each pixel, of 255


def make_synthetic(
    *,
    classes: PositiveInt = 10,
    samples: PositiveInt = 2048,
    test_samples: PositiveInt = 256,
    learnable: bool = True,
    seed: NonNegativeInt = 0,
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: bool = False,
    val_samples: NonNegativeInt = 256,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 0,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
) -> ImageDataset:
    """Draw images and labels from a seed.

    Args:
        classes: How many classes there are.
        samples: Images to train on and to hold validation samples out from.
        test_samples: Images to test on.
        learnable: Each class has a pattern of its own under the noise; False makes labels that nothing
            predicts.
        seed: Of the images and labels. It is not the run's: arms with other seeds see the same data.
        image_size: Side in pixels; None makes 32.
        channels: 1 or 3; None makes 3.
        augment: Shift training images by up to two pixels.
        val_samples: How many to hold out for validation.
        train_samples: Train on so many only; None trains on all.
        workers: Not used: the images are in memory.
        on_error: As for other data sets; there is nothing to skip.
        normalise: ``standard`` by the mean and deviation of the images, ``symmetric`` to -1 to 1.

    Raises:
        ConfigError: More samples are asked for than there are, or fewer than two classes.
    """
    if classes < 2:
        raise ConfigError(
            f"dataset.classes={classes}: there is nothing to tell apart", "write dataset.classes=2 or more"
        )
    size, depth = image_size or _NATIVE_SIZE, channels or 3
    generator = torch.Generator().manual_seed(mix(seed) >> 1)
    patterns = torch.randn(classes, depth, _CELLS, _CELLS, generator=generator) * _PATTERN
    if not learnable:
        patterns.zero_()
    patterns = F.interpolate(patterns, size=(size, size), mode="nearest") + 127.5
    stored = Stored(
        name="synthetic",
        class_names=tuple(f"class {number}" for number in range(classes)),
        train=_draw(samples, patterns, generator),
        test=_draw(test_samples, patterns, generator),
        mean=(0.5,) * depth,
        std=((_PATTERN**2 + _NOISE**2) ** 0.5 / 255,) * depth,
        augmentation=Augmentation(shift=2, flip=False),
    )
    return in_memory(stored, Choices(size, channels, augment, val_samples, train_samples, workers, on_error, normalise))


def _draw(samples: int, patterns: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, C, H, W]`` and labels int64 ``[N]``."""
    targets = torch.randint(len(patterns), (samples,), generator=generator)
    images = torch.empty((samples, *patterns.shape[1:]), dtype=torch.uint8)
    # A few hundred at a time: as floats, all of them would need four times the memory.
    for some, labels in zip(torch.split(images, 256), torch.split(targets, 256), strict=True):
        noise = torch.randn(some.shape, generator=generator) * _NOISE
        some.copy_((patterns[labels] + noise).round().clamp(0, 255))
    return images, targets
