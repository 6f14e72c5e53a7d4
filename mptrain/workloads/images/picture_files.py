"""Reader of picture files as 8-bit RGB or grey, scaled from the value range of the file's mode.

16-bit values are reduced to their high byte, as Pillow does for 16-bit RGB. As in torchvision's ``ImageFolder``,
transparency is dropped, only the first of several frames is used, and the EXIF orientation is ignored (but for a TIFF,
which Pillow turns).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mptrain.system.files import open_to_read

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from mptrain.workloads.base.faulty_samples import Faults
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
_READ = sorted({one for formats in _FORMATS.values() for one in formats} - {"MPO"})  # which the reader of JPEG reads

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
    if file.format != "TIFF" and {"exif", "xmp", "XML:com.adobe.xmp"} & file.info.keys():
        with contextlib.suppress(Exception):  # a damaged description is no fault of the pixels
            if file.getexif().get(_ORIENTATION, 1) > 1:
                found.append("turned by its EXIF orientation (which is ignored)")
    ending = path[path.rfind(".") :]
    if file.format not in _FORMATS.get(ending.lower(), (file.format,)):
        found.append(f"{file.format} named {ending}")
    return found


def _has_16_bits(file: ImageFile) -> bool:
    """Return whether Pillow reads 16-bit channels as 8-bit, as it does for files with several channels."""
    if not file.tile or file.format == "BMP":  # a BMP has 16 bits for all three channels together
        return False
    arguments = file.tile[0][3]
    return ";16" in str(arguments if isinstance(arguments, str) else arguments and arguments[0])
