"""Data sets made of image files: class folders, such as ImageNet's, and images without classes."""

from __future__ import annotations

from pathlib import Path

from mptrain.errors import ConfigError, DataError
from mptrain.fields import Fraction, NonNegativeInt, PositiveInt
from mptrain.workloads.base.download import NO_DOWNLOAD
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.base.partition import first_samples, hold_out, stratified_order
from mptrain.workloads.base.preparation import Preparation, luminance_of
from mptrain.workloads.images.augmentation_policies import Augment, variation
from mptrain.workloads.images.decoding import (
    Decoding,
    FolderSplit,
    Listing,
    class_folders,
    has_images,
    list_images,
    loose_images,
)
from mptrain.workloads.images.image_dataset import Channels, ImageDataset, Normalise, statistics
from mptrain.workloads.images.picture_files import EXTENSIONS

# Of the ImageNet training images; the usual constants of torchvision's reference training, for any
# photographs.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

#: The same of their luminance, which is what decoding to grey gives.
GREY_MEAN, GREY_STD = (luminance_of(MEAN),), (luminance_of(STD),)


def load_image_folder(
    *,
    root: Path = Path("data/images"),
    name: str = "image_folder",
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: Augment = True,
    random_erasing: Fraction = 0.0,
    val_samples: NonNegativeInt | None = None,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 4,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
    decode: Decoding = "full",
) -> ImageDataset:
    """Find the images of ``root/train/CLASS/``, and of ``root/val`` and ``root/test`` where these exist.

    Where there are no folders but just images, in ``root/train`` or in ``root`` itself, these have no classes: good for drawing
    others like them, and not for a classifier.

    Args:
        root: Folder with one folder for each split, or with images.
        name: What to call the data set in records.
        image_size: Side in pixels of the squares that the network sees; None makes 224.
        channels: 3 for RGB, 1 for grey; None makes 3.
        augment: Crop and mirror training images at random; ``randaugment`` and ``trivial_augment`` do so and then
            change their pixels by the policy of that name.
        random_erasing: Probability that a rectangle of a training image is replaced by the mean colour.
        val_samples: Hold so many out of ``root/train``; ``root/val`` is then the test split unless there is a
            ``root/test``. None validates on ``root/val``; where there is none, nothing is held out.
        train_samples: Train on so many only; None trains on all.
        workers: Processes that decode, at most as many as there are cores to use.
        on_error: What to do about files that cannot be decoded or are in a folder that is no class.
        normalise: ``standard`` by the means of photographs, ``symmetric`` to -1 to 1.
        decode: ``draft`` decodes a JPEG at a half, a quarter or an eighth of its size where the crop still has ``image_size``
            pixels a side: faster, with slightly other pixels. Other formats, and pictures that are not large, are decoded as by ``full``.

    Raises:
        DataError: A folder is missing, that of a class to train on or of a part is empty, or an image has no class where
            others have one.
        ConfigError: More samples are asked for than there are, or images are to be erased but not varied.
    """
    _refuse_idle_erasing(random_erasing, augment)
    size, depth = image_size or 224, channels or 3
    classes, parts = _listings(root.expanduser(), name, val_samples, train_samples, on_error)
    mean, std = (MEAN, STD) if depth == 3 else (GREY_MEAN, GREY_STD)
    varied = variation(augment, random_erasing, tuple(round(255 * value) for value in mean))
    splits = {
        part: FolderSplit(listing, size, depth, varied if part == "train" else None, faults, decode)
        for part, (listing, faults) in parts.items()
    }
    return ImageDataset(
        name=name,
        class_names=classes,
        preparation=Preparation(*statistics(mean, std, normalise), size, depth),
        augment=augment is not False,
        workers=workers,
        train=splits["train"],
        val=splits.get("val"),
        test=splits.get("test"),
        told=_classes_in_words(classes, {part: listing for part, (listing, _) in parts.items()}),
        decode=decode,
    )


def _classes_in_words(classes: tuple[str, ...], parts: dict[str, Listing]) -> str:
    """How many classes there are, and of how many a part has no image: ``4 classes, val lacks 1 of them``."""
    if not classes:
        return "without classes"
    told = f"{len(classes):,} class{'es' * (len(classes) > 1)}"
    for part in ("train", "val", "test"):
        if part in parts and (lacking := len(classes) - len(parts[part].targets.unique())):
            told += f", {part} lacks {lacking:,} of them"
    return told


