"""COCO (Lin et al. 2014), and data of one's own in its form: folders of pictures and one JSON file of instances for each."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mptrain.errors import DataError
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.download import NO_DOWNLOAD
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.detection.boxes import CROWD, OBJECT, FitTo
from mptrain.workloads.detection.detection_images import (
    AnnotatedImage,
    Listing,
    PictureDataset,
    PictureOptions,
    present,
    wrong_boxes,
)
from mptrain.workloads.images.image_dataset import Channels


def load_coco(
    *,
    root: Path = Path("data/coco"),
    name: str = "coco",
    train: str = "train2017",
    val: str | None = "val2017",
    test: str | None = None,
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    fit: FitTo = "stretch",
    augment: bool = True,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 4,
    on_error: OnError = "stop",
) -> PictureDataset:
    """Read ``root/annotations/instances_PART.json``; the pictures are ``root/PART/FILE_NAME``.

    The classes are the categories of the training part, in the order of their ids. Boxes without width or height mark nothing:
    they are left out and counted, and their pictures kept. COCO's train2017 has two.

    Args:
        root: Folder that holds the folders of pictures, and ``annotations``.
        name: What to call the data set in records.
        train: Part to train on.
        val: Part for validation; None for none.
        test: Part to test on; None for none.
        image_size: Side in pixels of the squares that the network sees; None makes 300.
        channels: 3 for RGB, 1 for grey; None makes 3.
        fit: How a picture becomes a square.
        augment: Crop and mirror training pictures at random.
        train_samples: Train on so many only; None trains on all.
        workers: Processes that decode, at most as many as there are cores to use.
        on_error: What to do about pictures that are missing, cannot be decoded, or have boxes outside of them.

    Raises:
        DataError: A file is missing or damaged, lacks something that an image, annotation or category must have, names a
            category or numbers an image twice, or the parts have different categories.
        ConfigError: More samples are asked for than there are.
    """
    root = root.expanduser()
    read = {
        part: read_instances(root, written)
        for part, written in {"train": train, "val": val, "test": test}.items()
        if written
    }
    categories = read["train"].categories
    parts = {}
    empty_boxes = 0
    for part, found in read.items():
        if unknown := set(found.categories) - set(categories):
            raise DataError(
                f"{found.path} has {len(unknown)} categories that {read['train'].path} has not, such as "
                f"{found.categories[min(unknown)]}",
                "write one list of categories into both files",
            )
        faults = Faults(on_error)
        with _of_this_form(found.path):
            pictures, empty = found.pictures(list(categories), faults)
            parts[part] = (Listing(present(pictures, found.folder, faults)), faults)
        empty_boxes += empty
    options = PictureOptions(image_size or 300, channels or 3, fit, augment, train_samples, workers)
    return PictureDataset(name, tuple(categories.values()), parts, options, empty_boxes)


class Instances:
    """The content of a file of instances.

    Attributes:
        path: The file.
        folder: Where its pictures are.
        categories: Names by id, in the order of the ids.
    """

    def __init__(self, path: Path, folder: Path, content: Any) -> None:
        self.path = path
        self.folder = folder
        if not isinstance(content, dict):
            raise ValueError("it holds no object with images, annotations and categories")
        categories = _all_with(content, "categories", "category", ("id", "name"))
        self._images = _all_with(content, "images", "image", ("id", "file_name"))
        annotations = _all_with(content, "annotations", "annotation", ("image_id", "category_id", "bbox"))
        _require_different("categories have the id", [one["id"] for one in categories])
        _require_different("categories have the name", [str(one["name"]) for one in categories])
        _require_different("images have the id", [one["id"] for one in self._images])
        categories.sort(key=lambda one: (isinstance(one["id"], str), one["id"]))
        self.categories: dict[int, str] = {one["id"]: str(one["name"]) for one in categories}
        self._boxes: dict[Any, list[Any]] = {one["id"]: [] for one in self._images}
        for one in annotations:
            if one["image_id"] not in self._boxes:
                raise ValueError(
                    f"annotation {one.get('id')} is of image {one['image_id']}, which is not among the images"
                )
            self._boxes[one["image_id"]].append(one)

    def pictures(self, ids: list[int], faults: Faults) -> tuple[list[AnnotatedImage], int]:
        """The pictures and their boxes, those that cannot be used left out.

        Args:
            ids: Category ids in the order of the classes.
            faults: Takes pictures that cannot be used.

        Returns:
            The pictures, and how many boxes without width or height were left out.
        """
        numbers = {identity: number for number, identity in enumerate(ids)}
        found = []
        empty = 0
        for image in self._images:
            path = str(self.folder / image["file_name"])
            boxes = []
            for one in self._boxes[image["id"]]:
                left, upper, width, height = _bbox(one)
                if one["category_id"] not in numbers:
                    faults.report({path: f"annotation {one.get('id')} has the unknown category {one['category_id']}"})
                    break
                if width == 0 or height == 0:
                    empty += 1
                    continue
                kind = CROWD if one.get("iscrowd") else OBJECT
                boxes.append((left, upper, left + width, upper + height, numbers[one["category_id"]], kind))
            else:
                size = _size(image)
                corners = torch.tensor([box[:4] for box in boxes], dtype=torch.float64).view(-1, 4)
                wrong = wrong_boxes(corners, *size) if size is not None else None
                if wrong is None:
                    found.append(AnnotatedImage(path, tuple(boxes), size))
                else:
                    faults.report({path: wrong})
        return found, empty


def _all_with(content: dict[str, Any], key: str, kind: str, members: tuple[str, ...]) -> list[dict[str, Any]]:
    """The images, annotations or categories of a file, each of which has to have some members.

    Raises:
        KeyError: The file has none such.
        ValueError: They are no list of objects; or one lacks a member, or its ids and file name cannot be such.
    """
    given = content[key]
    if not isinstance(given, list):
        raise ValueError(f"its {key} are no list")
    for number, one in enumerate(given, start=1):
        if not isinstance(one, dict):
            raise ValueError(f"{kind} number {number} of the list is no object")
        for member in members:
            wanted = int | str if member.endswith("id") else str if member == "file_name" else object
            if member not in one or not isinstance(one[member], wanted):
                title = (
                    f"{kind} {one['id']!r}" if "id" in one and member != "id" else f"{kind} number {number} of the list"
                )
                what = f"the {member} {_shown(one[member])}, which is none" if member in one else f"no {member}"
                raise ValueError(f"{title} has {what}")
    return list(given)


def _bbox(annotation: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, upper, width and height. Raises ValueError where an annotation has something else."""
    try:
        left, upper, width, height = map(float, annotation["bbox"])
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"annotation {annotation.get('id')!r} has the bbox {_shown(annotation['bbox'])}, and not four numbers of pixels: "
            "left, upper, width, height"
        ) from None
    return left, upper, width, height


