"""Image folders: classes from names, crops from (seed, epoch, index), bad files named or skipped."""

from __future__ import annotations

import io
import math

import pytest
import torch
from PIL import Image

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.images.augmentation import CENTRE, centre_box, random_box
from mptrain.workloads.images.datasets.image_folder import decode, load_image_folder, load_imagenet


def picture(shade, size=(20, 12), mode="RGB"):
    image = Image.new(mode, size, shade)
    image.putpixel((0, 0), 255 if mode == "L" else (255, 0, 0))
    return image


@pytest.fixture
def root(tmp_path):
    for part, count in (("train", 6), ("val", 2)):
        for number, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for item in range(count):
                picture((40 * number, 10 * item, 99)).save(folder / f"{item}.png")
    return tmp_path


def truncated_jpeg():
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "JPEG")
    return file.getvalue()[: len(file.getvalue()) // 2]


def test_classes_are_the_sorted_folder_names_and_labels_follow(root):
    data = load_image_folder(root=root, image_size=8, workers=0)
    assert data.class_names == ("ant", "bee", "cat")
    assert data.describe() == "3x8x8, 3 classes"
    assert [len(data.train), len(data.val), data.test] == [18, 6, None]
    batch = data.val.fetch(range(6), 0, 0)
    assert batch.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert (tuple(batch.inputs.shape), batch.inputs.dtype) == ((6, 3, 8, 8), torch.uint8)
    assert batch.inputs[:, :, 4, 4].tolist() == [[40 * n, 10 * i, 99] for n in range(3) for i in range(2)]


def test_held_out_samples_leave_val_as_the_test_split(root):
    data = load_image_folder(root=root, image_size=8, val_samples=6, workers=0)
    assert [len(data.train), len(data.val), len(data.test)] == [12, 6, 6]
    assert not set(data.train.listing.paths) & set(data.val.listing.paths)
    assert set(data.val.listing.paths) <= set(load_image_folder(root=root, val_samples=8).val.listing.paths)
    assert data.val.varied is None
    none = load_image_folder(root=root, image_size=8, val_samples=0, train_samples=6)
    assert (none.val, len(none.test)) == (None, 6)
    assert none.train.listing.targets.bincount().tolist() == [2, 2, 2]


@pytest.mark.parametrize(("augment", "erasing"), [(True, 0.0), ("randaugment", 0.3), ("trivial_augment", 0.3)])
def test_augmentation_depends_on_seed_epoch_and_index_alone(root, augment, erasing):
    data = load_image_folder(root=root, image_size=8, augment=augment, random_erasing=erasing)

    def epoch_of(batch_size, workers=0, epoch=1, seed=5):
        loader = Loader(data.train, batch_size, seed, shuffle=False, workers=workers)
        images = torch.cat([batch.inputs for batch in loader.batches(epoch)])
        loader.close()
        return images

    images = epoch_of(4, workers=2)
    assert images.dtype == torch.uint8
    torch.manual_seed(1)
    assert torch.equal(epoch_of(7), images)
    assert not torch.equal(epoch_of(4, epoch=2), images)
    assert not torch.equal(epoch_of(4, seed=6), images)
    with pytest.raises(ConfigError, match=r"dataset\.random_erasing=0\.5 with dataset\.augment=false"):
        load_image_folder(root=root, augment=False, random_erasing=0.5)


BAD = {"empty.png": b"", "header.jpg": b"GIF89a", "cut.jpg": truncated_jpeg(), "text.jpg": b"text"}


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_named_or_skipped_and_counted_once(root, workers):
    paths = [root / "train" / "ant" / name for name in BAD]
    for path in paths:
        path.write_bytes(BAD[path.name])
        train = load_image_folder(root=root, image_size=8).train
        with pytest.raises(DataError, match=f"{path}: cannot be decoded: ") as caught:
            train.fetch([train.listing.paths.index(str(path))], 0, 0)
        assert "dataset.on_error=skip" in caught.value.hint
    data = load_image_folder(root=root, image_size=8, on_error="skip")
    loader = Loader(data.train, 5, 0, shuffle=True, workers=workers)
    for epoch in range(2):
        batches = list(loader.batches(epoch))
        assert sum(batch.terms for batch in batches) == 18
        assert len(batches) == loader.steps_per_epoch == 5
        assert all(len(batch.inputs) == len(batch.targets) == batch.terms for batch in batches)
    assert set(data.train.faults.unusable) == {str(path) for path in paths}
    loader.close()
    bad = [data.train.listing.paths.index(str(path)) for path in paths]
    with pytest.raises(DataError, match="no image of the batch is usable"):
        data.train.fetch(bad, 0, 0)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("val/dog/rex.png", "its folder 'dog' is not one of the 3 classes"),
        ("train/rex.png", "is not in a class folder"),
    ],
)
def test_images_of_no_class_stop_or_are_counted(root, place, said):
    (root / place).parent.mkdir(exist_ok=True)
    picture((1, 2, 3)).save(root / place)
    with pytest.raises(DataError, match=f"{place}: {said}"):
        load_image_folder(root=root)
    data = load_image_folder(root=root, on_error="skip")
    assert (len(data.train), len(data.val), data.train.skipped + data.val.skipped) == (18, 6, 1)


