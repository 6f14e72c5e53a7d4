"""What is cut out of photographs: random patches to train on, and the same tiles every time to evaluate on.

Batches hold good pictures in 8 bits, and a word for each from which its noise is drawn where it becomes a bad one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import none_usable
from mptrain.workloads.base.independent import IndependentSamples
from mptrain.workloads.base.random_streams import keys, uniforms
from mptrain.workloads.images.picture_files import UNDECODABLE

if TYPE_CHECKING:
    from mptrain.workloads.enhancement.photo_files import Photos

#: Tells the draws of noise from those of places; and what evaluations draw from, whatever the run's seed.
_NOISE, _EVALUATION = 0x6E6F697365, 20040413


class _Cut(IndependentSamples):
    """What both kinds of splits have in common: photos, and batches of what was cut out of them.

    Args:
        photos: Where it is cut out.
    """

    def __init__(self, photos: Photos) -> None:
        super().__init__(photos.faults)
        self.photos = photos

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


class PatchSplit(_Cut):
    """Random patches, as many an epoch as asked for; each photo has the same share of them.

    Args:
        photos: To train on, at least one.
        patches: How many an epoch has.
        side: Of a patch, in pixels.
        augment: Turn patches over, by chance: the eight ways to lay down a square.
    """

    def __init__(self, photos: Photos, patches: int, side: int, *, augment: bool) -> None:
        super().__init__(photos)
        self.patches = patches
        self.side = side
        self.augment = augment

    def __len__(self) -> int:
        return self.patches

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Patches from places that follow from ``(seed, epoch, index)``; see `mptrain.workloads.base.source.Split.fetch`."""
        draws = uniforms(seed, epoch, indices, 5)
        cuts = []
        for index, (down, across, *_) in zip(indices, draws.tolist(), strict=True):
            photo = index % len(self.photos)
            height, width = self.photos.sizes[photo]
            top, left = int(down * (height - self.side + 1)), int(across * (width - self.side + 1))
            cuts.append((photo, top, left, self.side))
        flips = (draws[:, 2:] < 0.5).tolist() if self.augment else ()
        return self._batch(cuts, keys(seed ^ _NOISE, epoch, indices), flips)


class TileSplit(_Cut):
    """The squares of a grid over each photo, side by side around its centre; what is left at the edges is left out.

    Args:
        photos: To evaluate on, at least one.
        side: Of a tile, in pixels.
        tiles_per_photo: Take so many of each photo, evenly spread; None takes all.
    """

    def __init__(self, photos: Photos, side: int, tiles_per_photo: int | None) -> None:
        super().__init__(photos)
        self._cuts: list[tuple[int, int, int, int]] = []
        for number, (height, width) in enumerate(photos.sizes):
            down, across = height // side, width // side
            top, left = (height - down * side) // 2, (width - across * side) // 2
            grid = [
                (number, top + row * side, left + column * side, side)
                for row in range(down)
                for column in range(across)
            ]
            taken = min(tiles_per_photo or len(grid), len(grid))
            self._cuts += [grid[(2 * place + 1) * len(grid) // (2 * taken)] for place in range(taken)]

    def __len__(self) -> int:
        return len(self._cuts)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Tiles, and noise that is the same in every run; see `mptrain.workloads.base.source.Split.fetch`."""
        return self._batch([self._cuts[index] for index in indices], keys(_EVALUATION, 0, indices), ())
