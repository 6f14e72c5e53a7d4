"""Listing of image files in folders: the folders of the splits, the folders of the classes, and the images in them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import NO_DOWNLOAD, composed, is_hidden, walk
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.images.picture_files import EXTENSIONS

#: Names of split folders, in lower case, with the split of each.
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass
class Unlisted:
    """Files and folders that belong to no split of a data set, because no rule takes them.

    ``extensions`` counts files of other kinds by extension, ``""`` without one; ``folders`` has the reason by folder.
    """

    extensions: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)

    def images_among(self, parent: str, names: list[str]) -> list[str]:
        """Return the paths of the images among the files of a folder, and count the others."""
        images = _images_among(parent, names)
        if len(images) < len(names):
            for name in sorted(names):
                ending = os.path.splitext(name)[1].lower()  # noqa: PTH122 (a path object for each takes seconds)
                if ending not in EXTENSIONS:
                    self.extensions[ending] += 1
                    self.examples.setdefault(ending, f"{parent}/{name}")
        return images

    def sentences(self) -> tuple[str, ...]:
        """Return what is left out, one sentence for each extension and folder."""
        said = [f"{folder} is not used: {reason}" for folder, reason in self.folders.items()]
        for ending, count in self.extensions.most_common():
            files = f"{ending} file{'s' * (count != 1)}".strip() + " without extension" * (not ending)
            said.append(f"no pictures, left out: {count:,} {files}, such as {self.examples[ending]}")
        return tuple(said)


@dataclass(frozen=True)
class Listing:
    """Paths of image files and the class index of each, in the order of the paths."""

    paths: tuple[str, ...]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Tensor) -> Listing:
        """Return the files with these indices, in this order."""
        return Listing(tuple(self.paths[index] for index in indices.tolist()), self.targets[indices])


def find_splits(root: Path, name: str, unlisted: Unlisted, *, trains: bool = True) -> dict[str, Path]:
    """Return the folder of each split: ``train``, and ``val`` and ``test`` where there are folders for them.

    A folder with the name of a split in `SPLITS` is that split. Without such folders, the root itself is the training
    folder, of class folders or of images without classes. ``unlisted`` receives the folders with images that are no
    split; ``trains`` is False if an evaluation of ``val`` or ``test`` needs no training folder.

    Raises:
        DataError: There is no training folder, or the layout can be read in two ways.
    """
    folders = find_classes(root) if root.is_dir() else ()
    splits: dict[str, Path] = {}
    for folder in folders:
        if split := SPLITS.get(folder.lower()):
            if split in splits:
                raise DataError(f"{root} has two folders for {split}: {splits[split].name} and {folder}", "remove one")
            splits[split] = root / folder
    loose, others = loose_images(root), [name for name in folders if name.lower() not in SPLITS]
    if "train" in splits:
        others = [folder for folder in others if has_images(root / folder)]
        if others and not find_classes(splits["train"]):
            raise DataError(
                f"{root} has images in {splits['train'].name} and in {_some(others)}: it is unclear if "
                f"{splits['train'].name} is a class",
                f"if it is a class, put all class folders into {splits['train']}; otherwise move the others away",
            )
        reason = f"beside {splits['train'].name}, only folders named val and test count"
        unlisted.folders.update({str(root / folder): reason for folder in others})
        return splits
    if loose:
        if folders:
            raise DataError(
                f"{root} has both images and folders, such as {folders[0]}: it is unclear which are for training",
                "put the training images into ROOT/train, with or without class folders",
            )
        return {"train": root}
    if splits and not trains:
        return splits
    if splits:
        there = ", ".join(folder.name for folder in splits.values())
        raise DataError(
            f"{root} has a folder named {there}, but no folder train",
            "put the training images into ROOT/train; if this is the name of a class, put all class folders there",
        )
    if any(has_images(root / folder) for folder in others):
        return {"train": root}
    raise DataError(
        f"{name} not found: looked for {root / 'train'}, and for folders with images in {root}",
        "expected ROOT/CLASS/IMAGE, or ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or for images without classes "
        f"ROOT/train/IMAGE or ROOT/IMAGE; set dataset.root=ROOT; {NO_DOWNLOAD}",
    )


def find_classes(root: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, sorted in composed form; empty if there are only images.

    They are the classes; names that differ in their Unicode form alone are one class.

    Raises:
        DataError: The folder cannot be read.
    """
    try:
        found = [entry.name for entry in root.iterdir() if entry.is_dir() and not is_hidden(entry)]
        return tuple(sorted(found, key=composed))
    except OSError as error:
        raise DataError(
            f"image folder {root} cannot be read: {error.strerror}",
            f"expected {root}/CLASS/IMAGE; set dataset.root=FOLDER; {NO_DOWNLOAD}",
        ) from error


def list_images(root: Path, class_names: tuple[str, ...], faults: Faults, unlisted: Unlisted) -> Listing:
    """Return all image files below the class folders of a split, or directly in its folder if there are no classes.

    Without classes all images get the target 0. ``faults`` records images in folders that are not classes, and images
    outside of class folders; ``unlisted`` counts the files that are not images.

    Raises:
        DataError: There are no images, or an image has no class and ``faults.on_error`` is ``stop``.
    """
    paths: list[str] = []
    targets: list[int] = []
    numbers = {composed(name): number for number, name in enumerate(class_names)}
    loose = sorted(unlisted.images_among(*_files_in(root)))
    if not class_names:
        paths += loose
        targets += [0] * len(paths)
    known = f"one of the {len(class_names)} classes" if class_names else "a class: the training images have none"
    for name in find_classes(root):
        walked = walk(root / name, EXTENSIONS)
        files = sorted(file for parent, _, names in walked for file in unlisted.images_among(parent, names))
        if (number := numbers.get(composed(name))) is not None:
            paths += files
            targets += [number] * len(files)
        else:
            faults.report(dict.fromkeys(files, f"its folder '{name}' is not {known}"))
    if loose and not paths:
        raise DataError(
            f"{root} has images, but none in the folder of a class",
            "put them into class folders as those in train, or move the folder away: images without classes are of no "
            "use beside classes",
        )
    if class_names:
        faults.report(dict.fromkeys(loose, "is not in a class folder"))
    if not paths:
        raise DataError(f"no images found below {root}", f"known extensions: {' '.join(sorted(EXTENSIONS))}")
    return Listing(tuple(paths), torch.tensor(targets, dtype=torch.int64))


def loose_images(folder: Path) -> list[str]:
    """Return the image files directly in a folder, sorted."""
    return sorted(_images_among(*_files_in(folder)))


def has_images(folder: Path) -> bool:
    """Return whether a folder has an image file at any depth; False if the search exceeds the bound of `walk`."""
    with contextlib.suppress(DataError):
        return any(_images_among(parent, names) for parent, _, names in walk(folder, EXTENSIONS, links=False))
    return False


def _files_in(folder: Path) -> tuple[str, list[str]]:
    """Return a folder as text, and the names of the files directly in it; none if it cannot be read."""
    return str(folder), next(walk(folder, EXTENSIONS))[2]


def _images_among(parent: str, names: list[str]) -> list[str]:
    # Strings, because a million path objects take seconds and hundreds of megabytes.
    return [f"{parent}/{name}" for name in names if name[name.rfind(".") :].lower() in EXTENSIONS]


def _some(names: list[str]) -> str:
    """Return the first three names, and that there are more."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
