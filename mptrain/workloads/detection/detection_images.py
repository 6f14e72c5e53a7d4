"""Picture files with boxes, decoded when a batch asks for them. Where the boxes come from is not known here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults, none_usable
from mptrain.workloads.base.independent_samples import IndependentSamples
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.base.random_streams import permutation, uniforms
from mptrain.workloads.base.train_val_split import first_samples
from mptrain.workloads.detection.boxes import (
    CROP_DRAWS,
    Boxes,
    DetectionDataset,
    FitTo,
    detection_batch,
    mirrored,
    random_window,
    resized,
    through_window,
)
from mptrain.workloads.images.image_dataset import Channels, photo_statistics
from mptrain.workloads.images.picture_files import UNDECODABLE, picture_size, read_picture

_FIXED = 20151208  # names the one order of which a few training pictures are the first
_DRAWS = 1 + CROP_DRAWS  # mirroring, and a crop
_LONGEST = 2**31 - 1  # pixels of a side, as annotations may say; no picture has as many

#: Lists of at most so many pictures have the header of each read before the first step: a second or less from a local disk.
HEADERS = 5000


@dataclass(frozen=True)
class AnnotatedImage:
    """The annotation of one picture.

    Attributes:
        path: Its file.
        boxes: Left, upper, right, lower, class and kind of each box, in pixels of the file.
        size: Width and height in pixels; None where the annotation does not say.
    """

    path: str
    boxes: tuple[tuple[float, float, float, float, int, int], ...]
    size: tuple[int, int] | None


def present(pictures: Sequence[AnnotatedImage], folder: Path, faults: Faults) -> list[AnnotatedImage]:
    """The pictures whose files are there, as far as the listings of their folders tell.

    Of at most `HEADERS` pictures the headers are read too: those that are no pictures or do not fit their annotation are
    left out, the others know their size. Of more none is opened.

    Args:
        pictures: Those of one list.
        folder: Where they are said to lie.
        faults: Takes those that are missing or cannot be used.

    Raises:
        DataError: The folder is missing, or a file of it cannot be used and ``faults`` says stop.
    """
    names: dict[str, set[str]] = {}
    missing: set[str] = set()
    for picture in pictures:
        place, name = os.path.split(picture.path)
        if place not in names:
            try:
                names[place] = set(os.listdir(place))  # noqa: PTH208 (a path object for each takes seconds)
            except (OSError, ValueError):
                names[place] = set()
        if name not in names[place]:
            missing.add(picture.path)
    if missing and not folder.is_dir():
        raise DataError(
            f"the folder of the pictures, {folder}, does not exist",
            "set dataset.root to the folder that holds it, or name other parts",
        )
    faults.report(dict.fromkeys(sorted(missing), "there is no such file"), "put it there")
    there = [picture for picture in pictures if picture.path not in missing]
    return _measured(there, faults) if len(there) <= HEADERS else there


def _measured(pictures: Sequence[AnnotatedImage], faults: Faults) -> list[AnnotatedImage]:
    """The pictures with the sizes that their headers say, without those that cannot be used."""
    kept, problems = [], {}
    for picture in pictures:
        try:
            size = picture_size(picture.path)
            corners = torch.tensor([box[:4] for box in picture.boxes], dtype=torch.float64).view(-1, 4)
            _require_fit(corners, picture.size if picture.size and picture.size[0] > 0 else None, size)
        except UNDECODABLE as error:
            problems[picture.path] = f"cannot be used: {error}"
        else:
            kept.append(replace(picture, size=size))
    faults.report(problems)
    return kept


class Listing:
    """Picture files and their boxes, in few large tensors: a million small ones would take gigabytes."""

    def __init__(self, annotated: Iterable[AnnotatedImage]) -> None:
        paths, sizes, counts = [], [], []
        rows: list[tuple[float, float, float, float, int, int]] = []
        for one in annotated:
            paths.append(one.path)
            sizes.append([min(max(side, 0), _LONGEST) for side in one.size or (0, 0)])
            counts.append(len(one.boxes))
            rows += one.boxes
        self.paths = tuple(paths)
        self._sizes = torch.tensor(sizes, dtype=torch.int32).view(-1, 2)
        self._ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
        table = torch.tensor(rows, dtype=torch.float64).view(-1, 6)
        self._corners, self._classes = table[:, :4].float(), table[:, 4:].long()

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def box_count(self) -> int:
        """The count of boxes in all pictures."""
        return len(self._corners)

    @property
    def cut_boxes(self) -> int:
        """The count of boxes that stick out of their pictures by more than a pixel, where the size is known.

        They are cut off at the edge. A pixel or less is how annotations round, and no reason to speak of it.
        """
        counts = self._ends.diff(prepend=self._ends.new_zeros(1))
        sizes = self._sizes.float().repeat_interleave(counts, 0)
        out = (self._corners[:, :2] < -1) | (self._corners[:, 2:] > sizes + 1)
        return int((out.any(1) & (sizes[:, 0] > 0)).sum())

    def boxes(self, index: int) -> Boxes:
        """The boxes of a picture, in pixels of its file."""
        end = int(self._ends[index])
        begin = int(self._ends[index - 1]) if index else 0
        labels, kinds = self._classes[begin:end].unbind(1)
        return Boxes(self._corners[begin:end], labels, kinds)

    def size(self, index: int) -> tuple[int, int] | None:
        """Width and height that the annotation gives, if it does."""
        width, height = self._sizes[index].tolist()
        return (width, height) if width else None


def wrong_boxes(boxes: Tensor, width: int, height: int) -> str | None:
    """Return what is wrong with boxes in a picture of this size: one without an area, or outside; None if nothing is.

    Parts that stick out are no fault; they are cut off.

    Args:
        boxes: Left, upper, right, lower, ``[M, 4]``.
        width: In pixels.
        height: In pixels.
    """
    edge = torch.tensor([width, height], dtype=boxes.dtype)
    inside = torch.minimum(boxes[:, 2:], edge) > boxes[:, :2].clamp(min=0)
    wrong = ~(inside.all(1) & boxes.isfinite().all(1))
    if not wrong.any():
        return None
    number = int(wrong.int().argmax())
    corners = ", ".join(f"{value:g}" for value in boxes[number].tolist())
    return f"box {number + 1} ({corners}) has no area inside the picture of {width}x{height}"


def _require_fit(boxes: Tensor, said: tuple[int, int] | None, size: tuple[int, int]) -> None:
    """Raises ValueError where a picture of this size is not what its annotation says, ``[M, 4]`` boxes included."""
    if said is not None and said != size:
        raise ValueError(f"it has {size[0]}x{size[1]} pixels, but its annotation says {said[0]}x{said[1]}")
    if (wrong := wrong_boxes(boxes, *size)) is not None:
        raise ValueError(wrong)


@dataclass(frozen=True)
class PictureOptions:
    """The options of pictures with boxes; the YAML files explain each.

    Attributes:
        image_size: Side in pixels of the squares that the network sees.
        channels: 3 for RGB, 1 for grey.
        fit: How a picture becomes a square.
        augment: Crop and mirror training pictures at random.
        train_samples: Train on so many only; None trains on all.
        workers: Processes that decode, at most as many as there are cores to use.
    """

    image_size: int
    channels: Channels
    fit: FitTo
    augment: bool
    train_samples: int | None
    workers: int


@dataclass(eq=False)
class PictureSplit(IndependentSamples):
    """Picture files with boxes, decoded on demand to squares of one size.

    Args:
        listing: Files and boxes.
        indices: Which of them belong to this split, int64.
        options: What squares are made of them, at random where ``augment`` says so.
        faults: What to do about files that cannot be used.
    """

    listing: Listing
    indices: Tensor
    options: PictureOptions
    faults: Faults

    in_memory = False

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Decode the pictures with these indices; see `mptrain.workloads.base.dataset.Split.fetch`.

        A picture that cannot be used makes the batch smaller where ``on_error`` is ``skip``.
        """
        draws = uniforms(seed, epoch, indices, _DRAWS).tolist() if self.options.augment else [None] * len(indices)
        images: list[Tensor] = []
        boxes: list[Boxes] = []
        for index, numbers in zip(indices, draws, strict=True):
            place = int(self.indices[index])
            try:
                image, own = self._picture(place, numbers)
            except UNDECODABLE as error:
                self.faults.report({self.listing.paths[place]: f"cannot be used: {error}"})
            else:
                images.append(image)
                boxes.append(own)
        if not images:
            raise none_usable("picture", self.listing.paths[int(self.indices[indices[0]])])
        return detection_batch(torch.stack(images), boxes)

    def _picture(self, place: int, draws: Sequence[float] | None) -> tuple[Tensor, Boxes]:
        """A square picture uint8 ``[C, side, side]`` and its boxes.

        Raises:
            OSError: Or another of `UNDECODABLE`: the file is no picture.
            ValueError: The picture and its annotation do not fit each other.
        """
        from PIL import Image

        side, channels = self.options.image_size, self.options.channels
        picture = read_picture(self.listing.paths[place], channels, self.faults)
        boxes, said = self.listing.boxes(place), self.listing.size(place)
        _require_fit(boxes.corners, said, picture.size)
        window = (0, 0, *picture.size) if draws is None else random_window(*picture.size, boxes, draws[1:])
        width, height = window[2] - window[0], window[3] - window[1]
        across = down = side
        if self.options.fit == "letterbox":
            longer = max(width, height)
            across, down = (max(1, round(edge * side / longer)) for edge in (width, height))
        scale = (across / width, down / height)
        boxes = resized(boxes, width, height, scale) if draws is None else through_window(boxes, window, scale)
        # Resampling inside PIL averages over the area that shrinks into a pixel.
        picture = picture.resize((across, down), Image.Resampling.BILINEAR, box=window)
        if draws is not None and draws[0] < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            boxes = mirrored(boxes, across)
        values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        square = torch.zeros(channels, side, side, dtype=torch.uint8)
        square[:, :down, :across] = values.view(down, across, channels).permute(2, 0, 1)
        return square, boxes


