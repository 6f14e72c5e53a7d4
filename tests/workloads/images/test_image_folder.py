"""Image folders: classes from names, crops from (seed, epoch, index), bad files named or skipped."""

from __future__ import annotations

import io
import math

import pytest
import torch
from PIL import Image

from mptrain.system.errors import DataError
from mptrain.workloads.base.faulty_samples import Faults
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
    none = load_image_folder(root=root, image_size=8, val_samples=0)
    assert (none.val, len(none.test)) == (None, 6)


def test_a_subset_for_training_holds_all_classes(root):
    data = load_image_folder(root=root, image_size=8, train_samples=6)
    assert data.train.listing.targets.bincount().tolist() == [2, 2, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_seed_epoch_and_index_alone(root, workers):
    def epoch_of(batch_size, workers, epoch=1, seed=5):
        data = load_image_folder(root=root, image_size=8)
        loader = Loader(data.train, batch_size, seed, shuffle=False, workers=workers)
        images = torch.cat([batch.inputs for batch in loader.batches(epoch)])
        loader.close()
        return images

    images = epoch_of(4, workers)
    torch.manual_seed(1)
    assert torch.equal(epoch_of(7, 0), images)
    assert not torch.equal(epoch_of(4, workers, epoch=2), images)
    assert not torch.equal(epoch_of(4, workers, seed=6), images)


@pytest.mark.parametrize("content", [b"", b"GIF89a", truncated_jpeg(), b"text"], ids=["empty", "header", "cut", "text"])
def test_a_bad_image_stops_and_is_named(root, content):
    bad = root / "train" / "bee" / "bad.jpg"
    bad.write_bytes(content)
    data = load_image_folder(root=root, image_size=8)
    with pytest.raises(DataError) as caught:
        list(Loader(data.train, 4, 0, shuffle=True).batches(0))
    assert f"{bad}: cannot be decoded: " in str(caught.value)
    assert "dataset.on_error=skip" in caught.value.hint


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_named_and_counted_once(root, workers):
    paths = [root / "train" / "ant" / "bad.jpg", root / "train" / "cat" / "empty.png"]
    paths[0].write_bytes(truncated_jpeg())
    paths[1].write_bytes(b"")
    data = load_image_folder(root=root, image_size=8, on_error="skip")
    loader = Loader(data.train, 5, 0, shuffle=True, workers=workers)
    for epoch in range(2):
        batches = list(loader.batches(epoch))
        assert sum(batch.terms for batch in batches) == 18
        assert len(batches) == loader.steps_per_epoch == 4
        assert all(len(batch.inputs) == len(batch.targets) == batch.terms for batch in batches)
    assert data.train.skipped == 2
    assert set(data.train.faults.found) == {str(path) for path in paths}
    loader.close()


def test_a_batch_without_one_good_image_is_an_error_even_when_skipping(root):
    for path in (root / "val" / "ant").iterdir():
        path.write_bytes(b"")
    data = load_image_folder(root=root, image_size=8, on_error="skip")
    with pytest.raises(DataError, match=r"no image of the batch is usable.*val/ant/0.png"):
        data.val.fetch([0, 1], 0, 0)


def test_a_folder_that_is_no_class_stops_or_is_skipped(root):
    (root / "val" / "dog").mkdir()
    picture((1, 2, 3)).save(root / "val" / "dog" / "rex.png")
    with pytest.raises(DataError, match=r"dog/rex.png: its folder 'dog' is not one of the 3 classes"):
        load_image_folder(root=root)
    data = load_image_folder(root=root, on_error="skip")
    assert (len(data.val), data.val.skipped) == (6, 1)


def test_images_beside_class_folders_stop_or_are_counted(root):
    picture((1, 2, 3)).save(root / "train" / "rex.png")
    with pytest.raises(DataError, match=r"train/rex.png: is not in a class folder"):
        load_image_folder(root=root)
    train = load_image_folder(root=root, on_error="skip").train
    assert (len(train), train.skipped) == (18, 1)


@pytest.mark.parametrize("place", [".", "train"])
def test_images_without_class_folders_have_no_classes(tmp_path, place):
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    for number in range(10):
        picture((number, 0, 0)).save(folder / f"{number}.png")
    data = load_image_folder(root=tmp_path, image_size=8, val_samples=2)
    assert [len(data.train), len(data.val), data.test] == [8, 2, None]
    assert data.train.fetch(range(8), 0, 0).targets.tolist() == [0] * 8
    assert data.facts() == {"in_channels": 3, "image_size": 8}
    assert data.describe() == "3x8x8, no classes"
    assert data.card()["labels"] == []
    assert "put those of each class into ROOT/CLASS" in data.lacks["num_classes"].hint


def test_images_with_folders_beside_them_and_no_train_are_not_guessed_at(tmp_path):
    picture((9, 9, 9)).save(tmp_path / "a.png")
    (tmp_path / "thumbs").mkdir()
    with pytest.raises(DataError, match=r"has both images and folders, such as thumbs") as caught:
        load_image_folder(root=tmp_path)
    assert "ROOT/train" in caught.value.hint


def test_other_parts_of_images_without_classes_have_none_either(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        picture((9, 9, 9)).save(tmp_path / part / "a.png")
    data = load_image_folder(root=tmp_path)
    assert (len(data.train), len(data.val)) == (1, 1)
    (tmp_path / "val" / "ant").mkdir()
    picture((9, 9, 9)).save(tmp_path / "val" / "ant" / "b.png")
    with pytest.raises(DataError, match=r"val/ant/b.png: its folder 'ant' is not a class"):
        load_image_folder(root=tmp_path)


def test_a_class_without_an_image_to_train_on_is_named_also_when_skipping(root):
    (root / "train" / ".cache").mkdir()
    assert load_image_folder(root=root).class_names == ("ant", "bee", "cat")
    for name in ("dog", "eel"):
        (root / "train" / name).mkdir()
    (root / "train" / "dog" / "notes.txt").write_text("no image")
    for on_error in ("stop", "skip"):
        with pytest.raises(DataError, match=r"train/dog: the class has no images \(and 1 more like it\)") as caught:
            load_image_folder(root=root, on_error=on_error)
        assert "on_error" not in caught.value.hint


def test_classes_that_a_part_lacks_are_counted(root):
    for place in (root / "val" / "bee").iterdir():
        place.unlink()
    assert load_image_folder(root=root, image_size=8).describe() == "3x8x8, 3 classes, 1 without images in val"
    few = load_image_folder(root=root, image_size=8, train_samples=2, val_samples=1)
    assert (
        few.describe()
        == "3x8x8, 3 classes, 1 without images in train, 2 without images in val, 1 without images in test"
    )


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
    with pytest.raises(DataError) as caught:
        load_imagenet(root=tmp_path)
    said = f"imagenet not found: looked for {tmp_path / 'train'}, and for folders with images in {tmp_path}"
    assert str(caught.value) == said
    assert "dataset=digits needs no download" in caught.value.hint
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="no images found"):
        load_imagenet(root=tmp_path)
    (tmp_path / "train" / "ant").mkdir()
    with pytest.raises(DataError, match="no images found"):
        load_imagenet(root=tmp_path)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_common_kind_of_picture_becomes_bytes(tmp_path, mode, channels):
    path = tmp_path / "image.tiff"
    Image.new("RGB", (9, 7), (200, 200, 200)).convert(mode).save(path)
    values = decode(str(path), 4, channels, None, Faults())
    assert (tuple(values.shape), values.dtype) == ((channels, 4, 4), torch.uint8)


def test_the_centre_is_resize_to_256_and_crop_of_224():
    left, upper, right, lower = centre_box(512, 256, CENTRE)
    assert (right - left, lower - upper) == (224, 224)
    assert ((left + right) / 2, (upper + lower) / 2) == (256, 128)


def test_random_parts_have_the_stated_areas_and_ratios_and_stay_inside():
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


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_folder_that_has_gone_is_told_from_a_file_that_is_broken(root, on_error):
    dataset = load_image_folder(root=root, image_size=8, workers=0, on_error=on_error)
    (root / "train").rename(root / "away")
    if on_error == "skip":
        with pytest.raises(DataError, match="no image of the batch is usable"):
            dataset.train.fetch([0, 1], 0, 0)
        return
    with pytest.raises(DataError, match=rf"ant/.*: the folder {root}/train no longer exists$") as gone:
        dataset.train.fetch([0, 1], 0, 0)
    assert gone.value.hint == "restore the folder, then resume the run from its last checkpoint"
    (root / "away").rename(root / "train")
    next((root / "train/ant").iterdir()).unlink()
    with pytest.raises(DataError, match=r"cannot be decoded: .*No such file"):
        dataset.train.fetch(list(range(len(dataset.train))), 0, 0)
