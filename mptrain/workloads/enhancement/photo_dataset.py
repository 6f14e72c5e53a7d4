"""Pairs of bad and good pictures out of photographs; a photo belongs to one split, with everything cut out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.errors import ConfigError, DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.enhancement.degradation import Degradation, Kind
from mptrain.workloads.enhancement.patches import PatchSplit, TileSplit
from mptrain.workloads.enhancement.photo_files import Photos

if TYPE_CHECKING:
    import torch

    from mptrain.workloads.images.image_dataset import Channels

#: Pixels of a tile besides its border; the window of SSIM has 11.
_SMALLEST_TILE = 11


@dataclass
class PhotoDataset:
    """Bad pictures and the good ones that they were made of; meets `mptrain.workloads.base.source.Dataset`.

    Attributes:
        name: As in the configuration.
        degradation: What makes a picture bad.
        channels: 3 for RGB, 1 for grey.
        workers: Worker processes that decode where the photos cannot all be kept.
        train: Random patches.
        val: Tiles to validate on, or None.
        test: Tiles to test on, or None.
    """

    name: str
    degradation: Degradation
    channels: int
    workers: int
    train: PatchSplit
    val: TileSplit | None
    test: TileSplit | None

    def facts(self) -> dict[str, Any]:
        """``in_channels``, and ``upscale``: how many times larger targets are than inputs."""
        return {"in_channels": self.channels, "upscale": self.degradation.upscale}

    def card(self) -> dict[str, Any]:
        """The photos of each split, and how inputs are made of them."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        files = {
            name: [str(Path(path).absolute()) for path in split.photos.paths] for name, split in splits.items() if split
        }
        return {"files": files, "degradation": self.degradation.card(), "divide_by": 255}

    def describe(self) -> str:
        """Channels, height and width of inputs and targets: ``3x24x24 to 3x48x48``."""
        side = self.train.side
        small = side // self.degradation.upscale
        return f"{self.channels}x{small}x{small} to {self.channels}x{side}x{side}"

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Good pictures of 0 to 1 as targets, and as inputs what the degradation makes of them."""
        batch = batch.to(device)
        good = batch.targets.float() / 255
        bad = self.degradation.apply(good, batch.more["words"])
        return Batch(bad.contiguous(memory_format=memory_format), good.contiguous(memory_format=memory_format))


@dataclass(frozen=True)
class Cutting:
    """What a user chooses about any set of photos; the YAML files explain each."""

    degradation: Kind
    factor: int
    sigma: float
    channels: Channels
    patch_size: int
    patches: int
    augment: bool
    tile_size: int
    tiles_per_photo: int | None
    cache_mb: float
    workers: int
    on_error: OnError


def cut_photos(name: str, files: Mapping[str, Sequence[str]], cutting: Cutting) -> PhotoDataset:
    """The data set of photos that were divided into splits.

    Args:
        name: As in the configuration.
        files: ``train``, and ``val`` and ``test`` where there are any.
        cutting: The user's choices.

    Raises:
        DataError: A file cannot be used and ``on_error`` is ``stop``, or none is left.
        ConfigError: Sizes do not go together.
    """
    degradation = Degradation(cutting.degradation, cutting.factor, cutting.sigma)
    upscale = degradation.upscale
    for key, size in (("patch_size", cutting.patch_size), ("tile_size", cutting.tile_size)):
        if size % upscale:
            raise ConfigError(
                f"dataset.{key}={size} is not a multiple of dataset.factor={upscale}",
                f"write dataset.{key}={max(size // upscale, 1) * upscale}",
            )
    smallest = _SMALLEST_TILE + 2 * upscale
    if cutting.tile_size < smallest:
        least = -(-smallest // upscale) * upscale
        raise ConfigError(
            f"dataset.tile_size={cutting.tile_size}: the window of SSIM needs {smallest} pixels with their border",
            f"write dataset.tile_size={least} or more",
        )

    def photos(split: str, side: int, key: str) -> Photos:
        found = Photos(files[split], cutting.channels, side, key, cutting.cache_mb, Faults(cutting.on_error))
        if not len(found):
            hint = f"choose a smaller dataset.{key}, mend the files, or choose dataset=photos"
            raise DataError(f"{name}: no photo of {split} can be used", hint)
        return found

    def tiles(split: str) -> TileSplit | None:
        if not files.get(split):
            return None
        return TileSplit(photos(split, cutting.tile_size, "tile_size"), cutting.tile_size, cutting.tiles_per_photo)

    return PhotoDataset(
        name=name,
        degradation=degradation,
        channels=cutting.channels,
        workers=cutting.workers,
        train=PatchSplit(
            photos("train", cutting.patch_size, "patch_size"),
            cutting.patches,
            cutting.patch_size,
            augment=cutting.augment,
        ),
        val=tiles("val"),
        test=tiles("test"),
    )
