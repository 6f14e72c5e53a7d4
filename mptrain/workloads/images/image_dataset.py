"""The data set that all image sources build: splits, names, and the way to the network's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mptrain.workloads.base.partition import hold_out
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.images.images_in_memory import MemorySplit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.faulty_samples import OnError
    from mptrain.workloads.base.source import Split
    from mptrain.workloads.images.augment import Augmentation
    from mptrain.workloads.images.decoding import Decoding

Channels = Literal[1, 3]

Statistic = tuple[float, ...]

#: To mean 0 and standard deviation 1 over the training images, or to the range -1 to 1, which a tanh covers.
Normalise = Literal["standard", "symmetric"]


@dataclass
class ImageDataset:
    """Labelled images; meets `mptrain.workloads.base.source.Dataset`.

    Attributes:
        name: As in the configuration.
        class_names: One for each class index; empty where images have no classes.
        preparation: From stored images to the network's input.
        augment: Whether training samples are varied at random.
        workers: Worker processes that fetch from splits that are not in memory.
        train: Training samples.
        val: Validation samples, or None.
        test: Test samples, or None.
        told: What else there is to tell the person at the terminal, such as ``4 classes``; empty for nothing.
        decode: How much of its files was decoded; see `mptrain.workloads.images.datasets.class_folders.load_image_folder`.
    """

    name: str
    class_names: tuple[str, ...]
    preparation: Preparation
    augment: bool
    workers: int
    train: Split
    val: Split | None
    test: Split | None
    told: str = ""
    decode: Decoding = "full"

    def facts(self) -> dict[str, Any]:
        """``in_channels`` and ``image_size`` (side of the square in pixels); where there are two classes, ``num_classes`` and ``class_names``."""
        prepared = self.preparation
        classes = {"num_classes": len(self.class_names), "class_names": self.class_names}
        return {
            **(classes if len(self.class_names) > 1 else {}),
            "in_channels": prepared.channels,
            "image_size": prepared.image_size,
        }

    @property
    def lacks(self) -> dict[str, str]:
        """What to do where `facts` does not say what it says of other images, by name."""
        found = f"all in one class folder, {self.class_names[0]}" if self.class_names else "in no class folders"
        hint = f"its images lie {found}: put those of each class into ROOT/train/CLASS; model=dcgan needs no classes"
        return {"num_classes": hint} if len(self.class_names) < 2 else {}

    def card(self) -> dict[str, Any]:
        """Class names, how stored images become inputs, and how files were decoded where that was not in full."""
        decode = {} if self.decode == "full" else {"decode": self.decode}
        return {"labels": list(self.class_names), **decode, "preparation": self.preparation.card()}

    def describe(self) -> str:
        """Channels, height and width: ``1x8x8``; of images in folders also their classes: ``3x224x224, 4 classes``."""
        side = self.preparation.image_size
        return f"{self.preparation.channels}x{side}x{side}" + (f", {self.told}" if self.told else "")

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device, normalised, resized and with the channels the network takes."""
        return self.preparation.apply(batch, device, memory_format)


@dataclass(frozen=True)
class Stored:
    """What a reader found: images uint8 ``[N, C, H, W]`` and class indices int64 ``[N]``, training and test.

    Attributes:
        name: As in the configuration.
        class_names: One for each class index.
        train: Images and labels to train on and to hold validation samples out from.
        test: Images and labels to test on.
        mean: Of each channel over the training images, as a fraction of 255.
        std: Standard deviation, likewise.
        augmentation: How training images are varied where that is asked for.
    """

    name: str
    class_names: tuple[str, ...]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation


@dataclass(frozen=True)
class Choices:
    """What a user chooses about any image data set held in memory; the YAML files explain each."""

    image_size: int | None
    channels: Channels | None
    augment: bool
    val_samples: int
    train_samples: int | None
    workers: int
    on_error: OnError
    normalise: Normalise


def statistics(mean: Statistic, std: Statistic, normalise: Normalise) -> tuple[Statistic, Statistic]:
    """The ``mean`` and ``std`` of a `Preparation`: those of the images, or a half each for the range -1 to 1."""
    if normalise == "symmetric":
        mean = std = (0.5,) * len(mean)
    return mean, std


def in_memory(stored: Stored, choices: Choices) -> ImageDataset:
    """Divide what was read into splits and apply the user's choices.

    Raises:
        DataError: A sample is unusable and ``choices.on_error`` is ``stop``.
        ConfigError: More samples are asked for than there are.
    """
    classes = len(stored.class_names)
    images, targets = stored.train
    # Faults are looked for before dividing, so that a bad sample keeps the index it has in the file.
    pool = MemorySplit(f"{stored.name} train", images, targets, classes=classes, on_error=choices.on_error)
    trained, held = hold_out(pool.targets, choices.val_samples, choices.train_samples)

    def part(name: str, indices: Tensor, augmentation: Augmentation | None = None) -> MemorySplit:
        chosen = pool.images[indices], pool.targets[indices]
        return MemorySplit(f"{stored.name} {name}", *chosen, classes=classes, augmentation=augmentation)

    train = part("train", trained, stored.augmentation if choices.augment else None)
    train.faults = pool.faults
    mean, std = statistics(stored.mean, stored.std, choices.normalise)
    return ImageDataset(
        name=stored.name,
        class_names=stored.class_names,
        preparation=Preparation(
            mean=mean,
            std=std,
            image_size=choices.image_size or images.shape[-1],
            channels=choices.channels or images.shape[1],
        ),
        augment=choices.augment,
        workers=choices.workers,
        train=train,
        val=part("val", held) if len(held) else None,
        test=MemorySplit(f"{stored.name} test", *stored.test, classes=classes, on_error=choices.on_error),
    )
