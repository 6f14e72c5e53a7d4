"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour photographs of 32x32 pixels each."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.download import fetching, missing
from mptrain.workloads.base.faulty_samples import OnError
from mptrain.workloads.images.augment import Augmentation
from mptrain.workloads.images.image_dataset import Channels, Choices, ImageDataset, Normalise, Stored, in_memory

# Mean and standard deviation of each channel over the 50,000 training images.
_STATISTICS = {
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_FOLDERS = {"CIFAR10": "cifar-10-batches-py", "CIFAR100": "cifar-100-python"}


def load_cifar10(
    *,
    root: Path = Path("data"),
    download: bool = True,
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: bool = True,
    val_samples: NonNegativeInt = 5000,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 0,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
) -> ImageDataset:
    """Read CIFAR-10, after downloading it where it is not found.

    Args:
        root: Folder that holds ``cifar-10-batches-py``.
        download: Fetch the files through torchvision when they are not there.
        image_size: Side in pixels that images are resized to; None keeps 32.
        channels: 3, or 1 for the luminance; None keeps 3.
        augment: Shift by up to four pixels and mirror, by chance.
        val_samples: How many of the 50,000 training images to hold out.
        train_samples: Train on so many only; None trains on all.
        workers: Not used: the images are in memory.
        on_error: What to do about labels outside the classes.
        normalise: ``standard`` by the mean and deviation of the images, ``symmetric`` to -1 to 1.

    Raises:
        DataError: The files are missing or damaged.
        ConfigError: More samples are asked for than there are.
    """
    choices = Choices(image_size, channels, augment, val_samples, train_samples, workers, on_error, normalise)
    return in_memory(_read("cifar10", "CIFAR10", root, download), choices)


def load_cifar100(
    *,
    root: Path = Path("data"),
    download: bool = True,
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: bool = True,
    val_samples: NonNegativeInt = 5000,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 0,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
) -> ImageDataset:
    """Read CIFAR-100 with its 100 fine classes, after downloading it where it is not found.

    The arguments and errors are those of `load_cifar10`; the folder is ``cifar-100-python``.
    """
    choices = Choices(image_size, channels, augment, val_samples, train_samples, workers, on_error, normalise)
    return in_memory(_read("cifar100", "CIFAR100", root, download), choices)


def _read(name: str, published: str, root: Path, download: bool) -> Stored:
    from torchvision import datasets

    root = root.expanduser()
    folder = root / _FOLDERS[published]
    if not download and not folder.is_dir():
        raise missing(published, str(folder))
    reader = getattr(datasets, published)
    with warnings.catch_warnings(), fetching(published, root):
        # The published files are pickles of an old NumPy, whose form NumPy 2.4 and later warn of.
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
        train = reader(root, train=True, download=download)
        test = reader(root, train=False, download=False)
    mean, std = _STATISTICS[published]
    return Stored(
        name=name,
        class_names=tuple(train.classes),
        train=_pair(train),
        test=_pair(test),
        mean=mean,
        std=std,
        augmentation=Augmentation(shift=4, flip=True),
    )


def _pair(source: Any) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(source.targets, dtype=torch.int64)
