"""Picture files: their listing in folders of splits and classes, and their reader as 8-bit RGB or grey.

16-bit values are reduced to their high byte, as Pillow does for 16-bit RGB. As in torchvision's ``ImageFolder``,
transparency is dropped, only the first of several frames is used, and the EXIF orientation is ignored (but for a TIFF,
which Pillow turns).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mptrain.system.errors import DataError
from mptrain.system.files import open_to_read
from mptrain.workloads.base.data_files import NO_DOWNLOAD, Faults, composed, is_hidden, walk

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from mptrain.workloads.images.augmentation import Box
    from mptrain.workloads.images.image_dataset import Channels


#: Extensions of picture files, with Pillow's names of their formats.
_FORMATS = {
    ".bmp": ("BMP", "DIB"),
    ".gif": ("GIF",),
    ".png": ("PNG",),
    ".webp": ("WEBP",),
    **dict.fromkeys((".jpeg", ".jpg"), ("JPEG", "MPO")),
    **dict.fromkeys((".pgm", ".ppm"), ("PPM",)),
    **dict.fromkeys((".tif", ".tiff"), ("TIFF",)),
}
EXTENSIONS = frozenset(_FORMATS)

#: All formats that are read, whatever the name of the file. Others, such as PostScript, would start programs.
_READ = sorted({name for formats in _FORMATS.values() for name in formats} - {"MPO"})  # which the reader of JPEG reads

#: Pillow's exceptions for files that are empty, truncated, of another format, or of far too many pixels.
UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error)

#: Formats with frames or pages. JPEG is not one of them, because its second picture is a preview.
_WITH_FRAMES = ("GIF", "PNG", "TIFF", "WEBP")

#: Modes of 8 bits or 1 bit that convert to RGB without loss.
_PLAIN = ("RGB", "L", "1")
_OFTEN = (*_PLAIN, "RGBA", "LA")

#: A picture of more than 8 bits is reported as dark if its brightest pixel is below this value of 255. It has lost most
#: of its grey levels, as happens with 12 bits stored as 16.
_DARK = 16

_BITS_PER_SAMPLE, _ORIENTATION = 258, 274  # tags of TIFF and EXIF


def read_picture(path: str, channels: Channels, faults: Faults) -> Image:
    """Decode a picture file to an 8-bit image in mode ``RGB`` (3 channels) or ``L`` (1), with a remark if converted.

    Raises:
        OSError: The file cannot be decoded, or its values have an unknown range. Others of `UNDECODABLE` mean the same.
    """
    with _opened(path) as file:
        return _converted(file, path, channels, faults)


def read_part(
    path: str, channels: Channels, faults: Faults, part: Callable[[int, int], Box], least: int | None = None
) -> tuple[Image, Box]:
    """Decode a picture file as `read_picture`, if possible at reduced size, and return the crop box in its pixels too.

    ``part`` gives the crop box (left, upper, right, lower) for the width and height of the whole picture. A JPEG is
    decoded at 1/2, 1/4 or 1/8 of its size, which takes fewer coefficients, if the crop keeps at least ``least`` pixels
    per side. Other formats are decoded at full size, and so are all if ``least`` is None.
    """
    with _opened(path) as file:
        width, height = file.size
        left, upper, right, lower = part(width, height)
        side = 0 if least is None else min(right - left, lower - upper) / least
        by = next((by for by in (8, 4, 2) if by <= side), 1)
        if by > 1 and not file.draft(None, (width // by, height // by)):
            by = 1
        return _converted(file, path, channels, faults), (left / by, upper / by, right / by, lower / by)


def _converted(file: ImageFile, path: str, channels: Channels, faults: Faults) -> Image:
    """Return the pixels of an open file in mode ``RGB`` or ``L``."""
    picture: Image = file
    remarks = _remarks(file, path)  # before decoding, which discards how the file stores its values
    if (bits := _bits(file)) > 8:
        picture = file.convert("I").point(lambda value: value * 2.0 ** (8 - bits)).convert("L")
    elif file.mode == "P" and "transparency" in file.info:
        picture = file.convert("RGBA")  # gives the same colours without a warning for each file
    elif file.mode == "LAB":
        picture = file.convert("RGB")  # the only conversion that Pillow supports
    picture = picture.convert("RGB" if channels == 3 else "L")
    if bits > 8 and cast("tuple[int, int]", picture.convert("L").getextrema())[1] < _DARK:
        remarks.append(f"dark (at most {_DARK} of 256 grey levels are left; scale its values up)")
    if remarks:
        faults.remarks[path] = ", ".join(remarks)
    return picture


def pixels_of(picture: Image) -> Tensor:
    """Return the pixels of an image in mode ``RGB`` or ``L``, uint8 ``[C, H, W]``, contiguous."""
    values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return values.view(picture.height, picture.width, -1).permute(2, 0, 1).contiguous()


def picture_size(path: str) -> tuple[int, int]:
    """Return the width and height of a picture file in pixels from its header, without decoding it.

    Raises:
        OSError: The file is not a picture, or `read_picture` does not support its mode. The other exceptions of
            `UNDECODABLE` mean the same.
    """
    with _opened(path) as file:
        return file.size


@contextlib.contextmanager
def _opened(path: str) -> Iterator[ImageFile]:
    """Open a file, read its header, and raise OSError for modes without a defined value range.

    So does every exception of Pillow, which has no fixed set of them for damaged files.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with open_to_read(path) as content, Image.open(content, formats=_READ) as file:
            if not _bits(file):
                raise OSError(
                    f"mode {file.mode} does not define the value of white; save it with 8 or 16 bits per channel"
                )
            yield file
    except UnidentifiedImageError as error:
        raise OSError("it is no picture of a known format") from error
    except UNDECODABLE:
        raise
    except Image.DecompressionBombError as error:
        raise OSError(str(error)) from error
    except Exception as error:
        raise OSError(f"Pillow fails on it: {type(error).__name__}: {error}") from error


