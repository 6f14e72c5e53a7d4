"""Data sets of image files: class folders, such as ImageNet's, and images without classes.

Files are listed when the run starts and decoded when a batch needs them. PIL decodes on the host, and crops and resizes
in one pass, as torchvision's ``resized_crop`` does, but also with fractional boxes; the results are uint8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import ConfigError, Problem
from mptrain.system.fields import BelowOneOrZero, Fraction, NonNegativeInt, PositiveInt
from mptrain.system.files import expanded
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults, OnError, composed
from mptrain.workloads.base.dataset import (
    FileFacts,
    IndependentSamples,
    Survey,
    file_digests,
)
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.preparation import MOST_PIXELS, Preparation
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.base.splits import first_samples, hold_out_by_name, stratified_order
from mptrain.workloads.images.augmentation import (
    CENTRE,
    CROP_DRAWS,
    Augment,
    Variation,
    centre_box,
    random_box,
    variation,
)
from mptrain.workloads.images.image_dataset import Channels, ImageDataset, Normalise, photo_statistics, statistics
from mptrain.workloads.images.picture_files import (
    EXTENSIONS,
    UNDECODABLE,
    Listing,
    Unlisted,
    find_classes,
    find_splits,
    list_images,
    pixels_of,
    read_part,
    read_picture,
)

#: ``full`` decodes at full size; ``draft`` decodes JPEGs only as large as the crop needs.
Decoding = Literal["full", "draft"]

_DRAWS = 1 + CROP_DRAWS  # the first is for the horizontal flip

#: Share of images with classes that is held out for validation if there is no folder for it and no share is set.
HELD_OUT = 0.1


@dataclass(kw_only=True, eq=False)
class ClassFolders(ImageDataset):
    """Images in ``root/CLASS/``; or in ``root/train/CLASS/``, and in ``root/val`` and ``root/test`` if these exist.

    A folder ``train``, ``val`` or ``test`` in the root is a split (see `find_splits`); other folders there are classes
    if there are no splits. Images directly in ``root/train`` or ``root``, without class folders, have no classes. They
    can train a generative model but not a classifier.

    Attributes:
        image_size: Side in pixels of the square network inputs; None means 224.
        channels: 3 for RGB, 1 for grey; None means 3.
        augment: True crops and flips training images at random; ``randaugment`` and ``trivial_augment`` then also apply
            the policy of that name. False takes the centre crop.
        random_erasing: Probability that a rectangle of a training image is replaced by the mean colour.
        val_samples: Number of training images to hold out for validation; ``root/val`` is then the test split unless
            there is a ``root/test``. None validates on ``root/val``.
        val_share: The same as a share of the training images, at least one image. If all three are None, and there is
            no folder for validation or testing, `HELD_OUT` of the images with classes are held out.
        test_share: Share of the training images to hold out for testing if there is no folder for it.
        split_seed: Salt of the hash by which each image is held out or not, of its path below the training folder
            without the extension (`hold_out_by_name`); the seed of the run does not matter.
        train_samples: Number of images to train on; None for all.
        workers: Number of decoding processes, limited to the usable cores.
        on_error: Handling of files that cannot be decoded or are in a folder that is not a class: ``stop`` or ``skip``.
        normalise: ``standard`` by the statistics of photographs, ``symmetric`` to the range -1 to 1.
        decode: ``draft`` decodes a JPEG at 1/2, 1/4 or 1/8 of its size if the crop keeps at least ``image_size`` pixels
            per side: faster, with slightly different pixels. Others are decoded as with ``full``.
        labels: Classes of a run that is evaluated on another folder than its own, which may lack a training folder: a
            folder without splits is then all test images. None takes the class folders.

    Raises:
        DataError: A folder is missing, the folder of a training class or of a part is empty, or an image has no class
            although others have one.
        ConfigError: There are fewer samples than requested, or options contradict each other.
    """

    root: Path
    image_size: PositiveInt | None = None
    channels: Channels | None = None
    augment: Augment = True
    random_erasing: Fraction = 0.0
    val_samples: NonNegativeInt | None = None
    val_share: BelowOneOrZero | None = None
    test_share: BelowOneOrZero | None = None
    split_seed: NonNegativeInt = 0
    train_samples: PositiveInt | None = None
    workers: NonNegativeInt = 4
    on_error: OnError = "stop"
    normalise: Normalise = "standard"
    decode: Decoding = "full"
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if problems := self._contradictions():
            raise ConfigError(problems)
        side, channels = self.image_size or 224, self.channels or 3
        mean, std = photo_statistics(channels)
        self.preparation = Preparation(
            *statistics(mean, std, self.normalise), side, channels, fit="crop", centre=CENTRE
        )
        self._by_default, unlisted = False, Unlisted()
        self.class_names, parts = self._find(expanded(self.root), unlisted)
        self.warnings, self._other_files = unlisted.sentences(), dict(unlisted.extensions)
        varied = variation(self.augment, self.random_erasing, tuple(round(255 * value) for value in mean))
        self._splits = {
            part: FolderSplit(listing, self.preparation, varied if part == "train" else None, faults, self.decode)
            for part, (listing, faults) in parts.items()
        }
        self.val, self.test = self._splits.get("val"), self._splits.get("test")
        self.train = self._splits.get("train") or next(iter(self._splits.values()))  # to build an evaluation

    @override
    def card(self) -> dict[str, Any]:
        """Return also ``decode`` unless it is ``full``, and numbers of files that are not pictures, by extension."""
        more = {} if self.decode == "full" else {"decode": self.decode}
        others = {"other_files": self._other_files} if self._other_files else {}
        return {"labels": list(self.class_names), **more, **others, "preparation": self.preparation.card()}

    @override
    def describe(self) -> str:
        """Return a line such as ``3x224x224, 4 classes, 1 without images in val``."""
        count = len(self.class_names)
        if not count:
            return f"{super().describe()}, no classes"
        description = f"{super().describe()}, {count:,} class{'es' * (count > 1)}"
        for part in ("train", "val", "test"):
            if part in self._splits and (lacking := count - len(self._splits[part].listing.targets.unique())):
                description += f", {lacking:,} without images in {part}"
        if self._by_default:
            description += f"; {len(self.val or ()):,} images held out for val by default (dataset.val_share)"
        return description

    def _contradictions(self) -> list[Problem]:
        problems = []
        if self.random_erasing > 0 and self.augment is False:
            what = f"dataset.random_erasing={self.random_erasing} with dataset.augment=false: it needs augmentation"
            problems.append(Problem(what, "set dataset.augment=true, or dataset.random_erasing=0"))
        if self.val_samples is not None and self.val_share is not None:
            what = f"dataset.val_samples={self.val_samples} contradicts dataset.val_share={self.val_share}"
            problems.append(Problem(what, "set one of them"))
        if (self.val_share or 0) + (self.test_share or 0) >= 1:
            what = f"dataset.val_share={self.val_share} and test_share={self.test_share} leave nothing to train on"
            problems.append(Problem(what, "choose smaller shares"))
        return problems

    def _find(self, root: Path, unlisted: Unlisted) -> tuple[tuple[str, ...], dict[str, tuple[Listing, Faults]]]:
        folders = find_splits(root, self.name, unlisted, trains=self.labels is None)
        train = folders.pop("train", root)
        if self.labels is not None:
            folders = folders or {"test": train}
            return self.labels, {part: self._listed(folder, self.labels, unlisted) for part, folder in folders.items()}
        classes = tuple(dict.fromkeys(map(composed, find_classes(train))))
        unset = self.val_samples is self.val_share is self.test_share is None
        self._by_default = bool(classes) and not folders and unset
        if (self.val_samples is not None or self.val_share is not None) and "val" in folders:
            # The validation split comes from the training images, so the folder ``val`` becomes the test split.
            held = folders.pop("val")
            if folders.setdefault("test", held) != held:
                unlisted.folders[str(held)] = "the validation images are held out of those for training"
        if self.test_share and "test" in folders:
            raise ConfigError(
                f"dataset.test_share={self.test_share}, but the test images are those in {folders['test']}",
                "remove dataset.test_share, or move the folder away",
            )
        parts = {part: self._listed(folder, classes, unlisted) for part, folder in folders.items()}
        everything, faults = self._listed(train, classes, unlisted)
        counts = everything.targets.bincount(minlength=len(classes)).tolist()
        empty = [str(train / name) for name, count in zip(classes, counts, strict=False) if not count]
        faults.report(
            dict.fromkeys(empty, "the class has no images"),
            f"put images there, or remove the folder; known extensions: {' '.join(sorted(EXTENSIONS))}",
            skippable=False,
        )
        for part, listing in self._divided(everything, train).items():
            if len(listing):
                parts[part] = (listing, faults if part == "train" else Faults(self.on_error))
        return classes, parts

    def _listed(self, folder: Path, classes: tuple[str, ...], unlisted: Unlisted) -> tuple[Listing, Faults]:
        faults = Faults(self.on_error)
        return list_images(folder, classes, faults, unlisted), faults

    def _divided(self, listing: Listing, folder: Path) -> dict[str, Listing]:
        val = HELD_OUT if self._by_default else self.val_samples or self.val_share or 0
        test = self.test_share or 0.0
        if val >= len(listing) * (1 - test):
            raise ConfigError(
                f"dataset.val_samples={val} would hold out all {len(listing)} training samples",
                f"set dataset.val_samples to at most {max(0, int(len(listing) * (1 - test)) - 1)}",
            )
        start = len(str(folder / "x")) - 1
        names = [composed(path[start:]).rpartition(".")[0] for path in listing.paths]
        train, *held = hold_out_by_name(names, listing.targets, val, test, self.split_seed)
        wanted = {"dataset.val_share": (self.val_share, held[0]), "dataset.test_share": (self.test_share, held[1])}
        for key, (share, indices) in wanted.items():
            if share and not len(indices):
                what = (
                    f"{key}={share} holds out none of {len(listing)} images, because each class keeps one to train on"
                )
                raise ConfigError(what, f"add images, or leave {key} out")
        train = train[first_samples(stratified_order(listing.targets[train], self.split_seed), self.train_samples)]
        chosen = {"train": train, "val": held[0], "test": held[1]}
        return {part: listing.select(indices) for part, indices in chosen.items()}


@dataclass(kw_only=True, eq=False)
class ImageFolder(ClassFolders):
    """Data set of the user's own image files, with or without class folders."""

    root: Path = Path("data/images")
    name: str = "image_folder"


