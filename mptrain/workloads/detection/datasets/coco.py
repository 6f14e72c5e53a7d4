"""COCO detection data set (Lin et al. 2014) and data in its format: picture folders, each with a JSON file of boxes."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.system.errors import DataError
from mptrain.system.files import expanded, read_bytes
from mptrain.workloads.base.data_files import NO_DOWNLOAD, Faults
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.detection.boxes import CROWD, OBJECT
from mptrain.workloads.detection.detection_images import (
    AnnotatedImage,
    Listing,
    PictureDataset,
    PictureOptions,
    present,
)


@dataclass(frozen=True, kw_only=True)
class CocoOptions(PictureOptions):
    """Options of the data set ``coco``, besides those of `PictureOptions`; a part that is None is left out."""

    root: Path = Path("data/coco")
    name: str = "coco"
    train: str = "train2017"
    val: str | None = "val2017"
    test: str | None = None


@takes_fields_of(CocoOptions)
def load_coco(options: CocoOptions) -> PictureDataset:
    """Load the COCO detection data set, or other data in its format, as picture files that are decoded on demand.

    The annotations are in ``root/annotations/instances_PART.json``; the pictures are ``root/PART/FILE_NAME``. The
    classes are the categories of the training part, in the order of their ids. Boxes without width or height contain no
    object: they are left out and counted, but their pictures are kept. COCO's train2017 has two.

    Raises:
        DataError: A file is missing or damaged; an image, annotation or category lacks a required member; a category or
            image id or a category name occurs twice; or the parts have different categories.
        ConfigError: There are fewer samples than requested.
    """
    lists = {"train": options.train, "val": options.val, "test": options.test}
    read = {part: read_instances(expanded(options.root), name) for part, name in lists.items() if name}
    categories = read["train"].categories
    parts = {}
    empty_boxes = 0
    for part, instances in read.items():
        if unknown := set(instances.categories) - set(categories):
            raise DataError(
                f"{instances.path} has {len(unknown)} categories that are missing from {read['train'].path}, such as "
                f"{instances.categories[min(unknown)]}",
                "write the same list of categories into both files",
            )
        faults = Faults(options.on_error)
        with _of_this_form(instances.path):
            pictures, empty = instances.pictures(list(categories), faults)
            parts[part] = (Listing(present(pictures, instances.folder, faults)), faults)
        empty_boxes += empty
    return PictureDataset(options.name, tuple(categories.values()), parts, options, empty_boxes)


class Instances:
    """Content of an instances file in COCO's format: the categories, pictures and boxes of one part of a data set.

    ``content`` is the parsed JSON. ``categories`` has the names by id, in the order of the ids.

    Raises:
        KeyError: One of the lists ``images``, ``annotations`` and ``categories`` is missing.
        ValueError: The content has another format, refers to an unknown image, or has an id or category name twice.
    """

    def __init__(self, path: Path, folder: Path, content: Any) -> None:
        self.path = path
        self.folder = folder
        if not isinstance(content, dict):
            raise ValueError("the file is not a JSON object with the lists images, annotations and categories")
        categories = _all_with(content, "categories", "category", ("id", "name"))
        self._images = _all_with(content, "images", "image", ("id", "file_name"))
        annotations = _all_with(content, "annotations", "annotation", ("image_id", "category_id", "bbox"))
        _require_different("categories have the id", [category["id"] for category in categories])
        _require_different("categories have the name", [str(category["name"]) for category in categories])
        _require_different("images have the id", [image["id"] for image in self._images])
        categories.sort(key=lambda category: (isinstance(category["id"], str), category["id"]))
        self.categories: dict[int, str] = {category["id"]: str(category["name"]) for category in categories}
        self._boxes: dict[Any, list[Any]] = {image["id"]: [] for image in self._images}
        for annotation in annotations:
            if annotation["image_id"] not in self._boxes:
                raise ValueError(
                    f"annotation {annotation.get('id')} refers to image {annotation['image_id']}, "
                    "which is not in the list of images"
                )
            self._boxes[annotation["image_id"]].append(annotation)

    def pictures(self, ids: list[int], faults: Faults) -> tuple[list[AnnotatedImage], int]:
        """Return the usable pictures, and the number of their boxes without width or height, which are left out.

        Raises:
            DataError: A picture is unusable and ``faults.on_error`` is ``stop``.
            ValueError: A box or an image size does not consist of numbers.
        """
        numbers = {identity: number for number, identity in enumerate(ids)}
        pictures = []
        empty = 0
        for image in self._images:
            path = str(self.folder / image["file_name"])
            boxes = []
            for box in self._boxes[image["id"]]:
                left, upper, width, height = _bbox(box)
                if box["category_id"] not in numbers:
                    faults.report({path: f"annotation {box.get('id')} has the unknown category {box['category_id']}"})
                    break
                if width == 0 or height == 0:
                    empty += 1
                    continue
                kind = CROWD if box.get("iscrowd") else OBJECT
                boxes.append((left, upper, left + width, upper + height, numbers[box["category_id"]], kind))
            else:
                picture = AnnotatedImage(path, tuple(boxes), _size(image))
                if picture.wrong is None:
                    pictures.append(picture)
                else:
                    faults.report({path: picture.wrong})
        return pictures, empty


def _all_with(content: dict[str, Any], key: str, kind: str, members: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a list of the file; raise KeyError if it is missing, ValueError if an object lacks a valid member."""
    given = content[key]
    if not isinstance(given, list):
        raise ValueError(f"its {key} are not a list")
    for number, record in enumerate(given, start=1):
        if not isinstance(record, dict):
            raise ValueError(f"{kind} number {number} of the list is not an object")
        for member in members:
            wanted = int | str if member.endswith("id") else str if member == "file_name" else object
            if member not in record or not isinstance(record[member], wanted):
                title = (
                    f"{kind} {record['id']!r}"
                    if "id" in record and member != "id"
                    else f"{kind} number {number} of the list"
                )
                what = f"the invalid {member} {_shown(record[member])}" if member in record else f"no {member}"
                raise ValueError(f"{title} has {what}")
    return list(given)


