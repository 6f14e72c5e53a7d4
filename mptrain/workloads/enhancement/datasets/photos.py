"""Photographs to restore: those that installed packages bring along, or a folder of one's own."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from mptrain.errors import ConfigError, DataError
from mptrain.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.enhancement.photo_dataset import PhotoDataset
from mptrain.workloads.images.picture_files import EXTENSIONS

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


@dataclass(kw_only=True, eq=False)
class InstalledPhotos(PhotoDataset):
    """Photos in packages: a temple, a flower, an astronaut and a rocket to train on, a portrait to validate on, a cat and coffee to test on.

    Half of those to train on and all to test on are scikit-image's. The other options and the errors are those of `PhotoDataset`; all
    photos are kept in memory.

    Attributes:
        skimage: False leaves out the photos of scikit-image; then there is no test split.

    Raises:
        DataError: A package or its files are missing.
    """

    skimage: bool = True

    name, cache_mb = "photos", 64

    def files(self) -> dict[str, list[str]]:
        """Find the photos of the packages."""
        sources = (_ALWAYS, _SKIMAGE) if self.skimage else (_ALWAYS,)
        splits = dict.fromkeys(split for source in sources for split in source)
        return {split: [_photo(name) for source in sources for name in source.get(split, ())] for split in splits}


@dataclass(kw_only=True, eq=False)
class PhotoFolder(PhotoDataset):
    """Image files below ``root/train``, ``root/val`` and ``root/test``, or all below ``root``, divided by photo.

    The other options and errors are those of `PhotoDataset`.

    Attributes:
        root: The folder.
        name: What to call the data set in records.
        val_photos: Hold so many photos out to validate on where there is no ``root/val``; None a tenth, at least one.
        test_photos: Likewise to test on.
        cache_mb: Megabytes of decoded photos to keep, in each process.

    Raises:
        DataError: There are no images.
        ConfigError: No photo is left to train on.
    """

    root: Path = Path("data/photos")
    name: str = "photo_folder"
    patch_size: PositiveInt = 96
    patches: PositiveInt = 16000
    tile_size: PositiveInt = 192
    val_photos: NonNegativeInt | None = None
    test_photos: NonNegativeInt | None = None
    cache_mb: PositiveFloat = 2048.0
    workers: NonNegativeInt = 4

    def files(self) -> dict[str, list[str]]:
        """Divide the photos of the folder by folders ``train``, ``val`` and ``test`` where there is a ``train``, else by a fixed permutation."""
        root = self.root.expanduser()
        train = root / "train"
        found = {"train": files_below(train if train.is_dir() else root)}
        for split in ("val", "test"):
            if train.is_dir() and (root / split).is_dir():
                found[split] = files_below(root / split)
        everything = found["train"]
        for split, asked in (("test", self.test_photos), ("val", self.val_photos)):
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


#: Their names in configurations.
load_photos, load_photo_folder = InstalledPhotos, PhotoFolder


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


def _photo(name: str) -> str:
    """Return the path of a photo in an installed package, which is located, not imported.

    Raises:
        DataError: It is not there.
    """
    package, _, file = name.partition("/")
    distribution, folder = _PACKAGES[package]
    spec = importlib.util.find_spec(package)
    places = [Path(place) / folder for place in (spec.submodule_search_locations or [])] if spec else []
    found = next((place for place in places if place.is_dir()), None)
    if found is None or not (found / file).is_file():
        other = ", or write dataset.skimage=false" if package == "skimage" else ""
        raise DataError(f"{file} of {distribution} not found", f"pip install {distribution}{other}")
    return str(found / file)