@pytest.mark.parametrize("place", [".", "train"])
def test_images_without_class_folders_have_no_classes(tmp_path, place):
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    for number in range(10):
        picture((number, 0, 0)).save(folder / f"{number}.png")
    data = load_image_folder(root=tmp_path, image_size=8, val_samples=2)
    assert [len(data.train), len(data.val), data.test] == [8, 2, None]
    assert data.train.fetch(range(8), 0, 0).targets.tolist() == [0] * 8
    assert data.facts() == {"in_channels": 3, "image_size": 8, "input_shape": (3, 8, 8)}
    assert (data.describe(), data.card()["labels"]) == ("3x8x8, no classes", [])
    assert "put those of each class into ROOT/CLASS" in data.lacks["num_classes"].hint
    if place == "train":
        (tmp_path / "val/ant").mkdir(parents=True)
        picture((9, 9, 9)).save(tmp_path / "val/ant/b.png")
        with pytest.raises(DataError, match=r"val/ant/b.png: its folder 'ant' is not a class"):
            load_image_folder(root=tmp_path)


def test_images_with_folders_beside_them_are_not_guessed_at(tmp_path):
    picture((9, 9, 9)).save(tmp_path / "a.png")
    (tmp_path / "thumbs").mkdir()
    with pytest.raises(DataError, match=r"has both images and folders, such as thumbs") as caught:
        load_image_folder(root=tmp_path)
    assert "ROOT/train" in caught.value.hint


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_class_without_an_image_is_named_even_when_skipping(root, on_error):
    (root / "train" / ".cache").mkdir()
    assert load_image_folder(root=root).class_names == ("ant", "bee", "cat")
    for path in (root / "val" / "bee").iterdir():
        path.unlink()
    few = load_image_folder(root=root, image_size=8, train_samples=2, val_samples=1)
    missing = ", ".join(f"{count} without images in {part}" for count, part in ((1, "train"), (2, "val"), (1, "test")))
    assert few.describe() == f"3x8x8, 3 classes, {missing}"
    for name in ("dog", "eel"):
        (root / "train" / name).mkdir()
    (root / "train" / "dog" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"train/dog: the class has no images \(and 1 more like it\)") as caught:
        load_image_folder(root=root, on_error=on_error)
    assert "on_error" not in caught.value.hint


def test_a_single_class_is_nothing_to_tell_apart(root):
    assert load_image_folder(root=root).facts()["num_classes"] == 3
    assert load_image_folder(root=root).lacks == {}
    for part in ("train", "val"):
        for name in ("bee", "cat"):
            (root / part / name).rename(root / f"{part}-{name}")
    data = load_image_folder(root=root)
    assert "num_classes" not in data.facts()
    assert data.lacks["num_classes"].what.startswith("the images are all in one class folder, ant")
    assert data.card()["labels"] == ["ant"]


def test_missing_folders_are_told_with_a_way_out(tmp_path):
    with pytest.raises(DataError, match=f"imagenet not found: looked for {tmp_path / 'train'}") as caught:
        load_imagenet(root=tmp_path)
    assert "dataset=digits needs no download" in caught.value.hint
    for folder in ("train", "train/ant"):
        (tmp_path / folder).mkdir()
        with pytest.raises(DataError, match="no images found"):
            load_imagenet(root=tmp_path)


def test_the_centre_is_resize_to_256_and_crop_of_224():
    left, upper, right, lower = centre_box(512, 256, CENTRE)
    assert (right - left, lower - upper) == (224, 224)
    assert ((left + right) / 2, (upper + lower) / 2) == (256, 128)


def test_random_parts_have_the_stated_areas_and_ratios():
    areas, ratios = [], []
    for numbers in uniforms(0, 0, range(3000), 40).tolist():
        left, upper, right, lower = random_box(350, 350, numbers)
        assert 0 <= left < right <= 350
        assert 0 <= upper < lower <= 350
        areas.append((right - left) * (lower - upper) / 350**2)
        ratios.append((right - left) / (lower - upper))
    assert min(areas) == pytest.approx(0.08, abs=0.01)
    assert max(areas) == pytest.approx(1.0, abs=0.02)
    assert min(ratios) > 0.74
    assert max(ratios) < 1.35
    assert abs(sum(map(math.log, ratios)) / 3000) < 0.02


def test_a_picture_too_long_for_any_try_falls_back_to_its_centre():
    assert random_box(1000, 10, [0.99] * 40) == (493, 0, 506, 10)
    assert random_box(10, 1000, [0.99] * 40) == (0, 493, 10, 506)


def test_mirroring_follows_the_first_draw(tmp_path):
    image = Image.new("L", (8, 8))
    image.putpixel((0, 3), 200)
    image.save(tmp_path / "dot.png")
    whole = [1 - 1e-12, 0.5, 0.0, 0.0] * 10  # all of the area, square
    kept = decode(str(tmp_path / "dot.png"), 8, 1, [0.7, *whole], Faults())
    mirrored = decode(str(tmp_path / "dot.png"), 8, 1, [0.2, *whole], Faults())
    assert kept[0, 3, 0] == 200
    assert torch.equal(mirrored, kept.flip(2))


def test_a_folder_that_has_gone_is_told_from_a_broken_file(root):
    dataset = load_image_folder(root=root, image_size=8, workers=0)
    (root / "train").rename(root / "away")
    with pytest.raises(DataError, match=rf"(?m)ant/.*: the folder {root}/train no longer exists$") as gone:
        dataset.train.fetch([0, 1], 0, 0)
    assert "resume" in gone.value.hint
    (root / "away").rename(root / "train")
    next((root / "train/ant").iterdir()).unlink()
    with pytest.raises(DataError, match=r"cannot be decoded: .*No such file"):
        dataset.train.fetch(list(range(len(dataset.train))), 0, 0)