def _size(image: dict[str, Any]) -> tuple[int, int] | None:
    """Width and height, or None where an image does not say. Raises ValueError where these are no whole numbers."""
    if "width" not in image or "height" not in image:
        return None
    try:
        return int(image["width"]), int(image["height"])
    except (TypeError, ValueError, OverflowError):
        said = f"{_shown(image['width'])} x {_shown(image['height'])}"
        raise ValueError(f"image {image['id']!r} has the size {said}, and not two numbers of pixels") from None


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**50 else "of more than 50 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _require_different(what: str, values: list[Any]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"several {what} {twice[0]!r}")


def read_instances(root: Path, part: str) -> Instances:
    """Read the file of one part.

    Raises:
        DataError: It is missing, or has another form.
    """
    path = root / "annotations" / f"instances_{part}.json"
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            "expected ROOT/annotations/instances_PART.json and ROOT/PART/FILE; set dataset.root=ROOT, dataset.train=PART "
            f"and dataset.val=PART; {NO_DOWNLOAD}, and dataset=digit_scenes neither",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}", "fetch or write it again") from error
    with _of_this_form(path):
        return Instances(path, root / part, content)


@contextlib.contextmanager
def _of_this_form(path: Path) -> Iterator[None]:
    """Turns what reading another form of file fails with into a `DataError`."""
    try:
        yield
    except KeyError as error:
        raise DataError(f"{path} lacks {error}", "it must have what COCO's files of instances have") from error
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is no file of instances: {error}", "write it as COCO's are written") from error