def _refuse_idle_erasing(random_erasing: float, augment: Augment) -> None:
    if random_erasing > 0 and augment is False:
        raise ConfigError(
            f"dataset.random_erasing={random_erasing} with dataset.augment=false: training images are left as they are",
            "write dataset.augment=true, or dataset.random_erasing=0",
        )


def _listings(
    root: Path, name: str, val_samples: int | None, train_samples: int | None, on_error: OnError
) -> tuple[tuple[str, ...], dict[str, tuple[Listing, Faults]]]:
    """The classes, and the images of each part; see `load_image_folder`."""
    train = root / "train"
    if not train.is_dir():
        if not loose_images(root):
            if with_images := [folder for folder in _visible(root) if has_images(root / folder)]:
                shown = ", ".join(with_images[:3]) + (" and others" if len(with_images) > 3 else "")
                raise DataError(
                    f"{root} has folders with images ({shown}), and no folder train above them",
                    "expected ROOT/train/CLASS/IMAGE: make the folder ROOT/train and move those to train on into it; "
                    "dataset.val_samples=NUMBER then holds some of their images out",
                )
            raise DataError(
                f"{name} not found: looked for {train}",
                "expected ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or without classes ROOT/train/IMAGE or just "
                f"ROOT/IMAGE; set dataset.root=ROOT; {NO_DOWNLOAD}",
            )
        if folders := class_folders(root):
            raise DataError(
                f"{root} has images and folders beside them, such as {folders[0]}: which are to be trained on is not clear",
                "put those into ROOT/train, with or without class folders",
            )
        train = root
    classes = class_folders(train)
    parts: dict[str, tuple[Listing, Faults]] = {}
    for part in ("val", "test"):
        if (root / part).is_dir():
            faults = Faults(on_error)
            parts[part] = (list_images(root / part, classes, faults), faults)
    if val_samples is not None and "val" in parts:  # what is there to validate on becomes what is there to test on
        held = parts.pop("val")
        parts.setdefault("test", held)
    faults = Faults(on_error)
    everything = list_images(train, classes, faults)
    counts = everything.targets.bincount(minlength=len(classes)).tolist()
    empty = [str(train / name) for name, count in zip(classes, counts, strict=False) if not count]
    faults.report(
        dict.fromkeys(empty, "there is no image of this class"),
        f"put images there, or remove the folder; known endings: {' '.join(sorted(EXTENSIONS))}",
        skippable=False,
    )
    if val_samples:
        trained, chosen = hold_out(everything.targets, val_samples, train_samples)
        parts["val"] = (everything.select(chosen), Faults(on_error))
    else:
        trained = first_samples(stratified_order(everything.targets), train_samples)
    parts["train"] = (everything.select(trained), faults)
    return classes, parts


def _visible(root: Path) -> tuple[str, ...]:
    return class_folders(root) if root.is_dir() else ()


def load_imagenet(
    *,
    root: Path = Path("data/imagenet"),
    image_size: PositiveInt | None = None,
    channels: Channels | None = None,
    augment: Augment = True,
    random_erasing: Fraction = 0.0,
    val_samples: NonNegativeInt | None = None,
    train_samples: PositiveInt | None = None,
    workers: NonNegativeInt = 4,
    on_error: OnError = "stop",
    normalise: Normalise = "standard",
    decode: Decoding = "full",
) -> ImageDataset:
    """ImageNet (Russakovsky et al., 2015) as ``root/train/WNID/*.JPEG`` and ``root/val/WNID/*.JPEG``.

    The arguments and errors are those of `load_image_folder`. The licence allows no automatic download.
    """
    return load_image_folder(
        root=root,
        name="imagenet",
        image_size=image_size,
        channels=channels,
        augment=augment,
        random_erasing=random_erasing,
        val_samples=val_samples,
        train_samples=train_samples,
        workers=workers,
        on_error=on_error,
        normalise=normalise,
        decode=decode,
    )
