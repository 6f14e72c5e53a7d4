"""Pascal VOC data set (Everingham et al. 2010) and data in its folders: pictures, their XML annotations, and lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from mptrain.system.errors import ConfigError, DataError, did_you_mean
from mptrain.system.files import expanded, read_bytes, read_text
from mptrain.workloads.base.data_files import NO_DOWNLOAD, Faults, as_stored, composed, fetching
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.detection.boxes import DIFFICULT, OBJECT
from mptrain.workloads.detection.detection_images import (
    AnnotatedImage,
    Listing,
    PictureDataset,
    PictureOptions,
    present,
)

#: The twenty classes of 2007 to 2012.
CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)

_YEARS = {f"VOC{year}" for year in range(2007, 2013)}


@dataclass(frozen=True, kw_only=True)
class VocOptions(PictureOptions):
    """Options of the data set ``voc``, besides those of `PictureOptions`; None means the twenty classes of VOC."""

    root: Path = Path("data")
    name: str = "voc"
    download: bool = True
    train: Sequence[str] = ("VOC2007/train", "VOC2012/trainval")
    val: Sequence[str] = ("VOC2007/val",)
    test: Sequence[str] = ("VOC2007/test",)
    classes: Sequence[str] | None = None


@takes_fields_of(VocOptions)
def load_voc(options: VocOptions) -> PictureDataset:
    """Load Pascal VOC, or other data in its folder structure, as picture files that are decoded on demand.

    The parts are lists of pictures, written ``FOLDER/LIST``. A list is the file ``FOLDER/ImageSets/Main/LIST.txt``. Its
    pictures are ``FOLDER/JPEGImages/NAME.jpg`` (or another extension from the annotation), and their annotations
    ``FOLDER/Annotations/NAME.xml``. A list without a folder is in the root. Coordinates are pixels counted from 1,
    including the last pixel, as VOC defines them. The folders are in ``root`` or in ``root/VOCdevkit``; ``download``
    gets missing ones named VOC2007 to VOC2012 through torchvision. ``on_error`` is for unusable annotations too.

    Raises:
        DataError: A folder, list, annotation or picture is missing, or a list or annotation is damaged.
        ConfigError: There are fewer samples than requested, or two classes have the same name.
    """
    names = CLASSES if options.classes is None else tuple(options.classes)
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"dataset.classes={list(names)} must be one or more unique names", "set dataset.classes=[cat, dog]"
        )
    root = expanded(options.root)
    parts = {}
    for part, lists in {"train": options.train, "val": options.val, "test": options.test}.items():
        if lists:
            faults = Faults(options.on_error)
            pictures = [
                picture for written in lists for picture in read_list(root, written, names, faults, options.download)
            ]
            parts[part] = (Listing(pictures), faults)
    return PictureDataset(options.name, names, parts, options)


def read_list(
    root: Path, written: str, classes: tuple[str, ...], faults: Faults, download: bool
) -> list[AnnotatedImage]:
    """Read one list of pictures in VOC's format, ``FOLDER/LIST`` or ``LIST``, and return those that are usable.

    Raises:
        DataError: The list is missing or empty, or an annotation is unusable and ``faults.on_error`` is ``stop``.
    """
    folder_name, _, list_name = written.rpartition("/")
    folder = _folder(root, folder_name, list_name, download)
    path = folder / "ImageSets" / "Main" / f"{list_name}.txt"
    try:
        # The list of a class has a second column: 1 if the picture shows it, 0 if only difficult objects, else -1.
        lines = [line.split() for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the list {path} cannot be read: {error}", "check dataset.root and the names of the lists"
        ) from error
    if not lines:
        raise DataError(f"the list {path} names no picture", "check dataset.root and the names of the lists")
    numbers = {composed(name): number for number, name in enumerate(classes)}
    pictures = []
    for columns in lines:
        annotation = Path(as_stored(str(folder / "Annotations" / f"{columns[0]}.xml")))
        try:
            pictures.append(read_annotation(annotation, folder / "JPEGImages", numbers))
        except ValueError as error:
            faults.report({str(annotation): str(error)})
    return present(pictures, folder / "JPEGImages", faults)


def _folder(root: Path, name: str, list_name: str, download: bool) -> Path:
    """Return the path of a folder, downloaded if requested, but never into a folder with lists of the user."""
    tried = [root / name, root / "VOCdevkit" / name]
    for folder in tried:
        if (folder / "ImageSets" / "Main" / f"{list_name}.txt").is_file():
            return folder
    if download and name in _YEARS and not _lists_in(root):
        from torchvision.datasets import VOCDetection

        with fetching(f"Pascal {name}", root):
            VOCDetection(root, year=name.removeprefix("VOC"), image_set=list_name, download=True)
        return tried[1]
    asked = f"{name}/{list_name}" if name else list_name
    folders = sorted({path.parents[1] for path in root.glob("*/ImageSets/Main")})
    if own := [*_lists_in(root), *(f"{folder.name}/{own}" for folder in folders for own in _lists_in(folder))]:
        others = f" and {len(own) - 8} others" if len(own) > 8 else ""
        raise DataError(
            f"the list {asked} was not found: {root} has the lists {', '.join(own[:8])}{others}",
            f"write {_overrides(own)}; and 'dataset.classes=[cat, dog]' if the classes are not those of VOC",
        )
    looked = " and ".join(str(folder / "ImageSets" / "Main" / f"{list_name}.txt") for folder in tried)
    raise DataError(
        f"the list {asked} was not found: looked for {looked}",
        "set dataset.root=FOLDER to the folder that contains it, and dataset.train, .val and .test to its lists; "
        f"{NO_DOWNLOAD}, nor does dataset=digit_scenes",
    )


def _lists_in(folder: Path) -> list[str]:
    """Return the sorted names of the lists of a folder in VOC's format; empty for other folders."""
    return sorted(path.stem for path in (folder / "ImageSets" / "Main").glob("[!.]*.txt"))


