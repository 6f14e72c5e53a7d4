"""The default data: 1,797 real handwritten digits of 8x8 pixels that come with scikit-learn.

The UCI "Optical Recognition of Handwritten Digits" test set (Alpaydin and Kaynak, 1998), ``digits.csv.gz``.
It is read directly: importing scikit-learn would cost more time than a short run.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.faulty_samples import OnError
from mptrain.workloads.base.partition import stratified_order
from mptrain.workloads.images.augment import Augmentation
from mptrain.workloads.images.image_dataset import Channels, Choices, ImageDataset, Normalise, Stored, in_memory

TEST_SAMPLES = 397
MEAN = 0.3046  # of the 1,200 default training images, as a fraction of full white
STD = 0.3756


def load_digits(
    *,
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: bool = False,
    val_samples: NonNegativeInt = 200,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 0,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
) -> ImageDataset:
    """Read the digits and divide them, the same in every run.

    A stratified 397 of the 1,797 images are for testing, the other 1,400 for training and validation.

    Raises:
        DataError: scikit-learn is not installed, or its file is damaged.
        ConfigError: More samples are asked for than there are.
    """
    images, targets = read_digits(digits_path())
    order = stratified_order(targets)
    pool, test = order[:-TEST_SAMPLES], order[-TEST_SAMPLES:]
    stored = Stored(
        name="digits",
        class_names=tuple("0123456789"),
        train=(images[pool], targets[pool]),
        test=(images[test], targets[test]),
        mean=(MEAN,),
        std=(STD,),
        augmentation=Augmentation(shift=1, flip=False),
    )
    return in_memory(
        stored, Choices(image_size, channels, augment, val_samples, train_samples, workers, on_error, normalise)
    )


def digits_path() -> Path:
    """Where the installed scikit-learn keeps the file; the package is located, not imported.

    Raises:
        DataError: scikit-learn is not installed or came without the file.
    """
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    where = ", ".join(folders) or "the installed packages"
    raise DataError(f"digits.csv.gz of scikit-learn not found in {where}", "pip install scikit-learn")


def read_digits(path: Path) -> tuple[Tensor, Tensor]:
    """Read rows of 64 grey values 0 to 16 and a label.

    Returns:
        Images uint8 ``[N, 1, 8, 8]``, where grey value v became ``round(v * 255 / 16)``, and labels int64
        ``[N]``.

    Raises:
        DataError: The file is damaged.
    """
    try:
        text = gzip.decompress(path.read_bytes()).decode()
        table = torch.tensor([float(value) for value in text.replace("\n", ",").rstrip(",").split(",")]).view(-1, 65)
    except (OSError, EOFError, zlib.error, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {error}", "reinstall scikit-learn") from error
    grey, labels = table[:, :64], table[:, 64]
    return (grey * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8), labels.long()
