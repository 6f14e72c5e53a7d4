"""Photographs in files: their sizes from the headers, their pixels when they are asked for, kept while there is room."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, picture_size, read_picture

if TYPE_CHECKING:
    from mptrain.workloads.base.faulty_samples import Faults
    from mptrain.workloads.images.image_dataset import Channels


class Photos:
    """Files whose headers could be read, in the order given.

    Args:
        paths: The files.
        channels: 3 for RGB, 1 for grey.
        smallest: Side in pixels of the smallest photo that is of use.
        key: What asks for that size: ``tile_size`` or ``patch_size``.
        cache_mb: Megabytes of decoded pixels to keep, the last used ones; each process keeps its own.
        faults: Takes files that cannot be read or are too small.

    Attributes:
        paths: Those that can be used.
        sizes: Height and width of each, in pixels.
        fit: Whether all of them can be kept at once.

    Raises:
        DataError: A file cannot be used and ``faults`` says stop.
    """

    def __init__(
        self, paths: Sequence[str], channels: Channels, smallest: int, key: str, cache_mb: float, faults: Faults
    ) -> None:
        self.channels = channels
        self.faults = faults
        self.paths: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        broken: dict[str, str] = {}
        small: dict[str, str] = {}
        for path in paths:
            try:
                width, height = picture_size(path)
            except UNDECODABLE as error:
                broken[path] = f"cannot be decoded: {error}"
                continue
            if min(height, width) < smallest:
                small[path] = f"has {width}x{height} pixels, and {smallest}x{smallest} are cut out of each photo"
                continue
            self.paths.append(path)
            self.sizes.append((height, width))
        faults.report(broken)
        faults.report(small, f"choose a smaller dataset.{key}, or larger photos")
        self._room = cache_mb * 2**20
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self.fit = sum(channels * height * width for height, width in self.sizes) <= self._room

    def __len__(self) -> int:
        return len(self.paths)

    def pixels(self, number: int) -> Tensor:
        """The photo with this number, uint8 ``[C, H, W]``.

        Raises:
            OSError: The file cannot be decoded, or is another one than before; as are the others of `UNDECODABLE`.
        """
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        photo = self.decode(number)
        self._kept[number] = photo
        while len(self._kept) > 1 and sum(kept.numel() for kept in self._kept.values()) > self._room:
            self._kept.popitem(last=False)
        return photo

    def decode(self, number: int) -> Tensor:
        """Return what `pixels` does, without keeping it."""
        picture = read_picture(self.paths[number], self.channels, self.faults)
        if (picture.height, picture.width) != self.sizes[number]:
            raise OSError("its size has changed since the run began")
        values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return values.view(picture.height, picture.width, self.channels).permute(2, 0, 1).contiguous()


def files_below(folder: Path) -> list[str]:
    """The image files in a folder and in the folders inside it, sorted; hidden ones are left out.

    Raises:
        DataError: There are none, or there is no such folder.
    """
    hint = f"set dataset.root=FOLDER; known endings: {' '.join(sorted(EXTENSIONS))}; dataset=photos needs no files of yours"
    if not folder.is_dir():
        raise DataError(f"the folder of the photos, {folder}, does not exist", hint)
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        pictures = (name for name in names if name[name.rfind(".") :].lower() in EXTENSIONS)
        found += [f"{parent}/{name}" for name in pictures if not name.startswith(".")]
    if not found:
        raise DataError(f"no images found below {folder}", hint)
    return sorted(found)