def _bbox(annotation: dict[str, Any]) -> tuple[float, float, float, float]:
    """Return left, upper, width and height; raise ValueError if the bbox is not four numbers."""
    try:
        left, upper, width, height = map(float, annotation["bbox"])
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"annotation {annotation.get('id')!r} has the bbox {_shown(annotation['bbox'])} instead of four numbers "
            "in pixels: left, upper, width, height"
        ) from None
    return left, upper, width, height


def _size(image: dict[str, Any]) -> tuple[int, int] | None:
    """Return width and height, or None if the image lacks them; raise ValueError if they are not numbers."""
    if "width" not in image or "height" not in image:
        return None
    try:
        return int(image["width"]), int(image["height"])
    except (TypeError, ValueError, OverflowError):
        size = f"{_shown(image['width'])} x {_shown(image['height'])}"
        raise ValueError(f"image {image['id']!r} has the size {size} instead of two numbers in pixels") from None


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**50 else "of more than 50 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _require_different(what: str, values: list[Any]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"several {what} {twice[0]!r}")


def read_instances(root: Path, part: str) -> Instances:
    """Read the file ``root/annotations/instances_PART.json`` of one part of a data set, such as ``val2017``.

    Raises:
        DataError: The file is missing or has another format.
    """
    path = root / "annotations" / f"instances_{part}.json"
    try:
        content = json.loads(read_bytes(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            "expected ROOT/annotations/instances_PART.json and ROOT/PART/FILE; set dataset.root=ROOT, "
            f"dataset.train=PART and dataset.val=PART; {NO_DOWNLOAD}, nor does dataset=digit_scenes",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}", "download or write the file again") from error
    with _of_this_form(path):
        return Instances(path, root / part, content)


@contextlib.contextmanager
def _of_this_form(path: Path) -> Iterator[None]:
    """Convert the errors of reading a file of another format to `DataError`."""
    try:
        yield
    except KeyError as error:
        raise DataError(f"{path} lacks {error}", "add the missing member, as in COCO's instances files") from error
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not an instances file: {error}", "write it in the format of COCO") from error
