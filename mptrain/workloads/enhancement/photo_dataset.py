"""Data set of degraded and clean crops of photographs, whose crops share a split, and new pictures to enhance.

Batches hold clean pictures in 8 bits and one random 64-bit word each, from which the device draws noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from mptrain.system.errors import ConfigError, DataError
from mptrain.system.fields import NonNegativeFloat, NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import Dataset, IndependentSamples, Survey, absolute
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.random_streams import keys, normals, uniforms
from mptrain.workloads.images.image_dataset import Channels
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, picture_size, pixels_of, read_picture

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

        def crop(position: int) -> tuple[Tensor, Tensor]:
            photo, top, left, side = cuts[position]
            cut = self.photos.pixels(photo)[:, top : top + side, left : left + side]
            upright, sideways, transposed = flips[position] if flips else (False, False, False)
            cut = cut.flip([axis for axis, turned in ((1, upright), (2, sideways)) if turned])
            return cut.transpose(1, 2) if transposed else cut, words[position]

        paths = [self.photos.paths[photo] for photo, *_ in cuts]
        crops = self.faults.usable("photo", paths, crop, UNDECODABLE, "cannot be decoded: {}".format)
        pictures, used = map(torch.stack, zip(*crops, strict=True))
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
            self._cuts += [grid[(2 * index + 1) * len(grid) // (2 * taken)] for index in range(taken)]

    def __len__(self) -> int:
        return len(self._cuts)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return a batch as `PatchSplit.fetch` does, with noise that is the same in every evaluation and every run."""
        return self._batch([self._cuts[index] for index in indices], keys(_EVALUATION, 0, indices), ())


Kind = Literal["downsample", "noise"]

#: Smallest side of a tile without its border: the side of the window of SSIM.
_SMALLEST_TILE = 11


