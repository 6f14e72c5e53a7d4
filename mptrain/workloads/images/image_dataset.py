"""Data sets of labelled images, and those of them that are held in memory: splits, names, and the way to the network's input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import Split
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.base.independent_samples import IndependentSamples
from mptrain.workloads.base.preparation import Preparation, luminance_of
from mptrain.workloads.base.train_val_split import hold_out
from mptrain.workloads.images.augmentation import Shifting

Channels = Literal[1, 3]

Statistic = tuple[float, ...]

#: To mean 0 and standard deviation 1 over the training images, or to the range -1 to 1, which a tanh covers.
Normalise = Literal["standard", "symmetric"]

#: Images uint8 ``[N, C, H, W]`` and class indices int64 ``[N]``.
Samples: TypeAlias = tuple[Tensor, Tensor]

# Of the ImageNet training images; the usual constants of torchvision's reference training, for any photographs.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def photo_statistics(channels: Channels) -> tuple[Statistic, Statistic]:
    """Return the mean and the standard deviation of photographs, or for one channel of their luminance, which decoding to grey gives."""
    return (MEAN, STD) if channels == 3 else ((luminance_of(MEAN),), (luminance_of(STD),))


def statistics(mean: Statistic, std: Statistic, normalise: Normalise) -> tuple[Statistic, Statistic]:
    """Return the ``mean`` and ``std`` of a `Preparation`: those of the images, or a half each for the range -1 to 1."""
    return (mean, std) if normalise == "standard" else ((0.5,) * len(mean), (0.5,) * len(mean))


class ImageDataset:
    """Labelled images; meets `mptrain.workloads.base.dataset.Dataset`.

    Attributes:
        name: As in the configuration.
        class_names: One for each class index; empty where images have no classes.
        preparation: From stored images to the network's input.
        workers: Worker processes that fetch from splits that are not in memory.
        train: Training samples.
        val: Validation samples, or None.
        test: Test samples, or None.
    """

    name: str
    class_names: tuple[str, ...]
    preparation: Preparation
    workers: int
    train: Split
    val: Split | None
    test: Split | None

    def facts(self) -> dict[str, Any]:
        """``in_channels`` and ``image_size`` (side of the square in pixels); where there are two classes, ``num_classes`` and ``class_names``."""
        classes = {"num_classes": len(self.class_names), "class_names": self.class_names}
        prepared = {"in_channels": self.preparation.channels, "image_size": self.preparation.image_size}
        return {**classes, **prepared} if len(self.class_names) > 1 else prepared

    @property
    def lacks(self) -> dict[str, str]:
        """Hints what to do where `facts` does not say what it says of other images, by name."""
        found = f"all in one class folder, {self.class_names[0]}" if self.class_names else "in no class folders"
        hint = f"its images lie {found}: put those of each class into ROOT/train/CLASS; model=dcgan needs no classes"
        return {"num_classes": hint} if len(self.class_names) < 2 else {}

    def card(self) -> dict[str, Any]:
        """Class names, and how stored images become inputs."""
        return {"labels": list(self.class_names), "preparation": self.preparation.card()}

    def describe(self) -> str:
        """Channels, height and width: ``1x8x8``."""
        side = self.preparation.image_size
        return f"{self.preparation.channels}x{side}x{side}"

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device, normalised, resized and with the channels the network takes."""
        return self.preparation.apply(batch, device, memory_format)