def _bits(file: ImageFile) -> int:
    """Return the bits per channel as Pillow reads them; 0 for a wider mode in which the bits in use are unknown."""
    if file.mode in _PLAIN:
        return 8
    if file.mode.startswith("I;16"):
        # Pillow does not scale 12 bits up to 16 in a TIFF.
        return int(file.tag_v2[_BITS_PER_SAMPLE][0]) if file.format == "TIFF" else 16  # type: ignore[attr-defined]
    if file.mode == "I" and file.format in ("PNG", "PPM"):  # files of 16 bits
        return 16
    return 0 if file.mode in ("I", "F") else 8


def _remarks(file: ImageFile, path: str) -> list[str]:
    """Return remarks on how a file differs from plain 8-bit RGB or grey, with the conversion."""
    remarks = []
    if _bits(file) > 8 or _has_16_bits(file):
        remarks.append("16-bit (the high byte is used)")
    elif file.mode == "P":
        remarks.append("palette")
    elif file.mode not in _OFTEN:
        remarks.append(file.mode)
    if file.mode.endswith(("A", "a")) or "transparency" in file.info:
        remarks.append("transparency (left out)")
    if file.format in _WITH_FRAMES and getattr(file, "is_animated", False):
        remarks.append("several frames (the first is used)")
    if min(file.size) == 1:
        remarks.append(f"{file.width}x{file.height} pixels")
    if file.format != "TIFF" and {"exif", "xmp", "XML:com.adobe.xmp"} & file.info.keys():
        with contextlib.suppress(Exception):  # a damaged description is no fault of the pixels
            if file.getexif().get(_ORIENTATION, 1) > 1:
                remarks.append("turned by its EXIF orientation (which is ignored)")
    ending = path[path.rfind(".") :]
    if file.format not in _FORMATS.get(ending.lower(), (file.format,)):
        remarks.append(f"{file.format} named {ending}")
    return remarks


def _has_16_bits(file: ImageFile) -> bool:
    """Return whether Pillow reads 16-bit channels as 8-bit, as it does for files with several channels."""
    if not file.tile or file.format == "BMP":  # a BMP has 16 bits for all three channels together
        return False
    arguments = file.tile[0][3]
    return ";16" in str(arguments if isinstance(arguments, str) else arguments and arguments[0])


#: Names of split folders, in lower case, with the split of each.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass
class Unlisted:
    """Files and folders that belong to no split of a data set, because no rule takes them.

    ``extensions`` counts files of other kinds by extension, ``""`` without one; ``folders`` has the reason by folder.
    """

    extensions: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)

    def images_among(self, parent: str, names: list[str]) -> list[str]:
        """Return the paths of the images among the files of a folder, and count the others."""
        images = _images_among(parent, names)
        if len(images) < len(names):
            for name in sorted(names):
                ending = os.path.splitext(name)[1].lower()  # noqa: PTH122 (a path object for each takes seconds)
                if ending not in EXTENSIONS:
                    self.extensions[ending] += 1
                    self.examples.setdefault(ending, f"{parent}/{name}")
        return images

    def sentences(self) -> tuple[str, ...]:
        """Return what is left out, one sentence for each extension and folder."""
        sentences = [f"{folder} is not used: {reason}" for folder, reason in self.folders.items()]
        for ending, count in self.extensions.most_common():
            files = f"{ending} file{'s' * (count != 1)}".strip() + " without extension" * (not ending)
            sentences.append(f"no pictures, left out: {count:,} {files}, such as {self.examples[ending]}")
        return tuple(sentences)


@dataclass(frozen=True)
class Listing:
    """Paths of image files and the class index of each, in the order of the paths."""

    paths: tuple[str, ...]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Tensor) -> Listing:
        """Return the files with these indices, in this order."""
        return Listing(tuple(self.paths[index] for index in indices.tolist()), self.targets[indices])


