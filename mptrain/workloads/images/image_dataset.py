"""Base classes of labelled image data sets, with the images in memory or in files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError, Problem
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import Dataset, IndependentSamples, Survey, class_facts, tensor_digests
from mptrain.workloads.base.preparation import Preparation, luminance_of
from mptrain.workloads.base.splits import hold_out, stratified_order
from mptrain.workloads.images.augmentation import Shifting

Channels = Literal[1, 3]

Statistic = tuple[float, ...]

#: ``standard``: mean 0 and standard deviation 1 over the training images. ``symmetric``: -1 to 1, the range of tanh.
Normalise = Literal["standard", "symmetric"]

#: Images uint8 ``[N, C, H, W]`` and class indices int64 ``[N]``.
Samples: TypeAlias = tuple[Tensor, Tensor]

# Mean and standard deviation of the ImageNet training images, as in torchvision's reference training; for all photos.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def photo_statistics(channels: Channels) -> tuple[Statistic, Statistic]:
    """Return mean and deviation of ImageNet's training images, of RGB or of luminance, as fractions of white."""
    return (MEAN, STD) if channels == 3 else ((luminance_of(MEAN),), (luminance_of(STD),))


def statistics(mean: Statistic, std: Statistic, normalise: Normalise) -> tuple[Statistic, Statistic]:
    """Return mean and deviation to normalise images by: their own, or for ``symmetric`` 0.5 of the full range."""
    return (mean, std) if normalise == "standard" else ((0.5,) * len(mean), (0.5,) * len(mean))


class ImageDataset(Dataset):
    """Base class of image data sets; without classes, ``class_names`` is empty."""

    class_names: tuple[str, ...]
    preparation: Preparation
    inputs = "pictures"

    def facts(self) -> dict[str, Any]:
        """Return ``in_channels``, ``image_size`` and ``input_shape``, and the classes if there are several."""
        classes = class_facts(self.class_names) if len(self.class_names) > 1 else {}
        channels, side = self.preparation.channels, self.preparation.image_size
        return {**classes, "in_channels": channels, "image_size": side, "input_shape": (channels, side, side)}

    @property
    def lacks(self) -> dict[str, Problem]:
        """Reason, with a hint, why the data lacks ``num_classes``, if there are fewer than two classes."""
        arrangement = f"all in one class folder, {self.class_names[0]}" if self.class_names else "not in class folders"
        hint = "put those of each class into ROOT/CLASS; model=dcgan needs no classes"
        problem = Problem(f"the images are {arrangement}, and at least two classes are needed", hint)
        return {"num_classes": problem} if len(self.class_names) < 2 else {}

    def card(self) -> dict[str, Any]:
        """Return the class names as ``labels``, and the ``preparation`` of the network's input, as JSON values."""
        return {"labels": list(self.class_names), "preparation": self.preparation.card()}

    def describe(self) -> str:
        """Return channels, height and width of the network's input for the terminal, such as ``1x8x8``."""
        side = self.preparation.image_size
        return f"{self.preparation.channels}x{side}x{side}"

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Move a host batch to the device as network input, float32 ``[N, channels, image_size, image_size]``."""
        return self.preparation.apply(batch, device, memory_format)


@dataclass(kw_only=True, eq=False)
class MemoryDataset(ImageDataset):
    """Base class of image data sets that are read once and kept in memory; subclasses implement `read`.

    Attributes:
        image_size: Side in pixels to which images are resized; None keeps the stored size.
        channels: 3 for RGB, 1 for grey: a grey image is repeated, a colour image is reduced to its luminance. None
            keeps the stored channels.
        train_samples: Number of images to train on; None for all that are not held out for validation.
        workers: Not used, because the images are in memory.
        on_error: Handling of labels outside the classes and of images with NaN or inf: ``stop`` or ``skip``.
        normalise: ``standard`` by ``mean`` and ``std`` of each channel over the training images, as fractions of 255;
            ``symmetric`` to the range -1 to 1.

    Raises:
        DataError: The files are missing or damaged, or a sample is unusable and ``on_error`` is ``stop``.
        ConfigError: There are fewer samples than requested.
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
    def read(self) -> tuple[Samples, Samples]:
        """Read the samples for training and validation, and those for testing, once when the data set is created."""

    def __post_init__(self) -> None:
        (images, targets), test = self.read()
        # Check for faults before the split, so that messages name the index of a sample in the file.
        pool = self._split("train", images, targets)
        sizes = {"train": self.train_samples, "val": self.val_samples}
        parts = hold_out(stratified_order(pool.targets), sizes, key="samples")
        splits = {part: self._split(part, pool.images[chosen], pool.targets[chosen]) for part, chosen in parts.items()}
        self.train, self.val, self.test = splits["train"], splits.get("val"), self._split("test", *test)
        self.train.shifting = self.shifting if self.augment else None
        self.train.faults = pool.faults
        self.preparation = Preparation(
            *statistics(self.mean, self.std, self.normalise),
            image_size=self.image_size or images.shape[-1],
            channels=self.channels or images.shape[1],
        )

    @override
    def card(self) -> dict[str, Any]:
        """Return also the side in pixels of the stored images, before they are resized on the device."""
        return {**super().card(), "stored_size": self.test.images.shape[-1]}

    def _split(self, part: str, images: Tensor, targets: Tensor) -> MemorySplit:
        return MemorySplit(f"{self.name} {part}", images, targets, len(self.class_names), self.on_error)


class MemorySplit(IndependentSamples):
    """Split of images, uint8 or float32 ``[N, C, H, W]``, in memory, checked for unusable samples when it is created.

    These have a label outside 0 to ``classes`` - 1, or NaN or inf in a floating-point image. ``name`` is that in
    messages, such as ``digits train``; ``shifting`` is the random augmentation, None for none.

    Raises:
        DataError: A sample is unusable and ``on_error`` is ``stop``, or no usable sample is left.
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
                problems.setdefault(position, "the image contains NaN or inf")
        self.faults.report({f"{name} sample {position}": reason for position, reason in problems.items()})
        if problems:
            keep = torch.ones(len(targets), dtype=torch.bool)
            keep[list(problems)] = False
            images, targets = images[keep], targets[keep]
        if len(targets) == 0:
            raise DataError(f"{name}: there is no usable sample", "check the data, or use dataset=digits")
        self.images = images
        self.targets = targets
        self.shifting: Shifting | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def survey(self) -> Survey:
        return Survey(self.targets)

    @override
    def digests(self) -> list[bytes]:
        return tensor_digests(self.images)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return images in their stored dtype and class indices int64 ``[N]``, augmented if ``shifting`` is set."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, picked)  # ten times as fast as indexing by a tensor
        if self.shifting is not None:
            images = self.shifting.apply(images, indices, epoch, seed)
        return Batch(images, self.targets.index_select(0, picked))