@dataclass(kw_only=True, eq=False)
class MemoryDataset(ImageDataset, ABC):
    """Images that are read at once and held in memory; deriving classes say where they come from.

    Attributes:
        image_size: Side in pixels that images are resized to; None keeps their own.
        channels: 3, or 1 for grey; a grey image is repeated, a colour image becomes its luminance. None keeps what they have.
        augment: Vary training images by chance, as ``shifting`` says.
        val_samples: How many of the training images to hold out.
        train_samples: Train on so many only; None trains on all.
        workers: Not used: the images are in memory.
        on_error: What to do about labels outside the classes, and about images that are not finite.
        normalise: ``standard`` by the mean and deviation of the images, ``symmetric`` to -1 to 1.
        mean: Of each channel over the training images, as a fraction of 255.
        std: Standard deviation, likewise.
        shifting: How training images are varied where that is asked for.

    Raises:
        DataError: The files are missing or damaged, or a sample is unusable and ``on_error`` is ``stop``.
        ConfigError: More samples are asked for than there are.
    """

    image_size: PositiveInt | None = None
    channels: Channels | None = None
    augment: bool = False
    val_samples: NonNegativeInt = 5000
    train_samples: PositiveInt | None = None
    workers: NonNegativeInt = 0
    on_error: OnError = "stop"
    normalise: Normalise = "standard"

    mean: Statistic = field(init=False)
    std: Statistic = field(init=False)
    shifting: Shifting = field(init=False)

    @abstractmethod
    @abstractmethod
    def read(self) -> tuple[Samples, Samples]:
        """Return what to train on and to hold validation samples out from, and what to test on."""

    def __post_init__(self) -> None:
        (images, targets), test = self.read()
        # Faults are looked for before dividing, so that a bad sample keeps the index it has in the file.
        pool = self._split("train", images, targets)
        trained, held = hold_out(pool.targets, self.val_samples, self.train_samples)
        self.train = self._split("train", pool.images[trained], pool.targets[trained])
        self.train.shifting = self.shifting if self.augment else None
        self.train.faults = pool.faults
        self.val = self._split("val", pool.images[held], pool.targets[held]) if len(held) else None
        self.test = self._split("test", *test)
        self.preparation = Preparation(
            *statistics(self.mean, self.std, self.normalise),
            image_size=self.image_size or images.shape[-1],
            channels=self.channels or images.shape[1],
        )

    def _split(self, part: str, images: Tensor, targets: Tensor) -> MemorySplit:
        return MemorySplit(f"{self.name} {part}", images, targets, len(self.class_names), self.on_error)


class MemorySplit(IndependentSamples):
    """Images and labels in memory. Unusable samples are found, and left out or refused, when it is made.

    Args:
        name: What to call it in messages, such as ``digits train``.
        images: uint8 or float32 ``[N, C, H, W]``.
        targets: Class indices, int64 ``[N]``.
        classes: How many classes there are.
        on_error: What to do about labels outside of 0 to ``classes`` - 1, and about floating-point images that hold inf or NaN.

    Attributes:
        shifting: How samples are varied at random; None leaves them as they are.

    Raises:
        DataError: A sample is unusable and ``on_error`` is ``stop``, or none is left.
    """

    in_memory = True

    def __init__(self, name: str, images: Tensor, targets: Tensor, classes: int, on_error: OnError = "stop") -> None:
        super().__init__(Faults(on_error))
        problems = {
            position: f"label {int(targets[position])} is outside the classes 0 to {classes - 1}"
            for position in torch.nonzero((targets < 0) | (targets >= classes)).flatten().tolist()
        }
        if images.is_floating_point():
            for position in torch.nonzero(~images.flatten(1).isfinite().all(1)).flatten().tolist():
                problems.setdefault(position, "the image holds NaN or inf")
        self.faults.report({f"{name} sample {position}": reason for position, reason in problems.items()})
        if problems:
            keep = torch.ones(len(targets), dtype=torch.bool)
            keep[list(problems)] = False
            images, targets = images[keep], targets[keep]
        if len(targets) == 0:
            raise DataError(f"{name}: there is no usable sample", "check the data, or choose dataset=digits")
        self.images = images
        self.targets = targets
        self.shifting: Shifting | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The batch of the samples with these indices; see `mptrain.workloads.base.dataset.Split.fetch`."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, picked)  # a tenth of the time of indexing by a tensor
        if self.shifting is not None:
            images = self.shifting.apply(images, indices, epoch, seed)
        return Batch(images, self.targets.index_select(0, picked))
