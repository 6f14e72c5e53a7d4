"""Default data set: the 1,797 handwritten digits of 8x8 pixels that come with scikit-learn.

The file ``digits.csv.gz`` is the UCI "Optical Recognition of Handwritten Digits" test set (Alpaydin and Kaynak, 1998).
It is read directly, because importing scikit-learn takes longer than a short run.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt
from mptrain.workloads.base.data_files import package_folders
from mptrain.workloads.base.splits import hold_out, stratified_order
from mptrain.workloads.images.augmentation import Shifting
from mptrain.workloads.images.image_dataset import MemoryDataset, Samples

TEST_SAMPLES = 397
MEAN = 0.3046  # over the 1,200 default training images, as a fraction of white
STD = 0.3756


@dataclass(kw_only=True, eq=False)
class Digits(MemoryDataset):
    """Data set of 1,797 handwritten digits of 8x8 pixels from scikit-learn, split the same way in every run.

    The split, stratified by class, has 397 images for testing and 1,400 for training and validation. Training images
    are shifted by up to one pixel if ``augment`` is set.
    """

    val_samples: NonNegativeInt = 200

    name, class_names = "digits", tuple("0123456789")
    mean, std = (MEAN,), (STD,)
    shifting = Shifting(pixels=1, flip=False)

    @override
    def read(self) -> tuple[Samples, Samples]:
        images, targets = read_digits(digits_path())
        pool, test = hold_out(stratified_order(targets), {"train": None, "test": TEST_SAMPLES}).values()
        return (images[pool], targets[pool]), (images[test], targets[test])


#: Name of the data set in configurations.
load_digits = Digits


def digits_path() -> Path:
    """Return the path of scikit-learn's file of digits, without importing the package; `DataError` if there is none."""
    folders = package_folders("sklearn")
    for folder in folders:
        path = folder / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    where = ", ".join(map(str, folders)) or "the installed packages"
    raise DataError(f"digits.csv.gz of scikit-learn not found in {where}", "pip install scikit-learn")


def read_digits(path: Path) -> tuple[Tensor, Tensor]:
    """Read images uint8 ``[N, 1, 8, 8]`` and labels int64 ``[N]`` of digits from scikit-learn's gzipped CSV file.

    A row has 64 values v from 0 to 16, which become ``round(v * 255 / 16)``, and a label; damage raises `DataError`.
    """
    try:
        rows = gzip.decompress(path.read_bytes()).split()
        numbers = np.loadtxt(rows or [b"no rows"], np.float32, delimiter=",", comments=None)
        table = torch.from_numpy(numbers).view(-1, 65)
    except (OSError, EOFError, zlib.error, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {error}", "reinstall scikit-learn") from error
    grey, labels = table[:, :64], table[:, 64]
    return (grey * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8), labels.long()