@dataclass(frozen=True)
class Degradation:
    """Degradation of clean pictures, bicubic downsampling or Gaussian noise, which makes a network's inputs.

    It is computed on the device in FP32, from random words drawn on the host. A downsampled picture is smaller by
    ``factor`` on each side; ``sigma`` is the standard deviation of the noise, on a scale of 255.
    """

    kind: Kind
    factor: int
    sigma: float

    @property
    def upscale(self) -> int:
        """Factor by which each side of the clean picture is larger than that of the degraded one; 1 for noise."""
        return self.factor if self.kind == "downsample" else 1

    def apply(self, pictures: Tensor, words: Tensor) -> Tensor:
        """Degrade pictures, float32 ``[N, C, H, W]`` from 0 to 1, with random words of `random_streams.keys`.

        Downsampling is bicubic with antialiasing, as in Pillow and MATLAB, and rounds to 8 bits, as a file would; sides
        must be multiples of ``factor``. Noise is neither rounded nor clipped, as in Zhang et al. 2017.
        """
        if self.kind == "noise":
            drawn = normals(words, pictures[0].numel()).view(pictures.shape)
            return pictures + drawn * (self.sigma / 255)
        if self.factor == 1:
            return pictures
        size = (pictures.shape[-2] // self.factor, pictures.shape[-1] // self.factor)
        small = F.interpolate(pictures, size=size, mode="bicubic", antialias=True)
        return (small * 255).round().clamp(0, 255) / 255

    def card(self) -> dict[str, Any]:
        """Return the parameters of the degradation as JSON values."""
        if self.kind == "noise":
            return {"kind": "noise", "sigma": self.sigma, "range": 255}
        return {"kind": "downsample", "factor": self.factor, "mode": "bicubic", "antialias": True, "bits": 8}


@dataclass(kw_only=True, eq=False)
class PhotoDataset(Dataset):
    """Base class of data sets that pair degraded photos with clean ones; subclasses say which files to use.

    Attributes:
        degradation: ``downsample``, by ``factor``, or ``noise``, of standard deviation ``sigma`` on a scale of 255.
        channels: 3 for RGB, 1 for grey; None means 3.
        patch_size: Side in pixels of the clean patches for training.
        tile_size: Side in pixels of the clean tiles for evaluation.
        tiles_per_photo: Number of tiles of each photo to evaluate on; None takes all.
        workers: Number of processes that decode photos if not all fit into the cache, at most one per core.
        on_error: ``stop`` or ``skip`` for files that cannot be decoded or are too small.
        cache_mb: Megabytes of decoded photos to keep in each process.

    Raises:
        DataError: A file is unusable and ``on_error`` is ``stop``, or no file is left.
        ConfigError: The sizes are incompatible.
    """

    degradation: Kind = "downsample"
    factor: PositiveInt = 2
    sigma: NonNegativeFloat = 25.0
    channels: Channels | None = None
    patch_size: PositiveInt = 48
    patches: PositiveInt = 1600
    augment: bool = True
    tile_size: PositiveInt = 96
    tiles_per_photo: PositiveInt | None = None
    workers: NonNegativeInt = 0
    on_error: OnError = "stop"

    name: str = field(init=False)
    cache_mb: float = field(init=False)
    inputs: ClassVar[str] = "photos"

    @abstractmethod
    def files(self) -> Mapping[str, Sequence[str]]:
        """Return the paths of the photos of each split: ``train``, and ``val`` and ``test`` where there are any."""

    def __post_init__(self) -> None:
        files = self.files()
        self.degrade = Degradation(self.degradation, self.factor, self.sigma)
        self._channels: Channels = self.channels or 3
        upscale = self.degrade.upscale
        for key, size in (("patch_size", self.patch_size), ("tile_size", self.tile_size)):
            if size % upscale:
                raise ConfigError(
                    f"dataset.{key}={size} is not a multiple of dataset.factor={upscale}",
                    f"set dataset.{key}={max(size // upscale, 1) * upscale}",
                )
        smallest = _SMALLEST_TILE + 2 * upscale
        if self.tile_size < smallest:
            least = -(-smallest // upscale) * upscale
            raise ConfigError(
                f"dataset.tile_size={self.tile_size}: SSIM's window and the border need {smallest} pixels",
                f"set dataset.tile_size={least} or more",
            )

        def photos(split: str, side: int, key: str) -> Photos:
            photo_set = Photos(files[split], self._channels, side, key, self.cache_mb, Faults(self.on_error))
            if not len(photo_set):
                hint = f"choose a smaller dataset.{key}, fix the files, or choose dataset=photos"
                raise DataError(f"{self.name}: no photo of {split} can be used", hint)
            return photo_set

        def tiles(split: str) -> TileSplit | None:
            if not files.get(split):
                return None
            return TileSplit(photos(split, self.tile_size, "tile_size"), self.tile_size, self.tiles_per_photo)

        training = photos("train", self.patch_size, "patch_size")
        self.train = PatchSplit(training, self.patches, self.patch_size, augment=self.augment)
        self.val, self.test = tiles("val"), tiles("test")

    def facts(self) -> dict[str, Any]:
        """Return the facts for models and tasks: ``in_channels`` and ``upscale``."""
        return {"in_channels": self._channels, "upscale": self.degrade.upscale}

    def card(self) -> dict[str, Any]:
        """Return photos of each split, and degradation of the inputs, as JSON values."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        files = absolute({part: split.photos.paths for part, split in splits.items() if split})
        return {"files": files, "degradation": self.degrade.card(), "divide_by": 255}

    def describe(self) -> str:
        """Return channels, height and width of inputs and targets: ``3x24x24 to 3x48x48``."""
        side = self.train.side
        small = side // self.degrade.upscale
        return f"{self._channels}x{small}x{small} to {self._channels}x{side}x{side}"

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Return degraded pictures as inputs, and clean ones from 0 to 1 as targets, both float32, on the device."""
        batch = batch.to(device)
        good = batch.targets.float() / 255
        bad = self.degrade.apply(good, batch.extras["words"])
        return Batch(bad.contiguous(memory_format=memory_format), good.contiguous(memory_format=memory_format))


class NewPhotos(NewInputs):
    """Picture files, one by one because of their sizes; they are inputs of the network as they are."""

    suffixes = EXTENSIONS
    unreadable = UNDECODABLE
    batch_size = 1

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, facts)
        if facts["in_channels"] not in get_args(Channels):
            raise ValueError(f"pictures have {facts['in_channels']} channels")
        self._channels = cast("Channels", facts["in_channels"])

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return a picture, uint8 ``[C, H, W]``."""
        return pixels_of(read_picture(given, self._channels, faults))

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return one picture, uint8 ``[1, C, H, W]``."""
        return Batch(torch.stack(list(samples)), torch.zeros(len(samples)))

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        batch = batch.to(device)
        return Batch((batch.inputs.float() / 255).contiguous(memory_format=memory_format), batch.targets)
