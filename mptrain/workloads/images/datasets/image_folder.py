"""Data sets of image files: class folders, such as ImageNet's, and images without classes.

Files are listed when the run starts and decoded when a batch needs them. PIL decodes, crops and resizes on the host;
the results are uint8. PIL crops and resizes in one pass, as torchvision's ``resized_crop`` does, and also supports
boxes with fractional coordinates.
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

#: ``full`` decodes at full size; ``draft`` decodes JPEGs only as large as the crop needs.
Decoding = Literal["full", "draft"]

_DRAWS = 1 + CROP_DRAWS  # the first is for the horizontal flip


@dataclass(kw_only=True, eq=False)
class ClassFolders(ImageDataset):
    """Data set of image files in ``root/train/CLASS/``, and in ``root/val`` and ``root/test`` if these exist.

    Images directly in ``root/train`` or ``root``, without class folders, have no classes. They can train a generative
    model but not a classifier.

    Attributes:
        root: Folder with one folder per split, or with images.
        image_size: Side in pixels of the square network inputs; None means 224.
        channels: 3 for RGB, 1 for grey; None means 3.
        augment: Augmentation of training images. True crops and flips them at random; ``randaugment`` and
            ``trivial_augment`` then also apply the policy of that name. False takes the centre crop.
        random_erasing: Probability that a rectangle of a training image is replaced by the mean colour.
        val_samples: Number of images to hold out of ``root/train``; ``root/val`` is then the test split unless there is
            a ``root/test``. None validates on ``root/val``; without it, there is no validation split.
        train_samples: Number of images to train on; None for all.
        workers: Number of decoding processes, limited to the usable cores.
        on_error: Handling of files that cannot be decoded or are in a folder that is not a class: ``stop`` or ``skip``.
        normalise: Normalisation of the network's input: ``standard`` by the statistics of photographs, ``symmetric`` to
            the range -1 to 1.
        decode: Size at which files are decoded. ``draft`` decodes a JPEG at 1/2, 1/4 or 1/8 of its size if the crop
            keeps at least ``image_size`` pixels per side: faster, with slightly different pixels. Other formats, and
            small pictures, are decoded as with ``full``.

    Raises:
        DataError: A folder is missing, the folder of a training class or of a part is empty, or an image has no class
            although others have one.
        ConfigError: There are fewer samples than requested, or ``random_erasing`` is set without ``augment``.
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
                f"dataset.random_erasing={self.random_erasing} with dataset.augment=false: erasing needs augmentation",
                "set dataset.augment=true, or dataset.random_erasing=0",
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
        """Return the information needed to use the trained weights elsewhere, as JSON values.

        The keys are ``labels`` (the class names by index), ``decode`` unless it is ``full``, and ``preparation``, the
        conversion to the network's input.
        """
        decode = {} if self.decode == "full" else {"decode": self.decode}
        return {"labels": list(self.class_names), **decode, "preparation": self.preparation.card()}

    def describe(self) -> str:
        """Return the shape of an image and the number of classes in one line, for the terminal.

        Example:
            ``3x224x224, 4 classes, 1 without images in val``
        """
        count = len(self.class_names)
        if not count:
            return f"{super().describe()}, no classes"
        said = f"{super().describe()}, {count:,} class{'es' * (count > 1)}"
        for part in ("train", "val", "test"):
            if part in self._splits and (lacking := count - len(self._splits[part].listing.targets.unique())):
                said += f", {lacking:,} without images in {part}"
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
        if self.val_samples is not None and "val" in parts:
            # The validation split comes from the training images, so the folder ``val`` becomes the test split.
            held = parts.pop("val")
            parts.setdefault("test", held)
        faults = Faults(self.on_error)
        everything = list_images(train, classes, faults)
        counts = everything.targets.bincount(minlength=len(classes)).tolist()
        empty = [str(train / name) for name, count in zip(classes, counts, strict=False) if not count]
        faults.report(
            dict.fromkeys(empty, "the class has no images"),
            f"put images there, or remove the folder; known extensions: {' '.join(sorted(EXTENSIONS))}",
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
    """Data set of the user's own image files, with or without class folders.

    The other options and the errors are those of `ClassFolders`.

    Attributes:
        name: Name of the data set in records.
    """

    root: Path = Path("data/images")
    name: str = "image_folder"


@dataclass(kw_only=True, eq=False)
class ImageNet(ClassFolders):
    """ImageNet data set (Russakovsky et al., 2015) as ``root/train/WNID/*.JPEG`` and ``root/val/WNID/*.JPEG``.

    The options and the errors are those of `ClassFolders`. The licence does not allow an automatic download.
    """

    root: Path = Path("data/imagenet")

    name = "imagenet"


#: Names of the data sets in configurations.
load_image_folder, load_imagenet = ImageFolder, ImageNet


def _training_folder(root: Path, name: str) -> Path:
    """Return the folder of the training images: ``root/train``, or ``root`` if it contains only images.

    Raises:
        DataError: There is no such folder.
    """
    train = root / "train"
    if train.is_dir():
        return train
    if not loose_images(root):
        folders = find_classes(root) if root.is_dir() else ()
        if with_images := [folder for folder in folders if has_images(root / folder)]:
            shown = ", ".join(with_images[:3]) + (" and others" if len(with_images) > 3 else "")
            raise DataError(
                f"{root} has folders with images ({shown}), but no folder train",
                "expected ROOT/train/CLASS/IMAGE: create the folder ROOT/train and move the training folders into it; "
                "dataset.val_samples=NUMBER then holds out some of their images for validation",
            )
        raise DataError(
            f"{name} not found: looked for {train}",
            "expected ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or for images without classes ROOT/train/IMAGE "
            f"or ROOT/IMAGE; set dataset.root=ROOT; {NO_DOWNLOAD}",
        )
    if folders := find_classes(root):
        raise DataError(
            f"{root} has both images and folders, such as {folders[0]}: it is unclear which are for training",
            "put the training images into ROOT/train, with or without class folders",
        )
    return root


@dataclass(frozen=True)
class Listing:
    """List of a split's image files, with the class index of each.

    Attributes:
        paths: Paths of the files.
        targets: Class indices of the files in the same order, int64 ``[N]``.
    """

    paths: tuple[str, ...]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Tensor) -> Listing:
        """Return a list of the image files with these indices, in this order.

        Args:
            indices: Indices into ``paths``, int64 ``[N]``.
        """
        return Listing(tuple(self.paths[index] for index in indices.tolist()), self.targets[indices])


