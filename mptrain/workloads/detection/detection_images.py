"""Data set of picture files with boxes that are decoded on demand, and new pictures in which to find objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults, OnError, composed
from mptrain.workloads.base.dataset import IndependentSamples, Survey
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.base.random_streams import permutation, uniforms
from mptrain.workloads.base.splits import first_samples
from mptrain.workloads.detection.boxes import (
    CROP_DRAWS,
    Boxes,
    DetectionDataset,
    FitTo,
    Window,
    detection_batch,
    mirrored,
    random_window,
    resized,
    survey_of_boxes,
    through_window,
)
from mptrain.workloads.images.image_dataset import Channels, photo_statistics
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, picture_size, pixels_of, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image


_FIXED = 20151208  # seed of the order from which dataset.train_samples takes the first pictures
_DRAWS = 1 + CROP_DRAWS  # horizontal flip, and a crop
_LONGEST = 2**31 - 1  # limit of a side in pixels from an annotation; no picture is that large

#: Largest number of pictures in a list for which all headers are read before the first step. This takes a second or
#: less from a local disk.
HEADERS = 5000


@dataclass(frozen=True)
class AnnotatedImage:
    """Annotation of one picture file: its boxes and its size, the latter None if the annotation does not give it.

    A box is left, upper, right, lower, class and kind; a size is width and height. All are in pixels of the file.
    """

    path: str
    boxes: tuple[tuple[float, float, float, float, int, int], ...]
    size: tuple[int, int] | None

    @property
    def corners(self) -> Tensor:
        """Left, upper, right and lower edge of each box, float64 ``[M, 4]``."""
        return torch.tensor([box[:4] for box in self.boxes], dtype=torch.float64).view(-1, 4)

    @property
    def wrong(self) -> str | None:
        """Description of the first box without area inside the annotated size; None if there is no such box or size."""
        return wrong_boxes(self.corners, *self.size) if self.size is not None else None


def present(pictures: Sequence[AnnotatedImage], folder: Path, faults: Faults) -> list[AnnotatedImage]:
    """Return the annotated pictures whose files exist, according to the listings of their folders.

    For at most `HEADERS` pictures the headers are read too: files that are not pictures or do not match their
    annotation are left out, and the size of the others is filled in. For more pictures no file is opened. ``faults``
    records missing and unusable pictures.

    Raises:
        DataError: The folder is missing, or a picture is unusable and ``faults.on_error`` is ``stop``.
    """
    names: dict[str, dict[str, str]] = {}
    missing: set[str] = set()
    there: list[AnnotatedImage] = []
    for picture in pictures:
        parent, name = os.path.split(picture.path)
        if parent not in names:
            try:
                with os.scandir(parent) as entries:  # says of most what they are without another call
                    files = [
                        file.name
                        for file in entries
                        if file.is_file(follow_symlinks=False) or os.path.isfile(file)  # noqa: PTH113
                    ]
                names[parent] = {**{composed(name): name for name in files}, **{name: name for name in files}}
            except (OSError, ValueError):
                names[parent] = {}
        if (stored := names[parent].get(name, names[parent].get(composed(name)))) is None:
            missing.add(picture.path)
        else:
            there.append(picture if stored == name else replace(picture, path=os.path.join(parent, stored)))  # noqa: PTH118
    if missing and not folder.is_dir():
        raise DataError(
            f"the picture folder {folder} does not exist",
            "set dataset.root=FOLDER to the folder that contains it, or choose other parts",
        )
    faults.report(dict.fromkeys(sorted(missing), "the file does not exist"), "put the file there")
    return _measured(there, faults) if len(there) <= HEADERS else there


def _measured(pictures: Sequence[AnnotatedImage], faults: Faults) -> list[AnnotatedImage]:
    kept, problems = [], {}
    for picture in pictures:
        try:
            size = picture_size(picture.path)
            _require_fit(picture.corners, picture.size if picture.size and picture.size[0] > 0 else None, size)
        except UNDECODABLE as error:
            problems[picture.path] = f"cannot be used: {error}"
        else:
            kept.append(replace(picture, size=size))
    faults.report(problems)
    return kept


class Listing:
    """List of picture files with their boxes, in a few large tensors because a million small ones take gigabytes."""

    def __init__(self, annotated: Iterable[AnnotatedImage]) -> None:
        paths, sizes, counts = [], [], []
        rows: list[tuple[float, float, float, float, int, int]] = []
        for picture in annotated:
            paths.append(picture.path)
            sizes.append([min(max(side, 0), _LONGEST) for side in picture.size or (0, 0)])
            counts.append(len(picture.boxes))
            rows += picture.boxes
        self.paths = tuple(paths)
        self._sizes = torch.tensor(sizes, dtype=torch.int32).view(-1, 2)
        self._ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
        table = torch.tensor(rows, dtype=torch.float64).view(-1, 6)
        self._corners, self._classes = table[:, :4].float(), table[:, 4:].long()

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def box_count(self) -> int:
        """Number of boxes in all pictures of the list."""
        return len(self._corners)

    @property
    def cut_boxes(self) -> int:
        """Number of boxes that exceed pictures of known size by more than a pixel; less is due to rounding."""
        counts = self._ends.diff(prepend=self._ends.new_zeros(1))
        sizes = self._sizes.float().repeat_interleave(counts, 0)
        out = (self._corners[:, :2] < -1) | (self._corners[:, 2:] > sizes + 1)
        return int((out.any(1) & (sizes[:, 0] > 0)).sum())

    def boxes(self, index: int) -> Boxes:
        """Return the boxes of the picture with this index, in pixels of its file."""
        end = int(self._ends[index])
        begin = int(self._ends[index - 1]) if index else 0
        labels, kinds = self._classes[begin:end].unbind(1)
        return Boxes(self._corners[begin:end], labels, kinds)

    def size(self, index: int) -> tuple[int, int] | None:
        """Return the width and height of a picture in pixels by its annotation; None if it does not give them."""
        width, height = self._sizes[index].tolist()
        return (width, height) if width else None


def wrong_boxes(boxes: Tensor, width: int, height: int) -> str | None:
    """Return a description of the first of boxes ``[M, 4]`` without area inside the picture; None if all have one."""
    edge = torch.tensor([width, height], dtype=boxes.dtype)
    inside = torch.minimum(boxes[:, 2:], edge) > boxes[:, :2].clamp(min=0)
    wrong = ~(inside.all(1) & boxes.isfinite().all(1))
    if not wrong.any():
        return None
    number = int(wrong.int().argmax())
    corners = ", ".join(f"{value:g}" for value in boxes[number].tolist())
    return f"box {number + 1} ({corners}) has no area inside the picture of {width}x{height}"


def _require_fit(boxes: Tensor, annotated: tuple[int, int] | None, size: tuple[int, int]) -> None:
    """Raise ValueError if the size of a picture does not match its annotation or its boxes ``[M, 4]``."""
    if annotated is not None and annotated != size:
        raise ValueError(f"it has {size[0]}x{size[1]} pixels, but its annotation says {annotated[0]}x{annotated[1]}")
    if (wrong := wrong_boxes(boxes, *size)) is not None:
        raise ValueError(wrong)


@dataclass(frozen=True)
class PictureOptions:
    """Options shared by the detection data sets of picture files, which the YAML files explain.

    None means 300 pixels, 3 channels and all training pictures. ``on_error`` is for pictures that are missing, cannot
    be decoded, or have boxes outside of the picture.
    """

    image_size: PositiveInt | None = None
    channels: Channels | None = None
    fit: FitTo = "stretch"
    augment: bool = True
    train_samples: PositiveInt | None = None
    workers: NonNegativeInt = 4
    on_error: OnError = "stop"

    @property
    def side(self) -> int:
        """Side of the network's square input in pixels."""
        return self.image_size or 300

    @property
    def depth(self) -> Channels:
        """Number of channels of the network's input."""
        return self.channels or 3