class PictureDataset(DetectionDataset):
    """Picture files with boxes, in the parts ``train`` and, where they are there, ``val`` and ``test``.

    Args:
        name: As in the configuration.
        class_names: One for each class index.
        parts: By name, with what was wrong with other pictures.
        options: The user's.
        empty_boxes: How many boxes without an area were left out.

    Raises:
        DataError: There is no part to train on, or a part has no picture, or not one box.
        ConfigError: More samples are asked for than there are.
    """

    def __init__(
        self,
        name: str,
        class_names: tuple[str, ...],
        parts: dict[str, tuple[Listing, Faults]],
        options: PictureOptions,
        empty_boxes: int = 0,
    ) -> None:
        if "train" not in parts:
            raise DataError(f"{name} has no pictures to train on", "name a part to train on in dataset.train")
        self.name, self.class_names, self.empty_boxes, self.workers = name, class_names, empty_boxes, options.workers
        splits: dict[str, PictureSplit] = {}
        for part, (listing, faults) in parts.items():
            if not listing.box_count:
                raise DataError(
                    f"{name} {part}: none of {len(listing)} pictures has a box", "check the annotations of that part"
                )
            indices, own = torch.arange(len(listing)), options
            if part != "train":
                own = replace(options, augment=False)
            elif options.train_samples is not None:
                indices = first_samples(permutation(len(listing), _FIXED), options.train_samples)
            splits[part] = PictureSplit(listing, indices, own, faults)
            self.cut_boxes += listing.cut_boxes
        self.train, self.val, self.test = splits["train"], splits.get("val"), splits.get("test")
        self.preparation = Preparation(*photo_statistics(options.channels), options.image_size, options.channels)