def _overrides(own: Sequence[str]) -> str:
    """Return command-line overrides that assign the lists to the parts by their names."""
    named = {name.rpartition("/")[2]: name for name in reversed(own)}
    chosen = {
        "train": named.get("train") or named.get("trainval") or own[0],
        "val": named.get("val", ""),
        "test": named.get("test", ""),
    }
    return " ".join(f"'dataset.{part}=[{name}]'" for part, name in chosen.items())


def read_annotation(path: Path, pictures: Path, numbers: dict[str, int]) -> AnnotatedImage:
    """Read the boxes and the size of one picture from its XML file in VOC's format, which has the picture's name.

    Raises:
        ValueError: The file cannot be read, lacks an element, names an unknown class, or has a box without an area
            inside the picture.
    """
    try:
        root = ElementTree.fromstring(read_bytes(path))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (ElementTree.ParseError, LookupError) as error:  # LookupError for an unknown encoding
        raise ValueError(f"is not valid XML: {error}") from error
    boxes = tuple(_box(number, element, numbers) for number, element in enumerate(root.iter("object"), start=1))
    size = None
    if (size_tag := root.find("size")) is not None:
        width, height = int(_number(size_tag, "width")), int(_number(size_tag, "height"))
        size = (width, height) if width > 0 and height > 0 else None
    ending = Path(root.findtext("filename") or "").suffix or ".jpg"
    picture = AnnotatedImage(str(pictures / f"{path.stem}{ending}"), boxes, size)
    if picture.wrong is not None:
        raise ValueError(picture.wrong)
    return picture


def _box(number: int, element: Element, numbers: dict[str, int]) -> tuple[float, float, float, float, int, int]:
    name = composed((element.findtext("name") or "").strip())
    if name not in numbers:
        close = did_you_mean(name, numbers)
        guess = f"; did you mean {close}?" if close else ""
        raise ValueError(f"object {number} has the class '{name}', which is not in dataset.classes{guess}")
    corners = element.find("bndbox")
    if corners is None:
        raise ValueError(f"object {number} has no bndbox")
    left, upper, right, lower = (_number(corners, key) for key in ("xmin", "ymin", "xmax", "ymax"))
    difficult = (element.findtext("difficult") or "0").strip() == "1"
    return (left - 1, upper - 1, right, lower, numbers[name], DIFFICULT if difficult else OBJECT)


def _number(element: Element, key: str) -> float:
    text = element.findtext(key) or ""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{element.tag}: {key} is '{text}', which is not a finite number")
    return number