def find_classes(root: Path) -> tuple[str, ...]:
    """Return the class names of an image folder: the sorted names of its subfolders, without hidden ones.

    The result is empty if there are only images.

    Raises:
        DataError: The folder cannot be read.
    """
    try:
        return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."))
    except OSError as error:
        raise DataError(
            f"image folder {root} cannot be read: {error.strerror}",
            f"expected {root}/CLASS/IMAGE; set dataset.root=FOLDER; {NO_DOWNLOAD}",
        ) from error


def list_images(root: Path, class_names: tuple[str, ...], faults: Faults) -> Listing:
    """List all image files below the class folders of a split, or directly in its folder if there are no classes.

    Args:
        root: Folder of the split.
        class_names: Classes of the training split; if empty, all images get the target 0.
        faults: Record to which images in folders that are not classes, and images outside of class folders, are added.

    Raises:
        DataError: There are no images, or an image has no class and ``faults.on_error`` is ``stop``.
    """
    paths: list[str] = []
    targets: list[int] = []
    numbers = {name: number for number, name in enumerate(class_names)}
    if class_names:
        faults.report(dict.fromkeys(loose_images(root), "is not in a class folder"))
    else:
        paths += loose_images(root)
        targets += [0] * len(paths)
    known = f"one of the {len(class_names)} classes" if class_names else "a class: the training images have none"
    for name in find_classes(root):
        files = _image_files(root / name)
        if name in numbers:
            paths += files
            targets += [numbers[name]] * len(files)
        else:
            faults.report(dict.fromkeys(files, f"its folder '{name}' is not {known}"))
    if not paths:
        raise DataError(f"no images found below {root}", f"known extensions: {' '.join(sorted(EXTENSIONS))}")
    return Listing(tuple(paths), torch.tensor(targets, dtype=torch.int64))


def loose_images(folder: Path) -> list[str]:
    """Return the paths of the image files directly in a folder (not in its subfolders), sorted."""
    return sorted(_images_among(str(folder), next(os.walk(folder), ("", [], []))[2]))


def has_images(folder: Path) -> bool:
    """Return whether a folder contains an image file at any depth; the search stops at the first one."""
    return any(_images_among(parent, names) for parent, _, names in os.walk(folder))


def _image_files(folder: Path) -> list[str]:
    """Return the image files in a folder at any depth, sorted."""
    return sorted(
        file for parent, _, names in os.walk(folder, followlinks=True) for file in _images_among(parent, names)
    )


def _images_among(parent: str, names: list[str]) -> list[str]:
    # Strings, because a million path objects take seconds and hundreds of megabytes.
    return [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in EXTENSIONS]


@dataclass(eq=False)
class FolderSplit(IndependentSamples):
    """Split of image files that are decoded on demand to squares of one size.

    Args:
        listing: Files and class indices.
        image_size: Side of the squares in pixels.
        channels: 3 for RGB, 1 for grey.
        varied: Augmentation after a random crop and flip; None takes the centre crop without augmentation.
        faults: Record of files that cannot be decoded, with the setting that either stops at them or skips them.
        decoding: Size at which files are decoded; ``draft`` decodes large JPEGs at reduced size.
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
        """Decode, crop and augment the image files with these indices and return them as one batch on the host.

        A file that cannot be decoded makes the batch smaller if ``on_error`` is ``skip``. See
        `mptrain.workloads.base.dataset.Split.fetch` for the arguments and errors.

        Returns:
            Images uint8 ``[N, channels, image_size, image_size]`` with class indices int64 ``[N]``.
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
    """Read an image file, crop it, and resize the crop to a square, with antialiasing.

    Args:
        path: Path of the file.
        image_size: Side of the square in pixels.
        channels: 3 for RGB, 1 for grey.
        draws: Random numbers in [0, 1) for the flip (one) and the crop (`CROP_DRAWS`); None takes the centre crop
            without a flip.
        faults: Record to which a remark is added if the file had to be converted.
        decoding: Size at which the file is decoded. ``draft`` decodes a JPEG at the smallest size at which the crop has
            at least as many pixels as the square.

    Returns:
        uint8 ``[channels, image_size, image_size]``.

    Raises:
        OSError: The file cannot be decoded; see `mptrain.workloads.images.picture_files.read_part`.
    """
    from PIL import Image

    crop = centre_box if draws is None else partial(random_box, draws=draws[1:])
    picture, box = read_part(path, channels, faults, crop, image_size if decoding == "draft" else None)
    # PIL antialiases: it averages over the area that becomes one pixel.
    picture = picture.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)
    if draws is not None and draws[0] < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return values.view(image_size, image_size, channels).permute(2, 0, 1).contiguous()