@dataclass(kw_only=True, eq=False)
class ImageNet(ClassFolders):
    """ImageNet (Russakovsky et al. 2015): ``root/{train,val}/WNID/*.JPEG``; its licence forbids automatic downloads."""

    root: Path = Path("data/imagenet")

    name = "imagenet"


#: Names of the data sets in configurations.
load_image_folder, load_imagenet = ImageFolder, ImageNet


@dataclass(eq=False)
class FolderSplit(IndependentSamples):
    """Split of image files decoded on demand to squares: the centre crop, or a random one, flipped and ``varied``."""

    listing: Listing
    preparation: Preparation
    varied: Variation | None
    faults: Faults
    decoding: Decoding = "full"

    in_memory = False

    @property
    def channels(self) -> Channels:
        """3 for RGB squares, 1 for grey ones."""
        return cast("Channels", self.preparation.channels)

    def __len__(self) -> int:
        return len(self.listing)

    @override
    def digests(self) -> list[bytes]:
        return file_digests(self.listing.paths)

    @override
    def survey(self) -> Survey:
        return Survey(self.listing.targets)

    @override
    def read(self, number: int) -> FileFacts | None:
        """Decode one file at full size; record it in ``faults`` if it is unusable, and return its facts otherwise."""
        path = self.listing.paths[number]
        try:
            picture = read_picture(path, self.channels, self.faults)
        except UNDECODABLE as error:
            self.faults.report({path: f"cannot be decoded: {error}"})
            return None
        content = hashlib.blake2b(repr(picture.size).encode() + picture.tobytes(), digest_size=16)
        return FileFacts(path, int(self.listing.targets[number]), picture.size, content.digest())

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return decoded images uint8 ``[N, channels, image_size, image_size]`` with class indices int64 ``[N]``."""
        count = _DRAWS + self.varied.draws if self.varied else 0
        draws = uniforms(seed, epoch, indices, count).tolist()
        paths = [self.listing.paths[index] for index in indices]

        def read(position: int) -> tuple[Tensor, Tensor]:
            side, centre, crop = self.preparation.image_size, self.preparation.centre, draws[position][:_DRAWS] or None
            image = decode(paths[position], side, self.channels, crop, self.faults, self.decoding, centre)
            image = self.varied.apply(image, draws[position][_DRAWS:]) if self.varied else image
            return image, self.listing.targets[indices[position]]

        samples = self.faults.usable("image", paths, read, UNDECODABLE, "cannot be decoded: {}".format)
        images, targets = map(torch.stack, zip(*samples, strict=True))
        return Batch(images, targets)


def decode(
    path: str,
    image_size: int,
    channels: Channels,
    draws: Sequence[float] | None,
    faults: Faults,
    decoding: Decoding = "full",
    centre: float = CENTRE,
) -> Tensor:
    """Read an image file, crop it, and resize the crop, antialiased, to uint8 ``[channels, image_size, image_size]``.

    ``draws`` are random numbers in [0, 1) for the flip (one) and the crop (`CROP_DRAWS`); None takes the centre crop
    without a flip, whose side is a share ``centre`` of the shorter side. ``draft`` decodes a JPEG at the smallest size
    at which the crop has at least as many pixels as the square. ``faults`` gets a remark on a conversion. The errors
    are those of `read_part`.
    """
    from PIL import Image

    crop = partial(centre_box, centre=centre) if draws is None else partial(random_box, draws=draws[1:])
    picture, box = read_part(path, channels, faults, crop, image_size if decoding == "draft" else None)
    # PIL antialiases: it averages over the area that becomes one pixel.
    picture = picture.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)
    if draws is not None and draws[0] < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return pixels_of(picture)


class NewPictures(NewInputs):
    """Picture files as squares of the size in which the run's data set stores its images."""

    suffixes = EXTENSIONS
    unreadable = UNDECODABLE

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, {**facts, "class_names": tuple(map(str, card["labels"]))})
        self.preparation = Preparation.from_card(card["preparation"])
        self._side = int(card.get("stored_size", self.preparation.image_size))
        self._decoding = card.get("decode", "full")
        if not 0 < self._side <= MOST_PIXELS or self._decoding not in get_args(Decoding):
            raise ValueError(f"pictures are decoded to {self._side} pixels, {self._decoding}")

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return a picture, uint8 ``[C, side, side]``, with as many channels as the run's stored images."""
        preparation = self.preparation
        channels = cast("Channels", len(preparation.mean))
        return decode(given, self._side, channels, None, faults, self._decoding, preparation.centre)

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return pictures, ``[N, C, side, side]``, in the range of the run's stored images."""
        images, white = torch.stack(list(samples)), self.preparation.full_range
        return Batch(
            images if white == 255.0 else images * (white / 255.0), torch.zeros(len(images), dtype=torch.int64)
        )

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        return self.preparation.apply(batch, device, memory_format)
