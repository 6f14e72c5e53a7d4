"""Fashion-MNIST (Xiao et al., 2017, arXiv 1708.07747): 70,000 grey pictures of clothing, 28x28 pixels.

Takes the four IDX files where torchvision leaves them or where Debian's ``dataset-fashion-mnist`` installs
them. They are read directly: torchvision's checksums refuse Debian's files, which hold the same images.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.errors import DataError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.download import fetching, missing
from mptrain.workloads.base.faulty_samples import OnError
from mptrain.workloads.images.augment import Augmentation
from mptrain.workloads.images.idx import read_idx
from mptrain.workloads.images.image_dataset import Channels, Choices, ImageDataset, Normalise, Stored, in_memory

if TYPE_CHECKING:
    from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_TORCHVISION = Path("FashionMNIST/raw")
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def load_fashion_mnist(
    *,
    root: Path = Path("data"),
    download: bool = True,
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: bool = False,
    val_samples: NonNegativeInt = 5000,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 0,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
) -> ImageDataset:
    """Read Fashion-MNIST, after downloading it where it is not found.

    Args:
        root: Folder that holds ``FashionMNIST/raw``, or the files themselves.
        download: Fetch the files through torchvision when they are neither under ``root`` nor installed by
            Debian.
        image_size: Side in pixels that images are resized to; None keeps 28.
        channels: 1 or 3 (grey repeated); None keeps 1.
        augment: Shift by up to two pixels and mirror, by chance.
        val_samples: How many of the 60,000 training images to hold out.
        train_samples: Train on so many only; None trains on all.
        workers: Not used: the images are in memory.
        on_error: What to do about labels outside the classes.
        normalise: ``standard`` by the mean and deviation of the images, ``symmetric`` to -1 to 1.

    Raises:
        DataError: The files are missing or damaged.
        ConfigError: More samples are asked for than there are.
    """
    root = root.expanduser()
    paths = find_files(root, DEBIAN)
    if paths is None and download:
        with fetching("Fashion-MNIST", root, root / _TORCHVISION):
            from torchvision.datasets import FashionMNIST

            FashionMNIST(root, download=True)
        paths = find_files(root, DEBIAN)
    if paths is None:
        raise missing(
            "Fashion-MNIST",
            f"{root / _TORCHVISION} and {DEBIAN}",
            "or install Debian's dataset-fashion-mnist",
        )
    train_images, train_labels, test_images, test_labels = (read_idx(path) for path in paths)
    stored = Stored(
        name="fashion_mnist",
        class_names=_CLASSES,
        train=_pair(train_images, train_labels, paths[0]),
        test=_pair(test_images, test_labels, paths[2]),
        mean=(0.2860,),
        std=(0.3530,),
        augmentation=Augmentation(shift=2, flip=True),
    )
    return in_memory(
        stored, Choices(image_size, channels, augment, val_samples, train_samples, workers, on_error, normalise)
    )


def find_files(root: Path, debian: Path) -> list[Path] | None:
    """The four files from the first folder that has them all, plain or gzipped; None where no folder has."""
    for folder in (root / _TORCHVISION, root, debian):
        found = [path for name in _FILES for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        chosen = {path.name.removesuffix(".gz"): path for path in reversed(found)}
        if len(chosen) == len(_FILES):
            return [chosen[name] for name in _FILES]
    return None


def _pair(images: Tensor, labels: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        shapes = f"{list(images.shape)} images and {list(labels.shape)} labels"
        raise DataError(f"{path} and the labels beside it do not fit together: {shapes}", "fetch them again")
    return images[:, None], labels.long()
