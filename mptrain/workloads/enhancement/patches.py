"""Splits of photographs into crops: random patches for training, fixed tiles for evaluation; and a cache of the photos.

Batches hold clean pictures in 8 bits and one random 64-bit word each, from which the device draws noise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import IndependentSamples, Survey
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import keys, uniforms
from mptrain.workloads.images.image_dataset import Channels
from mptrain.workloads.images.picture_files import UNDECODABLE, picture_size, pixels_of, read_picture

#: Offset that separates the random stream of noise from that of positions; fixed seed of the noise in evaluation.
_NOISE, _EVALUATION = 0x6E6F697365, 20040413


class Photos:
    """List of usable photo files with their sizes, and a cache of their decoded pixels.

    Construction reads only the headers, keeps the order of the files, and leaves out photos that cannot be read or have
    a side of less than ``smallest`` pixels, which the option ``key`` sets; DataError is raised instead if
    ``faults.on_error`` is ``stop``. Each process has its own cache of ``cache_mb`` megabytes, for the photos used last;
    ``fit`` is true if all fit at once. ``sizes`` are heights and widths in pixels.
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
                small[path] = f"has {width}x{height} pixels, but each crop of a photo has {smallest}x{smallest}"
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
        """Return the decoded photo at this position of ``paths``, uint8 ``[C, H, W]``, from the cache or the file.

        OSError is raised if its size has changed; decoding may raise the other errors of `UNDECODABLE`.
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
        """Decode the photo at this position, uint8 ``[C, H, W]``, without the cache, with the errors of `pixels`."""
        picture = read_picture(self.paths[number], self.channels, self.faults)
        if (picture.height, picture.width) != self.sizes[number]:
            raise OSError("its size has changed since the run started")
        return pixels_of(picture)


@dataclass(eq=False)
class _PhotoSplit(IndependentSamples):
    photos: Photos

    def __post_init__(self) -> None:
        super().__init__(self.photos.faults)
        self.in_memory = self.photos.fit

    @property
    def files(self) -> int:
        return len(self.photos)

    def survey(self) -> Survey:
        sides = torch.tensor(self.photos.sizes)
        return Survey(totals={"photos": len(sides)}, lengths={"width": sides[:, 1], "height": sides[:, 0]})

    def read(self, number: int) -> None:
        try:
            self.photos.decode(number)
        except UNDECODABLE as error:
            self.faults.report({self.photos.paths[number]: f"cannot be decoded: {error}"})

    def _batch(
        self, cuts: Sequence[tuple[int, int, int, int]], words: Tensor, flips: Sequence[Sequence[bool]]
    ) -> Batch:
        """Return crops of photos, each cut by position of the photo, top, left and side, as inputs and targets.

        ``flips`` says for each crop to flip it vertically, flip it horizontally, and transpose it; empty for none.
        """

        def crop(place: int) -> tuple[Tensor, Tensor]:
            photo, top, left, side = cuts[place]
            cut = self.photos.pixels(photo)[:, top : top + side, left : left + side]
            upright, sideways, transposed = flips[place] if flips else (False, False, False)
            cut = cut.flip([axis for axis, turned in ((1, upright), (2, sideways)) if turned])
            return cut.transpose(1, 2) if transposed else cut, words[place]

        paths = [self.photos.paths[photo] for photo, *_ in cuts]
        found = self.faults.usable("photo", paths, crop, UNDECODABLE, "cannot be decoded: {}".format)
        pictures, used = map(torch.stack, zip(*found, strict=True))
        return Batch(pictures, pictures, extras={"words": used})


@dataclass(eq=False)
class PatchSplit(_PhotoSplit):
    """Training split of random square patches, each photo with the same share of them.

    ``augment`` flips and transposes patches at random, to one of the eight symmetries of a square.
    """

    patches: int
    side: int
    augment: bool

    def __len__(self) -> int:
        return self.patches

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return clean patches, uint8 ``[N, C, side, side]``, with ``words`` for each patch's noise, int64 ``[N]``.

        Photos that cannot be decoded are left out if ``on_error`` is ``skip``, unless none is left (DataError).
        """
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
    """Evaluation split of fixed square tiles from a grid centred on each photo; margins outside the grid are not used.

    ``tiles_per_photo`` evenly spread tiles are taken from each photo; None takes all.
    """

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
        """Return a batch as `PatchSplit.fetch` does, with noise that is the same in every evaluation and every run."""
        return self._batch([self._cuts[index] for index in indices], keys(_EVALUATION, 0, indices), ())
