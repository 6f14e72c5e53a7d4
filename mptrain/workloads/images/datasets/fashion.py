"""Fashion-MNIST (Xiao et al., 2017, arXiv 1708.07747): 70,000 grey pictures of clothing, 28x28 pixels.

The four IDX files of torchvision or of Debian's package ``dataset-fashion-mnist`` are read directly, because
torchvision's checksums reject Debian's files, although these contain the same images.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.files import expanded, read_bytes
from mptrain.workloads.base.data_files import fetching, missing
from mptrain.workloads.images.augmentation import Shifting
from mptrain.workloads.images.image_dataset import MemoryDataset, Samples

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_TORCHVISION = Path("FashionMNIST/raw")
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UNSIGNED_BYTE = 8


@dataclass(kw_only=True, eq=False)
class FashionMNIST(MemoryDataset):
    """Fashion-MNIST data set, with 10,000 images for testing; downloaded through torchvision if missing.

    Training images are shifted by up to two pixels and flipped horizontally if ``augment`` is set. The files are in
    ``root/FashionMNIST/raw``, in ``root``, or in Debian's folder.
    """

    root: Path = Path("data")
    download: bool = True

    name = "fashion_mnist"
    class_names = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    mean, std = (0.2860,), (0.3530,)
    shifting = Shifting(pixels=2, flip=True)

    @override
    def read(self) -> tuple[Samples, Samples]:
        root = expanded(self.root)
        paths = find_files(root, DEBIAN)
        if paths is None and self.download:
            with fetching("Fashion-MNIST", root, root / _TORCHVISION):
                from torchvision import datasets

                datasets.FashionMNIST(root, download=True)
            paths = find_files(root, DEBIAN)
        if paths is None:
            places = f"{root / _TORCHVISION} and {DEBIAN}"
            raise missing("Fashion-MNIST", places, "or install Debian's dataset-fashion-mnist")
        train_images, train_labels, test_images, test_labels = (read_idx(path) for path in paths)
        return _pair(train_images, train_labels, paths[0]), _pair(test_images, test_labels, paths[2])


#: Name of the data set in configurations.
load_fashion_mnist = FashionMNIST


def find_files(root: Path, debian: Path) -> list[Path] | None:
    """Return the paths of training images and labels and of test images and labels; None if no folder has all four.

    The first folder with all of them counts: ``FashionMNIST/raw`` in the root, the root, Debian's. Each may be gzipped.
    """
    for folder in (root / _TORCHVISION, root, debian):
        paths = [path for name in _FILES for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        chosen = {path.name.removesuffix(".gz"): path for path in reversed(paths)}
        if len(chosen) == len(_FILES):
            return [chosen[name] for name in _FILES]
    return None


def read_idx(path: Path) -> Tensor:
    """Read an IDX file (the format of MNIST), plain or gzipped, as a uint8 tensor with the shape in the file's header.

    The format is that of *The MNIST database* (LeCun, Cortes, Burges): two zero bytes, a type code (8: unsigned byte),
    the number of dimensions, each dimension as a big-endian 32-bit integer, then the values in row-major order.

    Raises:
        DataError: The file cannot be read, is truncated, or is not an IDX file of unsigned bytes.
    """
    hint = f"remove {path} and download it again"
    try:
        content = read_bytes(path)
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", hint) from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise DataError(f"{path} is not an IDX file of unsigned bytes", hint)
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} is truncated within its header", hint)
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(f"{path} has {len(content) - start} values, but its header says {math.prod(shape)}", hint)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def _pair(images: Tensor, labels: Tensor, path: Path) -> Samples:
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        shapes = f"{list(images.shape)} images and {list(labels.shape)} labels"
        raise DataError(f"{path} does not match its file of labels: {shapes}", "download the files again")
    return images[:, None], labels.long()
