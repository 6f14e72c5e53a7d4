"""Data sets made of image files: class folders, such as ImageNet's, and images without classes.

Files are found when the run starts and decoded when a batch asks for them. Decoding, cropping and resizing are PIL's, on the host; what
comes out is uint8. PIL crops and resizes in one pass, which is what torchvision's ``resized_crop`` asks of it, but for boxes that begin
between two pixels as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mptrain.errors import ConfigError, DataError
from mptrain.fields import Fraction, NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.download import NO_DOWNLOAD
from mptrain.workloads.base.faulty_samples import Faults, OnError, none_usable
from mptrain.workloads.base.independent_samples import IndependentSamples
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.base.train_val_split import first_samples, hold_out, stratified_order
from mptrain.workloads.images.augmentation import CROP_DRAWS, Augment, Variation, centre_box, random_box, variation
from mptrain.workloads.images.image_dataset import Channels, ImageDataset, Normalise, photo_statistics, statistics
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, read_part

#: How pictures are decoded: as they are, or JPEGs no larger than the crop needs.
Decoding = Literal["full", "draft"]

_DRAWS = 1 + CROP_DRAWS  # the first mirrors


@dataclass(kw_only=True, eq=False)
class ClassFolders(ImageDataset):
    """Images in ``root/train/CLASS/``, and in ``root/val`` and ``root/test`` where these exist.

    Where there are no folders but just images, in ``root/train`` or in ``root`` itself, these have no classes: good for drawing
    others like them, and not for a classifier.

    Attributes:
        root: Folder with one folder for each split, or with images.
        image_size: Side in pixels of the squares that the network sees; None makes 224.
        channels: 3 for RGB, 1 for grey; None makes 3.
        augment: Crop and mirror training images at random; ``randaugment`` and ``trivial_augment`` do so and then
            change their pixels by the policy of that name.
        random_erasing: Probability that a rectangle of a training image is replaced by the mean colour.
        val_samples: Hold so many out of ``root/train``; ``root/val`` is then the test split unless there is a
            ``root/test``. None validates on ``root/val``; where there is none, nothing is held out.
        train_samples: Train on so many only; None trains on all.
        workers: Processes that decode, at most as many as there are cores to use.
        on_error: What to do about files that cannot be decoded or are in a folder that is no class.
        normalise: ``standard`` by the means of photographs, ``symmetric`` to -1 to 1.
        decode: ``draft`` decodes a JPEG at a half, a quarter or an eighth of its size where the crop still has ``image_size``
            pixels a side: faster, with slightly other pixels. Other formats, and pictures that are not large, are decoded as by ``full``.

    Raises:
        DataError: A folder is missing, that of a class to train on or of a part is empty, or an image has no class where
            others have one.
        ConfigError: More samples are asked for than there are, or images are to be erased but not varied.
    """

    root: Path
    image_size: PositiveInt | None = None
    channels: Channels | None = None
    augment: Augment = True
    random_erasing: Fraction = 0.0
    val_samples: NonNegativeInt | None = None
    train_samples: PositiveInt | None = None
    workers: NonNegativeInt = 4
    on_error: OnError = "stop"
    normalise: Normalise = "standard"
    decode: Decoding = "full"

    def __post_init__(self) -> None:
        if self.random_erasing > 0 and self.augment is False:
            raise ConfigError(
                f"dataset.random_erasing={self.random_erasing} with dataset.augment=false: training images are left as they are",
                "write dataset.augment=true, or dataset.random_erasing=0",
            )
        side, channels = self.image_size or 224, self.channels or 3
        mean, std = photo_statistics(channels)
        self.preparation = Preparation(*statistics(mean, std, self.normalise), side, channels)
        self.class_names, parts = self._find(self.root.expanduser())
        varied = variation(self.augment, self.random_erasing, tuple(round(255 * value) for value in mean))
        self._splits = {
            part: FolderSplit(listing, side, channels, varied if part == "train" else None, faults, self.decode)
            for part, (listing, faults) in parts.items()
        }
        self.train, self.val, self.test = self._splits["train"], self._splits.get("val"), self._splits.get("test")

    def card(self) -> dict[str, Any]:
        """Class names, how files were decoded where that was not in full, and how pictures become inputs."""
        decode = {} if self.decode == "full" else {"decode": self.decode}
        return {"labels": list(self.class_names), **decode, "preparation": self.preparation.card()}

    def describe(self) -> str:
        """Channels, height and width, and the classes of which a part may have no image: ``3x224x224, 4 classes, val lacks 1 of them``."""
        count = len(self.class_names)
        if not count:
            return f"{super().describe()}, without classes"
        said = f"{super().describe()}, {count:,} class{'es' * (count > 1)}"
        for part in ("train", "val", "test"):
            if part in self._splits and (lacking := count - len(self._splits[part].listing.targets.unique())):
                said += f", {part} lacks {lacking:,} of them"
        return said

    def _find(self, root: Path) -> tuple[tuple[str, ...], dict[str, tuple[Listing, Faults]]]:
        """Return the classes, and the images of each part."""
        train = _training_folder(root, self.name)
        classes = find_classes(train)
        parts: dict[str, tuple[Listing, Faults]] = {}
        for part in ("val", "test"):
            if (root / part).is_dir():
                faults = Faults(self.on_error)
                parts[part] = (list_images(root / part, classes, faults), faults)
        if (
            self.val_samples is not None and "val" in parts
        ):  # what is there to validate on becomes what is there to test on
            held = parts.pop("val")
            parts.setdefault("test", held)
        faults = Faults(self.on_error)
        everything = list_images(train, classes, faults)
        counts = everything.targets.bincount(minlength=len(classes)).tolist()
        empty = [str(train / name) for name, count in zip(classes, counts, strict=False) if not count]
        faults.report(
            dict.fromkeys(empty, "there is no image of this class"),
            f"put images there, or remove the folder; known endings: {' '.join(sorted(EXTENSIONS))}",
            skippable=False,
        )
        if self.val_samples:
            trained, chosen = hold_out(everything.targets, self.val_samples, self.train_samples)
            parts["val"] = (everything.select(chosen), Faults(self.on_error))
        else:
            trained = first_samples(stratified_order(everything.targets), self.train_samples)
        parts["train"] = (everything.select(trained), faults)
        return classes, parts


@dataclass(kw_only=True, eq=False)
class ImageFolder(ClassFolders):
    """Image files of one's own.

    Attributes:
        name: What to call the data set in records.
    """

    root: Path = Path("data/images")
    name: str = "image_folder"


@dataclass(kw_only=True, eq=False)
class ImageNet(ClassFolders):
    """ImageNet (Russakovsky et al., 2015) as ``root/train/WNID/*.JPEG`` and ``root/val/WNID/*.JPEG``.

    The licence allows no automatic download.
    """

    root: Path = Path("data/imagenet")

    name = "imagenet"


#: Their names in configurations.
load_image_folder, load_imagenet = ImageFolder, ImageNet


def _training_folder(root: Path, name: str) -> Path:
    """Return the folder of the images to train on: ``root/train``, or ``root`` where that has just images.

    Raises:
        DataError: There is none.
    """
    train = root / "train"
    if train.is_dir():
        return train
    if not loose_images(root):
        folders = find_classes(root) if root.is_dir() else ()
        if with_images := [folder for folder in folders if has_images(root / folder)]:
            shown = ", ".join(with_images[:3]) + (" and others" if len(with_images) > 3 else "")
            raise DataError(
                f"{root} has folders with images ({shown}), and no folder train above them",
                "expected ROOT/train/CLASS/IMAGE: make the folder ROOT/train and move those to train on into it; "
                "dataset.val_samples=NUMBER then holds some of their images out",
            )
        raise DataError(
            f"{name} not found: looked for {train}",
            "expected ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or without classes ROOT/train/IMAGE or just "
            f"ROOT/IMAGE; set dataset.root=ROOT; {NO_DOWNLOAD}",
        )
    if folders := find_classes(root):
        raise DataError(
            f"{root} has images and folders beside them, such as {folders[0]}: which are to be trained on is not clear",
            "put those into ROOT/train, with or without class folders",
        )
    return root


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


def find_classes(root: Path) -> tuple[str, ...]:
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
    for name in find_classes(root):
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
    """Return whether there is an image file in a folder or below it; looks no further than the first."""
    return any(_images_among(parent, names) for parent, _, names in os.walk(folder))


def _image_files(folder: Path) -> list[str]:
    """The image files in a folder and below it, sorted."""
    return sorted(
        file for parent, _, names in os.walk(folder, followlinks=True) for file in _images_among(parent, names)
    )


def _images_among(parent: str, names: list[str]) -> list[str]:
    # As text: a million path objects take seconds and hundreds of megabytes.
    return [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in EXTENSIONS]


@dataclass(eq=False)
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

    listing: Listing
    image_size: int
    channels: Channels
    varied: Variation | None
    faults: Faults
    decoding: Decoding = "full"

    in_memory = False

    def __len__(self) -> int:
        return len(self.listing)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Decode the files with these indices; see `mptrain.workloads.base.dataset.Split.fetch`.

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
