"""Photographs to restore: those that installed packages bring along, or a folder of one's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mptrain.errors import ConfigError, DataError
from mptrain.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.workloads.base.faulty_samples import OnError
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.enhancement.degradation import Kind
from mptrain.workloads.enhancement.photo_dataset import Cutting, PhotoDataset, cut_photos
from mptrain.workloads.enhancement.photo_files import files_below
from mptrain.workloads.images.image_dataset import Channels

#: Package to the distribution that has it, and to where it keeps pictures.
_PACKAGES = {
    "sklearn": ("scikit-learn", "datasets/images"),
    "matplotlib": ("matplotlib", "mpl-data/sample_data"),
    "skimage": ("scikit-image", "data"),
}

#: Split to photos in the wheels of packages: those of every installation, and those of scikit-image. Which belong where
#: must never change.
_ALWAYS = {"train": ("sklearn/china.jpg", "sklearn/flower.jpg"), "val": ("matplotlib/grace_hopper.jpg",)}
_SKIMAGE = {
    "train": ("skimage/astronaut.png", "skimage/rocket.jpg"),
    "test": ("skimage/chelsea.png", "skimage/coffee.png"),
}

_FIXED = 20180430  # names the one permutation that divides a folder; changing it changes every split


def load_photos(
    *,
    degradation: Kind = "downsample",
    factor: PositiveInt = 2,
    sigma: NonNegativeFloat = 25.0,
    channels: Channels | None = None,
    patch_size: PositiveInt = 48,
    patches: PositiveInt = 1600,
    augment: bool = True,
    tile_size: PositiveInt = 96,
    tiles_per_photo: PositiveInt | None = None,
    skimage: bool = True,
    workers: NonNegativeInt = 0,
    on_error: OnError = "stop",
) -> PhotoDataset:
    """Photos in packages: a temple, a flower, an astronaut and a rocket to train on, a portrait to validate on, a cat and coffee to test on.

    Half of those to train on and all to test on are scikit-image's.

    Args:
        degradation: ``downsample`` or ``noise``.
        factor: How many times smaller a downsampled picture is.
        sigma: Standard deviation of the noise, of 255.
        channels: 3 for RGB, 1 for grey; None makes 3.
        patch_size: Side in pixels of the good patches that are trained on.
        patches: How many patches an epoch has.
        augment: Turn patches over, by chance.
        tile_size: Side in pixels of the good tiles that are evaluated on.
        tiles_per_photo: Evaluate on so many of each photo; None takes all.
        skimage: False leaves out the photos of scikit-image; then there is no test split.
        workers: Not used: the photos are kept in memory.
        on_error: What to do about files that cannot be decoded.

    Raises:
        DataError: A package or its files are missing.
        ConfigError: Sizes do not go together.
    """
    files = {split: [_photo(name) for name in names] for split, names in _ALWAYS.items()}
    if skimage:
        for split, names in _SKIMAGE.items():
            files[split] = files.get(split, []) + [_photo(name) for name in names]
    cutting = Cutting(
        degradation, factor, sigma, channels or 3, patch_size, patches, augment, tile_size, tiles_per_photo,
        cache_mb=64, workers=workers, on_error=on_error,
    )  # fmt: skip
    return cut_photos("photos", files, cutting)


def load_photo_folder(
    *,
    root: Path = Path("data/photos"),
    name: str = "photo_folder",
    degradation: Kind = "downsample",
    factor: PositiveInt = 2,
    sigma: NonNegativeFloat = 25.0,
    channels: Channels | None = None,
    patch_size: PositiveInt = 96,
    patches: PositiveInt = 16000,
    augment: bool = True,
    tile_size: PositiveInt = 192,
    tiles_per_photo: PositiveInt | None = None,
    val_photos: NonNegativeInt | None = None,
    test_photos: NonNegativeInt | None = None,
    cache_mb: PositiveFloat = 2048.0,
    workers: NonNegativeInt = 4,
    on_error: OnError = "stop",
) -> PhotoDataset:
    """Image files below ``root/train``, ``root/val`` and ``root/test``, or all below ``root``, divided by photo.

    Args:
        root: The folder.
        name: What to call the data set in records.
        degradation: ``downsample`` or ``noise``.
        factor: How many times smaller a downsampled picture is.
        sigma: Standard deviation of the noise, of 255.
        channels: 3 for RGB, 1 for grey; None makes 3.
        patch_size: Side in pixels of the good patches that are trained on.
        patches: How many patches an epoch has.
        augment: Turn patches over, by chance.
        tile_size: Side in pixels of the good tiles that are evaluated on.
        tiles_per_photo: Evaluate on so many of each photo; None takes all.
        val_photos: Hold so many photos out to validate on where there is no ``root/val``; None a tenth, at least one.
        test_photos: Likewise to test on.
        cache_mb: Megabytes of decoded photos to keep, in each process.
        workers: Processes that decode where not all photos can be kept, at most one a core.
        on_error: What to do about files that cannot be decoded or are too small.

    Raises:
        DataError: There are no images.
        ConfigError: Sizes do not go together, or no photo is left to train on.
    """
    files = divide(root.expanduser(), val_photos, test_photos)
    cutting = Cutting(
        degradation, factor, sigma, channels or 3, patch_size, patches, augment, tile_size, tiles_per_photo,
        cache_mb, workers, on_error,
    )  # fmt: skip
    return cut_photos(name, files, cutting)


def divide(root: Path, val_photos: int | None, test_photos: int | None) -> dict[str, list[str]]:
    """Split to files: by folders ``train``, ``val`` and ``test`` where there is a ``train``, else by a fixed permutation.

    Raises:
        DataError: There are no images.
        ConfigError: No photo is left to train on.
    """
    train = root / "train"
    found = {"train": files_below(train if train.is_dir() else root)}
    for split in ("val", "test"):
        if train.is_dir() and (root / split).is_dir():
            found[split] = files_below(root / split)
    everything = found["train"]
    for split, asked in (("test", test_photos), ("val", val_photos)):
        if split in found:
            continue
        count = max(1, len(everything) // 10) if asked is None else asked
        if count >= len(found["train"]):
            raise ConfigError(
                f"{root} has {len(everything)} photos to divide: holding {count} out for {split} leaves none to train on",
                "add photos, or write dataset.val_photos=0 or dataset.test_photos=0",
            )
        order = permutation(len(found["train"]), _FIXED).tolist()
        held = set(order[:count])
        found[split] = [file for place, file in enumerate(found["train"]) if place in held]
        found["train"] = [file for place, file in enumerate(found["train"]) if place not in held]
    return found


def _folder(package: str) -> Path | None:
    """Where an installed package keeps its pictures; it is located, not imported."""
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or []) if spec else []
    folders = [Path(place) / _PACKAGES[package][1] for place in places]
    return next((folder for folder in folders if folder.is_dir()), None)


def _photo(name: str) -> str:
    package, _, file = name.partition("/")
    folder = _folder(package)
    if folder is None or not (folder / file).is_file():
        distribution, _ = _PACKAGES[package]
        other = ", or write dataset.skimage=false" if package == "skimage" else ""
        raise DataError(f"{file} of {distribution} not found", f"pip install {distribution}{other}")
    return str(folder / file)
