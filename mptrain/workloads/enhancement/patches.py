"""Photographs in files, kept while there is room, and what is cut out of them: random patches to train on, the same tiles every time to evaluate on.

Batches hold good pictures in 8 bits, and a word for each from which its noise is drawn where it becomes a bad one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults, none_usable
from mptrain.workloads.base.independent_samples import IndependentSamples
from mptrain.workloads.base.random_streams import keys, uniforms
from mptrain.workloads.images.image_dataset import Channels
from mptrain.workloads.images.picture_files import UNDECODABLE, picture_size, read_picture

#: Tells the draws of noise from those of places; and what evaluations draw from, whatever the run's seed.
_NOISE, _EVALUATION = 0x6E6F697365, 20040413


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


@dataclass(eq=False)
class _PhotoSplit(IndependentSamples):
    """A split of photos, and batches of what was cut out of them.

    Args:
        photos: Where it is cut out.
    """

    photos: Photos

    def __post_init__(self) -> None:
        super().__init__(self.photos.faults)

    @property
    def in_memory(self) -> bool:
        """All photos are decoded once and kept."""
        return self.photos.fit

    @property
    def files(self) -> int:
        """See `IndependentSamples.files`."""
        return len(self.photos)

    def read(self, number: int) -> None:
        """See `IndependentSamples.read`."""
        try:
            self.photos.decode(number)
        except UNDECODABLE as error:
            self.faults.report({self.photos.paths[number]: f"cannot be decoded: {error}"})

    def _batch(
        self, cuts: Sequence[tuple[int, int, int, int]], words: Tensor, flips: Sequence[Sequence[bool]]
    ) -> Batch:
        """Cut ``(photo, top, left, side)`` each, turn it over, and leave out what cannot be decoded."""
        pictures: list[Tensor] = []
        used: list[int] = []
        for place, (photo, top, left, side) in enumerate(cuts):
            try:
                cut = self.photos.pixels(photo)[:, top : top + side, left : left + side]
            except UNDECODABLE as error:
                self.faults.report({self.photos.paths[photo]: f"cannot be decoded: {error}"})
                continue
            upright, sideways, transposed = flips[place] if flips else (False, False, False)
            cut = cut.flip([axis for axis, turned in ((1, upright), (2, sideways)) if turned])
            pictures.append(cut.transpose(1, 2) if transposed else cut)
            used.append(place)
        if not pictures:
            raise none_usable("photo", self.photos.paths[cuts[0][0]])
        stacked = torch.stack(pictures)
        return Batch(stacked, stacked, more={"words": words[used]})


@dataclass(eq=False)
class PatchSplit(_PhotoSplit):
    """Random patches, as many an epoch as asked for; each photo has the same share of them.

    Args:
        photos: To train on, at least one.
        patches: How many an epoch has.
        side: Of a patch, in pixels.
        augment: Turn patches over, by chance: the eight ways to lay down a square.
    """

    photos: Photos
    patches: int
    side: int
    augment: bool

    def __len__(self) -> int:
        return self.patches

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Patches from places that follow from ``(seed, epoch, index)``; see `mptrain.workloads.base.dataset.Split.fetch`."""
        draws = uniforms(seed, epoch, indices, 5)
        cuts = []
        for index, (down, across, *_) in zip(indices, draws.tolist(), strict=True):
            photo = index % len(self.photos)
            height, width = self.photos.sizes[photo]
            top, left = int(down * (height - self.side + 1)), int(across * (width - self.side + 1))
            cuts.append((photo, top, left, self.side))
        flips = (draws[:, 2:] < 0.5).tolist() if self.augment else ()
        return self._batch(cuts, keys(seed ^ _NOISE, epoch, indices), flips)


@dataclass(eq=False)
class TileSplit(_PhotoSplit):
    """The squares of a grid over each photo, side by side around its centre; what is left at the edges is left out.

    Args:
        photos: To evaluate on, at least one.
        side: Of a tile, in pixels.
        tiles_per_photo: Take so many of each photo, evenly spread; None takes all.
    """

    photos: Photos
    side: int
    tiles_per_photo: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cuts: list[tuple[int, int, int, int]] = []
        for number, (height, width) in enumerate(self.photos.sizes):
            side = self.side
            down, across = height // side, width // side
            top, left = (height - down * side) // 2, (width - across * side) // 2
            grid = [
                (number, top + row * side, left + column * side, side)
                for row in range(down)
                for column in range(across)
            ]
            taken = min(self.tiles_per_photo or len(grid), len(grid))
            self._cuts += [grid[(2 * place + 1) * len(grid) // (2 * taken)] for place in range(taken)]

    def __len__(self) -> int:
        return len(self._cuts)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Tiles, and noise that is the same in every run; see `mptrain.workloads.base.dataset.Split.fetch`."""
        return self._batch([self._cuts[index] for index in indices], keys(_EVALUATION, 0, indices), ())
