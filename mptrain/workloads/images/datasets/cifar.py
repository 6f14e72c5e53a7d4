"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour photographs of 32x32 pixels each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from typing_extensions import override

from mptrain.system.files import expanded
from mptrain.workloads.base.data_files import fetching, missing
from mptrain.workloads.images.augmentation import Shifting
from mptrain.workloads.images.image_dataset import MemoryDataset, Samples


@dataclass(kw_only=True, eq=False)
class Cifar(MemoryDataset):
    """CIFAR-10 or CIFAR-100 data set, with 10,000 images for testing; downloaded through torchvision if missing.

    Training images are shifted by up to four pixels and flipped horizontally, unless ``augment`` is off. ``root``
    contains ``cifar-10-batches-py`` or ``cifar-100-python``.
    """

    root: Path = Path("data")
    download: bool = True
    augment: bool = True

    published: ClassVar[str]
    folder: ClassVar[str]
    shifting = Shifting(pixels=4, flip=True)

    @override
    def read(self) -> tuple[Samples, Samples]:
        from torchvision import datasets

        root = expanded(self.root)
        if not self.download and not (root / self.folder).is_dir():
            raise missing(self.published, str(root / self.folder))
        reader = getattr(datasets, self.published)
        with warnings.catch_warnings(), fetching(self.published, root):
            # The published files are pickles of an old NumPy, and NumPy 2.4 and later warn about their format.
            warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
            parts = reader(root, train=True, download=self.download), reader(root, train=False, download=False)
        self.class_names = tuple(parts[0].classes)
        train, test = (
            (
                torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(),
                torch.tensor(part.targets, dtype=torch.int64),
            )
            for part in parts
        )
        return train, test


class Cifar10(Cifar):
    """CIFAR-10 data set, normalised by the mean and standard deviation of its 50,000 training images."""

    name, published, folder = "cifar10", "CIFAR10", "cifar-10-batches-py"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Cifar100(Cifar):
    """CIFAR-100 data set with its 100 fine classes, normalised by the statistics of its 50,000 training images."""

    name, published, folder = "cifar100", "CIFAR100", "cifar-100-python"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


#: Names of the data sets in configurations.
load_cifar10, load_cifar100 = Cifar10, Cifar100
