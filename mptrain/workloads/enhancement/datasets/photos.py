"""Data sets of photographs to restore: ``photos`` in installed packages, and ``photo_folder`` of the user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mptrain.system.files import expanded
from mptrain.workloads.base.data_files import package_folders, walk
from mptrain.workloads.base.random_streams import permutation
from mptrain.workloads.base.splits import SPLIT_SEED, hold_out
from mptrain.workloads.enhancement.photo_dataset import PhotoDataset
from mptrain.workloads.images.picture_files import EXTENSIONS

#: Import name of a package to its distribution and its folder of pictures.
_PACKAGES = {
    "sklearn": ("scikit-learn", "datasets/images"),
    "matplotlib": ("matplotlib", "mpl-data/sample_data"),
    "skimage": ("scikit-image", "data"),
}

#: Photos of each split in packages: those of every installation, and those of scikit-image. These lists must never
#: change, because results would no longer be comparable.
_ALWAYS = {"train": ("sklearn/china.jpg", "sklearn/flower.jpg"), "val": ("matplotlib/grace_hopper.jpg",)}
_SKIMAGE = {
    "train": ("skimage/astronaut.png", "skimage/rocket.jpg"),
    "test": ("skimage/chelsea.png", "skimage/coffee.png"),
}


@dataclass(kw_only=True, eq=False)
class InstalledPhotos(PhotoDataset):
    """Data set ``photos``: degraded and clean crops of photos that installed packages contain; no download is needed.

    Training uses a temple, a flower, an astronaut and a rocket, validation a portrait, the test a cat and a coffee cup.
    Half of the training photos and all test photos are from scikit-image; without ``skimage`` there is no test split.
    All photos are kept in memory. DataError is raised if a package or its files are missing.
    """

    skimage: bool = True

    name, cache_mb = "photos", 64

    @override
    def files(self) -> dict[str, list[str]]:
        sources = (_ALWAYS, _SKIMAGE) if self.skimage else (_ALWAYS,)
        splits = dict.fromkeys(split for source in sources for split in source)
        return {split: [_photo(name) for source in sources for name in source.get(split, ())] for split in splits}


@dataclass(kw_only=True, eq=False)
class PhotoFolder(PhotoDataset):
    """Data set ``photo_folder``: degraded and clean crops of the image files in a folder of the user.

    The files are in ``root/train``, ``root/val`` and ``root/test``, or all in ``root``, where whole photos are held out
    by a permutation that is the same in every run. ``val_photos`` and ``test_photos`` are their numbers if there is no
    such folder; None holds out a tenth, at least one.

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

    @override
    def files(self) -> dict[str, list[str]]:
        root = expanded(self.root)
        train = root / "train"
        splits = {"train": _photos_in(train if train.is_dir() else root)}
        for split in ("val", "test"):
            if train.is_dir() and (root / split).is_dir():
                splits[split] = _photos_in(root / split)
        everything = splits["train"]
        for split, asked in (("test", self.test_photos), ("val", self.val_photos)):
            if split in splits:
                continue
            count = max(1, len(everything) // 10) if asked is None else asked
            # A permutation for each part, of what the parts before it left: a single one would move photos.
            rest = splits["train"]
            order, sizes = permutation(len(rest), SPLIT_SEED), {split: count, "train": None}
            parts = hold_out(order, sizes, f"photos in {root}", key="photos")
            splits |= {part: [rest[index] for index in sorted(indices.tolist())] for part, indices in parts.items()}
        return splits


#: Names in configurations.
load_photos, load_photo_folder = InstalledPhotos, PhotoFolder


def _photos_in(folder: Path) -> list[str]:
    """Return the paths of the image files below a folder, sorted, without hidden ones; DataError if there are none."""
    hint = f"set dataset.root=FOLDER; known suffixes: {' '.join(sorted(EXTENSIONS))}; dataset=photos needs no own files"
    if not folder.is_dir():
        raise DataError(f"the folder of the photos, {folder}, does not exist", hint)
    photos = []
    for parent, _, names in walk(folder, EXTENSIONS):
        photos += [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in EXTENSIONS]
    if not photos:
        raise DataError(f"no images found below {folder}", hint)
    return sorted(photos)


def _photo(name: str) -> str:
    """Return the path of a photo in an installed package, without importing the package."""
    package, _, file = name.partition("/")
    distribution, folder = _PACKAGES[package]
    folders = [parent / folder for parent in package_folders(package) if (parent / folder).is_dir()]
    if not folders or not (folders[0] / file).is_file():
        other = ", or set dataset.skimage=false" if package == "skimage" else ""
        raise DataError(f"{file} of {distribution} not found", f"pip install {distribution}{other}")
    return str(folders[0] / file)
