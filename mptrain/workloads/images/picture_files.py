"""Picture files, opened as 8-bit RGB or grey, each from the range of values that its own mode has.

Sixteen bits a pixel become their eight highest, which is what Pillow makes of 16-bit RGB. Transparency is left out and of
several frames the first is used, as torchvision's ``ImageFolder`` does; so is its choice to take pixels as they are stored,
whatever the EXIF orientation says.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from mptrain.workloads.base.faulty_samples import Faults
    from mptrain.workloads.images.augmentation import Box
    from mptrain.workloads.images.image_dataset import Channels

#: Endings of the files that are taken for pictures, and Pillow's names of the formats that go with them.
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

#: Exceptions of Pillow's for files that are empty, cut short, of another format, or of far too many pixels.
UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error)

#: Formats that hold frames or pages. JPEG is none of them: its second picture is a preview.
_WITH_FRAMES = ("GIF", "PNG", "TIFF", "WEBP")

#: Modes of 8 bits or one that become RGB without loss.
_PLAIN = ("RGB", "L", "1")
_OFTEN = (*_PLAIN, "RGBA", "LA")

#: A picture of more than 8 bits whose brightest pixel is below this, of 255, has lost most of its values: 12 bits stored as 16 are.
_DARK = 16

_BITS_PER_SAMPLE = 258  # TIFF's tag


def read_picture(path: str, channels: Channels, faults: Faults) -> Image:
    """Return the pixels of a file in mode ``RGB`` or ``L``.

    Args:
        path: The file.
        channels: 3 for RGB, 1 for grey.
        faults: Takes note of what is remarkable about the file.

    Raises:
        OSError: It cannot be decoded, or has values of an unknown range; as are the others of `UNDECODABLE`.
    """
    with _opened(path) as file:
        return _converted(file, path, channels, faults)


def read_part(
    path: str, channels: Channels, faults: Faults, part: Callable[[int, int], Box], least: int | None = None
) -> tuple[Image, Box]:
    """Return the pixels of a file, and the box of a part in them.

    A JPEG is decoded at a half, a quarter or an eighth of its size, for which its decoder computes fewer coefficients, where the part
    keeps as many pixels as are needed. Other formats have no such way.

    Args:
        path: The file.
        channels: 3 for RGB, 1 for grey.
        faults: Takes note of what is remarkable about the file.
        part: Gives the box, by the width and height of the whole picture.
        least: Pixels of each side of the part that are needed; None decodes all.

    Raises:
        OSError: As `read_picture`.
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
    remarks = _remarks(file, path)  # now, since decoding forgets how the file stores its values
    if (bits := _bits(file)) > 8:
        picture = file.convert("I").point(lambda value: value * 2.0 ** (8 - bits)).convert("L")
    elif file.mode == "P" and "transparency" in file.info:
        picture = file.convert("RGBA")  # the same colours without a warning for each file
    elif file.mode == "LAB":
        picture = file.convert("RGB")  # the only mode that Pillow makes of it
    picture = picture.convert("RGB" if channels == 3 else "L")
    if bits > 8 and cast("tuple[int, int]", picture.convert("L").getextrema())[1] < _DARK:
        remarks.append(f"dark (at most {_DARK} of 256 grey levels are left; scale its values up)")
    if remarks:
        faults.remarks[path] = ", ".join(remarks)
    return picture


def picture_size(path: str) -> tuple[int, int]:
    """Return width and height as the header says.

    Raises:
        OSError: The file is no picture, or `read_picture` refuses its mode; as are the others of `UNDECODABLE`.
    """
    with _opened(path) as file:
        return file.size


@contextlib.contextmanager
def _opened(path: str) -> Iterator[ImageFile]:
    """Open a file, read its header, and refuse modes whose values have no range."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            if not _bits(file):
                raise OSError(
                    f"its mode {file.mode} does not say which value is white; save it with 8 or 16 bits a channel"
                )
            yield file
    except Image.DecompressionBombError as error:
        raise OSError(str(error)) from error


def _bits(file: ImageFile) -> int:
    """Return how many bits a channel has as Pillow reads it; 0 where the mode has more, and nothing says how many are used."""
    if file.mode in _PLAIN:
        return 8
    if file.mode.startswith("I;16"):
        # Twelve bits are not scaled up to sixteen in a TIFF.
        return int(file.tag_v2[_BITS_PER_SAMPLE][0]) if file.format == "TIFF" else 16  # type: ignore[attr-defined]
    if file.mode == "I" and file.format in ("PNG", "PPM"):  # of 16 bits, for want of a mode
        return 16
    return 0 if file.mode in ("I", "F") else 8


def _remarks(file: ImageFile, path: str) -> list[str]:
    """Return what else than plain 8-bit RGB or grey there is in a file, with what is done about it."""
    found = []
    if _bits(file) > 8 or _has_16_bits(file):
        found.append("16-bit (the high byte is used)")
    elif file.mode == "P":
        found.append("palette")
    elif file.mode not in _OFTEN:
        found.append(file.mode)
    if file.mode.endswith(("A", "a")) or "transparency" in file.info:
        found.append("transparency (left out)")
    if file.format in _WITH_FRAMES and getattr(file, "is_animated", False):
        found.append("several frames (the first is used)")
    if min(file.size) == 1:
        found.append(f"{file.width}x{file.height} pixels")
    ending = path[path.rfind(".") :]
    if file.format not in _FORMATS.get(ending.lower(), (file.format,)):
        found.append(f"{file.format} named {ending}")
    return found


def _has_16_bits(file: ImageFile) -> bool:
    """Return whether channels of 16 bits are read as 8, which Pillow does by itself where there are several."""
    if not file.tile or file.format == "BMP":  # whose 16 bits are those of all three
        return False
    arguments = file.tile[0][3]
    return ";16" in str(arguments if isinstance(arguments, str) else arguments and arguments[0])