def find_splits(root: Path, name: str, unlisted: Unlisted, *, trains: bool = True) -> dict[str, Path]:
    """Return the folder of each split: ``train``, and ``val`` and ``test`` where there are folders for them.

    A folder with the name of a split in `SPLITS` is that split. Without such folders, the root itself is the training
    folder, of class folders or of images without classes. ``unlisted`` receives the folders with images that are no
    split; ``trains`` is False if an evaluation of ``val`` or ``test`` needs no training folder.

    Raises:
        DataError: There is no training folder, or the layout can be read in two ways.
    """
    folders = find_classes(root) if root.is_dir() else ()
    splits: dict[str, Path] = {}
    for folder in folders:
        if split := SPLITS.get(folder.lower()):
            if split in splits:
                raise DataError(f"{root} has two folders for {split}: {splits[split].name} and {folder}", "remove one")
            splits[split] = root / folder
    loose, others = loose_images(root), [name for name in folders if name.lower() not in SPLITS]
    if "train" in splits:
        others = [folder for folder in others if has_images(root / folder)]
        if others and not find_classes(splits["train"]):
            raise DataError(
                f"{root} has images in {splits['train'].name} and in {_some(others)}: it is unclear if "
                f"{splits['train'].name} is a class",
                f"if it is a class, put all class folders into {splits['train']}; otherwise move the others away",
            )
        reason = f"beside {splits['train'].name}, only folders named val and test count"
        unlisted.folders.update({str(root / folder): reason for folder in others})
        return splits
    if loose:
        if folders:
            raise DataError(
                f"{root} has both images and folders, such as {folders[0]}: it is unclear which are for training",
                "put the training images into ROOT/train, with or without class folders",
            )
        return {"train": root}
    if splits and not trains:
        return splits
    if splits:
        there = ", ".join(folder.name for folder in splits.values())
        raise DataError(
            f"{root} has a folder named {there}, but no folder train",
            "put the training images into ROOT/train; if this is the name of a class, put all class folders there",
        )
    if any(has_images(root / folder) for folder in others):
        return {"train": root}
    raise DataError(
        f"{name} not found: looked for {root / 'train'}, and for folders with images in {root}",
        "expected ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or for images without classes "
        f"ROOT/train/IMAGE or ROOT/IMAGE; set dataset.root=ROOT; {NO_DOWNLOAD}",
    )


def find_classes(root: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, sorted in composed form; empty if there are only images.

    They are the classes; names that differ in their Unicode form alone are one class.

    Raises:
        DataError: The folder cannot be read.
    """
    try:
        names = [entry.name for entry in root.iterdir() if entry.is_dir() and not is_hidden(entry)]
        return tuple(sorted(names, key=composed))
    except OSError as error:
        raise DataError(
            f"image folder {root} cannot be read: {error.strerror}",
            f"expected {root}/CLASS/IMAGE; set dataset.root=FOLDER; {NO_DOWNLOAD}",
        ) from error


def list_images(root: Path, class_names: tuple[str, ...], faults: Faults, unlisted: Unlisted) -> Listing:
    """Return all image files below the class folders of a split, or directly in its folder if there are no classes.

    Without classes all images get the target 0. ``faults`` records images in folders that are not classes, and images
    outside of class folders; ``unlisted`` counts the files that are not images.

    Raises:
        DataError: There are no images, or an image has no class and ``faults.on_error`` is ``stop``.
    """
    paths: list[str] = []
    targets: list[int] = []
    numbers = {composed(name): number for number, name in enumerate(class_names)}
    loose = sorted(unlisted.images_among(*_files_in(root)))
    if not class_names:
        paths += loose
        targets += [0] * len(paths)
    known = f"one of the {len(class_names)} classes" if class_names else "a class: the training images have none"
    for name in find_classes(root):
        walked = walk(root / name, EXTENSIONS)
        files = sorted(file for parent, _, names in walked for file in unlisted.images_among(parent, names))
        if (number := numbers.get(composed(name))) is not None:
            paths += files
            targets += [number] * len(files)
        else:
            faults.report(dict.fromkeys(files, f"its folder '{name}' is not {known}"))
    if loose and not paths:
        raise DataError(
            f"{root} has images, but none in the folder of a class",
            "put them into class folders as those in train, or move the folder away: images without classes are of no "
            "use beside classes",
        )
    if class_names:
        faults.report(dict.fromkeys(loose, "is not in a class folder"))
    if not paths:
        raise DataError(f"no images found below {root}", f"known extensions: {' '.join(sorted(EXTENSIONS))}")
    return Listing(tuple(paths), torch.tensor(targets, dtype=torch.int64))


def loose_images(folder: Path) -> list[str]:
    """Return the image files directly in a folder, sorted."""
    return sorted(_images_among(*_files_in(folder)))


def has_images(folder: Path) -> bool:
    """Return whether a folder has an image file at any depth; False if the search exceeds the bound of `walk`."""
    with contextlib.suppress(DataError):
        return any(_images_among(parent, names) for parent, _, names in walk(folder, EXTENSIONS, links=False))
    return False


def _files_in(folder: Path) -> tuple[str, list[str]]:
    """Return a folder as text, and the names of the files directly in it; none if it cannot be read."""
    return str(folder), next(walk(folder, EXTENSIONS))[2]


def _images_among(parent: str, names: list[str]) -> list[str]:
    # Strings, because a million path objects take seconds and hundreds of megabytes.
    return [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in EXTENSIONS]


def _some(names: list[str]) -> str:
    """Return the first three names, and that there are more."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