@dataclass(eq=False)
class PictureSplit(IndependentSamples):
    """Split of picture files with boxes, at ``indices`` of a listing, decoded on demand to squares of one size."""

    listing: Listing
    indices: Tensor
    options: PictureOptions
    faults: Faults

    in_memory = False

    def __len__(self) -> int:
        return len(self.indices)

    @override
    def survey(self) -> Survey:
        return survey_of_boxes([self.listing.boxes(index) for index in self.indices.tolist()])

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return decoded pictures, cropped and flipped if ``augment`` is set, with boxes as a `detection_batch`."""
        draws = uniforms(seed, epoch, indices, _DRAWS).tolist() if self.options.augment else [None] * len(indices)
        listed = self.indices[torch.as_tensor(indices)].tolist()

        def read(position: int) -> tuple[Tensor, Boxes]:
            return self._picture(listed[position], draws[position])

        paths = [self.listing.paths[number] for number in listed]
        samples = self.faults.usable("picture", paths, read, UNDECODABLE, "cannot be used: {}".format)
        images, boxes = zip(*samples, strict=True)
        return detection_batch(torch.stack(images), boxes)

    def _picture(self, index: int, draws: Sequence[float] | None) -> tuple[Tensor, Boxes]:
        """Return a square picture uint8 ``[C, side, side]`` and its boxes; raise one of `UNDECODABLE` if unusable."""
        side, channels = self.options.side, self.options.depth
        picture = read_picture(self.listing.paths[index], channels, self.faults)
        boxes, annotated = self.listing.boxes(index), self.listing.size(index)
        _require_fit(boxes.corners, annotated, picture.size)
        window = (0, 0, *picture.size) if draws is None else random_window(*picture.size, boxes, draws[1:])
        flips = draws is not None and draws[0] < 0.5
        square, scale = fitted(picture, side, self.options.fit, window, flips=flips)
        width, height = window[2] - window[0], window[3] - window[1]
        boxes = resized(boxes, width, height, scale) if draws is None else through_window(boxes, window, scale)
        return square, mirrored(boxes, round(width * scale[0])) if flips else boxes


def fitted(
    picture: Image, side: int, fit: FitTo, window: Window, *, flips: bool = False
) -> tuple[Tensor, tuple[float, float]]:
    """Return a window of a picture as a square, uint8 ``[C, side, side]``, and the factors of its width and height.

    With ``letterbox`` the rest of the square is black. A picture is ``RGB`` or ``L``; ``flips`` mirrors it.
    """
    from PIL.Image import Resampling, Transpose

    width, height = window[2] - window[0], window[3] - window[1]
    across = down = side
    if fit == "letterbox":
        longer = max(width, height)
        across, down = (max(1, round(edge * side / longer)) for edge in (width, height))
    # PIL antialiases: it averages over the area that becomes one pixel.
    picture = picture.resize((across, down), Resampling.BILINEAR, box=window)
    pixels = pixels_of(picture.transpose(Transpose.FLIP_LEFT_RIGHT) if flips else picture)
    square = torch.zeros(len(pixels), side, side, dtype=torch.uint8)
    square[:, :down, :across] = pixels
    return square, (across / width, down / height)


class PictureDataset(DetectionDataset):
    """Detection data set of picture files, with the part ``train`` and the optional parts ``val`` and ``test``.

    Raises:
        DataError: There is no training part, or a part has no picture or no box.
        ConfigError: There are fewer samples than requested.
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
            raise DataError(f"{name} has no training pictures", "set dataset.train to the part to train on")
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
        self.preparation = Preparation(*photo_statistics(options.depth), options.side, options.depth, fit=options.fit)


class NewScenes(NewInputs):
    """Picture files as squares, with the factors by which they were resized."""

    suffixes = EXTENSIONS
    unreadable = UNDECODABLE

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, {**facts, "class_names": tuple(map(str, card["labels"]))})
        self.preparation = Preparation.from_card(card["preparation"])

    def read(self, given: str, faults: Faults) -> tuple[Tensor, tuple[float, float]]:
        """Return a picture, uint8 ``[C, side, side]``, and the factors of its width and height."""
        preparation = self.preparation
        picture = read_picture(given, cast("Channels", len(preparation.mean)), faults)
        fit = cast("FitTo", preparation.fit or "stretch")
        return fitted(picture, preparation.image_size, fit, (0, 0, *picture.size))

    def collate(self, samples: Sequence[tuple[Tensor, tuple[float, float]]]) -> Batch:
        """Return pictures, uint8 ``[N, C, side, side]``, and ``scale`` of width and height, float32 ``[N, 2]``."""
        images, scales = zip(*samples, strict=True)
        return Batch(torch.stack(images), torch.zeros(len(images)), extras={"scale": torch.tensor(scales)})

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        return self.preparation.apply(batch, device, memory_format)
