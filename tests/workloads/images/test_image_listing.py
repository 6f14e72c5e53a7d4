"""Layouts of image folders are told apart, shares are held out by class, and what no rule takes is counted."""

from __future__ import annotations

import os
import random
import unicodedata

import pytest
from PIL import Image

from mptrain.config.compose import compose
from mptrain.run.build.workload import build_dataset
from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.images.datasets.image_folder import load_image_folder


def put(folder, count=1, start=0):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(start, start + count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:03}.png")


def load(root, **options):
    return load_image_folder(root=root, image_size=8, workers=0, **options)


def names(split):
    return [os.path.relpath(path, path.split("/data")[0] + "/data") for path in split.listing.paths]


@pytest.fixture
def classes(tmp_path):
    """Three classes of 40, 20 and 10 images, without splits, as torchvision's ImageFolder takes them."""
    for name, count in (("ant", 40), ("bee", 20), ("cat", 10)):
        put(tmp_path / "data" / name, count)
    return tmp_path / "data"


def test_class_folders_need_no_train_above_them(classes):
    put(classes / "cat" / "below", 2, start=10)
    data = load(classes)
    assert data.class_names == ("ant", "bee", "cat")
    assert (len(data.train) + len(data.val), data.test, data.warnings) == (72, None, ())
    assert data.describe().endswith(f"; {len(data.val)} images held out for val by default (dataset.val_share)")
    assert names(data.val) == names(load(classes, val_share=0.1).val) != []
    everything = load(classes, val_share=0.0, test_share=0.0)
    assert everything.train.listing.targets.bincount().tolist() == [40, 20, 12]
    assert (everything.val, everything.test, everything.describe()) == (None, None, "3x8x8, 3 classes")
    assert len(load(classes, test_share=0.001).test) == 1
    divided = load(classes, val_share=0.1, test_share=0.2)
    parts = [set(names(part)) for part in (divided.train, divided.val, divided.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 72
    assert (divided.val.varied, divided.test.varied) == (None, None)


@pytest.mark.parametrize("word", ["val", "valid", "Validation"])
def test_split_folders_are_known_by_several_names(classes, tmp_path, word):
    classes.rename(tmp_path / "all")
    classes.mkdir()
    (tmp_path / "all").rename(classes / "Train")
    put(classes / word / "ant", 3)
    put(classes / "test" / "bee", 2)
    data = load(classes)
    assert [len(part) for part in (data.train, data.val, data.test)] == [70, 3, 2]
    assert data.test.listing.targets.tolist() == [1, 1]
    put(classes / "val" / "ant", 1)
    if word != "val":
        with pytest.raises(DataError, match="has two folders for val: "):
            load(classes)


def test_images_held_out_depend_on_names_and_split_seed(classes, tmp_path, monkeypatch):
    shares = {"val_share": 0.1, "test_share": 0.1}
    first = load(classes, **shares)
    classes.rename(tmp_path / "data2")
    walk = os.walk

    def in_another_order(*words, **options):
        for parent, folders, files in walk(*words, **options):
            random.Random(5).shuffle(files)
            yield parent, folders, files

    monkeypatch.setattr(os, "walk", in_another_order)
    again = load(tmp_path / "data2", **shares)
    for part in ("train", "val", "test"):
        held = [path.rpartition("data2/")[2] for path in getattr(again, part).listing.paths]
        assert held == [path.rpartition("data/")[2] for path in getattr(first, part).listing.paths], part
    (tmp_path / "data2" / "ant" / "004.png").rename(tmp_path / "data2" / "ant" / "004.jpg")  # converted
    kept = load(tmp_path / "data2", **shares)
    assert [len(part) for part in (kept.val, kept.test)] == [len(part) for part in (first.val, first.test)]
    other = load(tmp_path / "data2", **shares, split_seed=1)
    assert other.val.listing.targets.tolist() != [] != again.val.listing.targets.tolist()
    assert set(other.val.listing.paths) != set(again.val.listing.paths)


def test_a_share_of_training_images_makes_val_the_test_split(classes, tmp_path):
    root = tmp_path / "splits"
    root.mkdir()
    classes.rename(root / "train")
    put(root / "val" / "ant", 3)
    data = load(root, val_share=0.1)
    assert len(data.train) + len(data.val) == 70
    assert (len(data.val), len(data.test)) == (len(load(root / "train", val_share=0.1).val), 3)
    with pytest.raises(ConfigError, match=r"(?m)dataset.test_share=0.1, but the test images are those in .*val$"):
        load(root, val_share=0.1, test_share=0.1)
    put(root / "test" / "ant", 2)
    data = load(root, val_share=0.1)
    assert len(data.test) == 2
    assert data.warnings == (f"{root}/val is not used: the validation images are held out of those for training",)
    with pytest.raises(ConfigError, match=r"(?m)dataset.test_share=0.5, but the test images are those in .*test$"):
        load(root, test_share=0.5)


def test_contradictions_are_listed_at_once(classes):
    with pytest.raises(ConfigError) as caught:
        load(classes, val_samples=5, val_share=0.6, test_share=0.4)
    assert [problem.what for problem in caught.value.problems] == [
        "dataset.val_samples=5 contradicts dataset.val_share=0.6",
        "dataset.val_share=0.6 and test_share=0.4 leave nothing to train on",
    ]


def test_shares_of_too_few_images_are_refused(tmp_path):
    put(tmp_path, 2)
    with pytest.raises(
        ConfigError, match=r"dataset.(val|test)_share=0.1 holds out none of 2 images, because each class"
    ):
        load(tmp_path, val_share=0.1, test_share=0.1)
    with pytest.raises(ConfigError, match=r"dataset.val_samples=2 would hold out all 2 training samples"):
        load(tmp_path, val_samples=2)
    put(tmp_path, 8, start=2)
    data = load(tmp_path, val_share=0.2)
    assert (len(data.train) + len(data.val), len(data.val) > 0, data.class_names) == (10, True, ())
    assert load(tmp_path).val is None


def test_a_class_with_the_name_of_a_split_is_not_guessed_at(classes):
    put(classes / "test", 3)
    with pytest.raises(DataError, match="has a folder named test, but no folder train") as caught:
        load(classes)
    assert "the name of a class, put all class folders there" in caught.value.hint
    put(classes / "train", 3)
    with pytest.raises(DataError, match=r"has images in train and in ant, bee, cat: it is unclear if train is a class"):
        load(classes)


def test_folders_beside_the_splits_are_named_and_left_out(tmp_path):
    put(tmp_path / "train" / "ant", 2)
    put(tmp_path / "raw", 1)
    (tmp_path / "notes").mkdir()
    data = load(tmp_path, val_share=0.0)
    assert data.class_names == ("ant",)
    assert data.warnings == (f"{tmp_path}/raw is not used: beside train, only folders named val and test count",)


def test_a_test_folder_without_classes_is_an_error(tmp_path):
    put(tmp_path / "train" / "ant", 2)
    put(tmp_path / "test", 2)
    with pytest.raises(DataError, match="test has images, but none in the folder of a class") as caught:
        load(tmp_path, on_error="skip")
    assert "move the folder away" in caught.value.hint


def test_files_that_are_no_pictures_are_counted_by_extension(classes):
    for name in ("ant/a.txt", "cat/b.TXT", "labels.csv", "README", ".DS_Store"):
        (classes / name).write_text("no picture")
    data = load(classes, val_share=0.1)
    assert data.warnings == (
        f"no pictures, left out: 2 .txt files, such as {classes}/ant/a.txt",
        f"no pictures, left out: 1 file without extension, such as {classes}/README",
        f"no pictures, left out: 1 .csv file, such as {classes}/labels.csv",
    )
    assert data.card()["other_files"] == {".txt": 2, ".csv": 1, "": 1}
    (classes / "labels.csv").unlink()
    assert "other_files" not in load(classes / "bee").card()


def test_another_folder_is_evaluated_with_the_runs_classes(classes, tmp_path):
    labels = ("ant", "bee", "cat", "dog")
    data = load(classes, labels=labels, val_share=0.1)
    assert (data.val, len(data.test), data.test.varied, data.class_names) == (None, 70, None, labels)
    put(tmp_path / "other" / "test" / "cat", 3)
    other = load(tmp_path / "other", labels=labels)
    assert (other.val, other.test.listing.targets.tolist()) == (None, [2, 2, 2])
    put(tmp_path / "other" / "test" / "eel", 1)
    with pytest.raises(DataError, match="its folder 'eel' is not one of the 4 classes"):
        load(tmp_path / "other", labels=labels)
    with pytest.raises(DataError, match="has a folder named test, but no folder train"):
        load(tmp_path / "other")


JUNK = (
    "ant/._000.png",
    "ant/.ipynb_checkpoints/000.png",
    ".ipynb_checkpoints/000.png",
    "__MACOSX/ant/._000.png",
    ".DS_Store",
)


@pytest.mark.parametrize("place", ["", "train"])
def test_what_macos_and_notebooks_leave_behind_is_no_class_and_no_image_and_is_told(classes, place):
    if place:
        classes.rename(classes.with_name("all"))
        classes.mkdir()
        classes.with_name("all").rename(classes / place)
    before = names(load(classes, val_share=0.0).train)
    for name in JUNK:
        (classes / place / name).parent.mkdir(parents=True, exist_ok=True)
        (classes / place / name).write_bytes(b"\0\5\26\7Mac OS X")
    (classes / "__MACOSX").mkdir(exist_ok=True)
    words = ["dataset=image_folder", f"dataset.root={classes}", "dataset.val_share=0.0", "dataset.image_size=8"]
    data = build_dataset(compose(words))
    assert data.class_names == ("ant", "bee", "cat")
    assert names(data.train) == before
    assert any(said.startswith("left out: ") and "hidden files or folders, such as" in said for said in data.warnings)
    assert not any("__MACOSX is not used" in said for said in data.warnings)


@pytest.mark.parametrize(("train", "val"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_classes_are_the_same_in_either_unicode_form(tmp_path, train, val):
    words = ("caf\u00e9", "na\u00efve", "\uac00")
    for split, form in (("train", train), ("val", val)):
        for word in words:
            put(tmp_path / split / unicodedata.normalize(form, word), 2)
    data = load(tmp_path)
    assert data.class_names == tuple(sorted(words))
    assert data.val.listing.targets.tolist() == sorted(data.train.listing.targets.tolist()) == [0, 0, 1, 1, 2, 2]
    own = load(tmp_path / "val", labels=tuple(unicodedata.normalize(train, word) for word in sorted(words)))
    assert own.test.listing.targets.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_class_in_both_forms_is_one_and_the_division_does_not_depend_on_the_form(tmp_path):
    put(tmp_path / "both" / "caf\u00e9", 3)
    put(tmp_path / "both" / "cafe\u0301", 3, start=3)
    put(tmp_path / "both" / "tea", 2)
    assert load(tmp_path / "both", val_share=0.0).train.listing.targets.bincount().tolist() == [6, 2]
    held = []
    for form in ("NFC", "NFD"):
        for word in ("caf\u00e9", "th\u00e9"):
            put(tmp_path / form / unicodedata.normalize(form, word), 20)
        paths = load(tmp_path / form, val_share=0.3).val.listing.paths
        held.append([unicodedata.normalize("NFC", path.rpartition(form)[2]) for path in paths])
    assert held[0] == held[1] != []
