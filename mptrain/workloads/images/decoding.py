"""Images in folders, one folder a class or without classes: found when the run starts, decoded when a batch asks for them.

Decoding, cropping and resizing are PIL's, on the host; what comes out is uint8. PIL crops and resizes in one pass, which
is what torchvision's ``resized_crop`` asks of it, but for boxes that begin between two pixels as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.download import NO_DOWNLOAD
from mptrain.workloads.base.faulty_samples import Faults, none_usable
from mptrain.workloads.base.independent import IndependentSamples
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.images.crop import CROP_DRAWS, centre_box, random_box
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, read_part

if TYPE_CHECKING:
    from mptrain.workloads.images.augmentation_policies import Variation
    from mptrain.workloads.images.image_dataset import Channels


#: How pictures are decoded: as they are, or JPEGs no larger than the crop needs.
Decoding = Literal["full", "draft"]


@dataclass(frozen=True)
class Listing:
    """Image files and the class index of each, in the order of their paths."""

    paths: tuple[str, ...]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Tensor) -> Listing:
        """The files with these indices, in this order."""
        return Listing(tuple(self.paths[index] for index in indices.tolist()), self.targets[indices])


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the folders inside a folder, sorted: the classes. None where there are just images.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."))
    except OSError as error:
        raise DataError(
            f"image folder {root} cannot be read: {error.strerror}",
            f"expected {root}/CLASS/IMAGE; set dataset.root=FOLDER; {NO_DOWNLOAD}",
        ) from error


def list_images(root: Path, class_names: tuple[str, ...], faults: Faults) -> Listing:
    """All image files below the class folders of a split, or those in its folder where there are no classes.

    Args:
        root: Folder of the split.
        class_names: The classes of the training split; none gives all images the target 0.
        faults: Takes the images of folders that are not among the classes, and those that lie beside such folders.

    Raises:
        DataError: There are no images, or ``faults`` stops at one that has no class.
    """
    paths: list[str] = []
    targets: list[int] = []
    numbers = {name: number for number, name in enumerate(class_names)}
    if class_names:
        faults.report(dict.fromkeys(loose_images(root), "lies in no class folder"))
    else:
        paths += loose_images(root)
        targets += [0] * len(paths)
    known = f"among the {len(class_names)} classes" if class_names else "a class: the images to train on have none"
    for name in class_folders(root):
        files = _image_files(root / name)
        if name in numbers:
            paths += files
            targets += [numbers[name]] * len(files)
        else:
            faults.report(dict.fromkeys(files, f"its folder '{name}' is not {known}"))
    if not paths:
        raise DataError(f"no images found below {root}", f"known endings: {' '.join(sorted(EXTENSIONS))}")
    return Listing(tuple(paths), torch.tensor(targets, dtype=torch.int64))


def loose_images(folder: Path) -> list[str]:
    """The image files in a folder itself, sorted."""
    return sorted(_images_among(str(folder), next(os.walk(folder), ("", [], []))[2]))


def has_images(folder: Path) -> bool:
    """Whether there is an image file in a folder or below it; looks no further than the first."""
    return any(_images_among(parent, names) for parent, _, names in os.walk(folder))


def _image_files(folder: Path) -> list[str]:
    """The image files in a folder and below it, sorted."""
    return sorted(
        file for parent, _, names in os.walk(folder, followlinks=True) for file in _images_among(parent, names)
    )


def _images_among(parent: str, names: list[str]) -> list[str]:
    # As text: a million path objects take seconds and hundreds of megabytes.
    return [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in EXTENSIONS]


class FolderSplit(IndependentSamples):
    """Image files, decoded on demand to squares of one size.

    Args:
        listing: Files and class indices.
        image_size: Side of the squares in pixels.
        channels: 3 for RGB, 1 for grey.
        varied: Crop and mirror at random, and what else to do then; None cuts out the centre.
        faults: What to do about files that cannot be decoded.
        decoding: ``draft`` decodes large JPEGs at a part of their size.
    """

    in_memory = False

    def __init__(
        self,
        listing: Listing,
        image_size: int,
        channels: Channels,
        varied: Variation | None,
        faults: Faults,
        decoding: Decoding = "full",
    ) -> None:
        super().__init__(faults)
        self.listing = listing
        self.image_size = image_size
        self.channels = channels
        self.varied = varied
        self.decoding: Decoding = decoding

    def __len__(self) -> int:
        return len(self.listing)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Decode the files with these indices; see `mptrain.workloads.base.source.Split.fetch`.

        A file that cannot be decoded makes the batch smaller where ``on_error`` is ``skip``.
        """
        count = _DRAWS + self.varied.draws if self.varied else 0
        draws = uniforms(seed, epoch, indices, count).tolist()
        images: list[Tensor] = []
        targets: list[int] = []
        for index, numbers in zip(indices, draws, strict=True):
            path = self.listing.paths[index]
            try:
                crop = numbers[:_DRAWS] or None
                image = decode(path, self.image_size, self.channels, crop, self.faults, self.decoding)
            except UNDECODABLE as error:
                self.faults.report({path: f"cannot be decoded: {error}"})
            else:
                images.append(self.varied.apply(image, numbers[_DRAWS:]) if self.varied else image)
                targets.append(int(self.listing.targets[index]))
        if not images:
            raise none_usable("image", self.listing.paths[indices[0]])
        return Batch(torch.stack(images), torch.tensor(targets, dtype=torch.int64))


_DRAWS = 1 + CROP_DRAWS  # the first mirrors


def decode(
    path: str,
    image_size: int,
    channels: Channels,
    draws: Sequence[float] | None,
    faults: Faults,
    decoding: Decoding = "full",
) -> Tensor:
    """Read an image file as a square.

    Args:
        path: The file.
        image_size: Side of the square in pixels.
        channels: 3 for RGB, 1 for grey.
        draws: Numbers in [0, 1) that decide on the crop and on mirroring; None cuts out the centre.
        faults: Takes note of what had to be converted.
        decoding: ``draft`` decodes a JPEG at the least part of its size at which the crop still has as many pixels as the square.

    Returns:
        uint8 ``[channels, image_size, image_size]``.
    """
    from PIL import Image

    crop = centre_box if draws is None else partial(random_box, draws=draws[1:])
    picture, box = read_part(path, channels, faults, crop, image_size if decoding == "draft" else None)
    # Resampling inside PIL averages over the area that shrinks into a pixel.
    picture = picture.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)
    if draws is not None and draws[0] < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return values.view(image_size, image_size, channels).permute(2, 0, 1).contiguous()
