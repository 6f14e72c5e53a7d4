"""Pascal VOC's folders: what the XML files say, lists, downloads, and files that are wrong."""

from __future__ import annotations

import pytest
import torchvision
from PIL import Image

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.detection.boxes import DIFFICULT, OBJECT
from mptrain.workloads.detection.datasets.voc import load_voc

OWN = {"train": ["mine/train"], "val": ["mine/val"], "test": [], "classes": ["cat", "dog"], "image_size": 32}


def thing(name, *corners, difficult=None):
    keys = "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
    extra = "" if difficult is None else f"<difficult>{difficult}</difficult>"
    return f"<object><name>{name}</name>{extra}<bndbox>{keys}</bndbox></object>"


def annotation(*things, size=(40, 20)):
    said = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation>{said}{''.join(things)}</annotation>"


def add(folder, name, xml, mode="RGB", size=(40, 20)):
    (folder / "Annotations").mkdir(parents=True, exist_ok=True)
    (folder / "JPEGImages").mkdir(exist_ok=True)
    (folder / "Annotations" / f"{name}.xml").write_text(xml)
    Image.new(mode, size, 99 if mode == "L" else (9, 99, 200)).save(folder / "JPEGImages" / f"{name}.jpg")


def write_list(folder, name, *lines):
    (folder / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
    (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "mine"
    add(folder, "a", annotation(thing("cat", 1, 1, 20, 10), thing("dog", 21, 11, 40, 20, difficult=1)))
    add(folder, "b", annotation(), mode="L")
    add(folder, "c", annotation(thing("dog", 5, 5, 15, 15, difficult=0), size=None))
    write_list(folder, "train", "a", "b", "c")
    write_list(folder, "val", "a  1", "")
    return tmp_path


def test_boxes_classes_and_difficult_ones_are_read(root):
    """VOC counts pixels from 1 and includes the last: 1 to 20 are the first twenty."""
    data = load_voc(root=root, augment=False, **OWN)
    batch = data.train.fetch([0, 1, 2], 0, 0)
    assert data.class_names == ("cat", "dog")
    assert batch.extras["labels"].tolist() == [[0, 1], [-1, -1], [1, -1]]
    assert batch.extras["kinds"].tolist() == [[OBJECT, DIFFICULT], [0, 0], [OBJECT, 0]]
    assert batch.targets[0].flatten().tolist() == pytest.approx([0, 0, 16, 16, 16, 16, 32, 32])
    assert (len(data.train), len(data.val), data.test) == (3, 1, None)
    assert data.facts() == {
        "num_classes": 2, "class_names": ("cat", "dog"), "in_channels": 3, "image_size": 32, "boxes": "pixels",
        "num_outputs": 2, "input_shape": (3, 32, 32),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "lists", "count"), [("", ["mine/train"], 3), ("mine", ["train"], 3), ("", ["mine/train", "mine/val"], 4)]
)
def test_a_part_is_several_lists_which_may_lie_in_the_root(root, folder, lists, count):
    assert len(load_voc(root=root / folder, **{**OWN, "train": lists, "val": []}).train) == count


def test_published_classes_are_the_default(root):
    write_list(root / "mine", "own", "c")
    add(root / "mine", "c", annotation(thing("dog", -5, 5, 15, 15), thing("cat", 0, 0, 41, 20), size=None))
    data = load_voc(root=root, train=["mine/own"], val=[], test=[])
    assert len(data.class_names) == 20
    found = data.train.fetch([0], 0, 0).extras["labels"][0, 0]
    assert data.class_names[found] in ("cat", "dog")
    assert data.describe() == "3x300x300, 1 box clipped at the edge"
    assert len(load_voc(root=root, train_samples=2, **OWN).train) == 2


WRONG = {
    "is not valid XML": "<annotation><object>",
    "no element found": "",
    "unknown encoding": "<?xml version='1.0' encoding='klingon'?><annotation/>",
    "'bird', which is not in dataset.classes": annotation(thing("bird", 1, 1, 9, 9)),
    "did you mean cat": annotation(thing("cats", 1, 1, 9, 9)),
    "no bndbox": annotation("<object><name>cat</name></object>"),
    "xmin is 'left', which is not a finite number": annotation(thing("cat", "left", 1, 9, 9)),
    "bndbox: xmax is 'nan', which is not a finite number": annotation(thing("cat", 1, 1, "nan", 9)),
    "size: width is 'inf', which is not a finite number": annotation(thing("cat", 1, 1, 9, 9), size=("inf", 20)),
    "box 1 \\(9, 0, 5, 9\\) has no area": annotation(thing("cat", 10, 1, 5, 9)),
    "\\(49, 29, 60, 40\\) has no area inside": annotation(thing("cat", 50, 30, 60, 40)),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_annotation_is_named_or_skipped_and_counted(root, stops_or_skips, said):
    add(root / "mine", "c", WRONG[said])
    data = stops_or_skips(load_voc, rf"c\.xml: .*{said}", root=root, **OWN)
    assert (len(data.train), data.val.skipped) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"train": ["mine/empty"]}, DataError, "names no picture"),
        (
            {"train": ["mine/none"]},
            DataError,
            "the list mine/none was not found",
        ),
        ({"train": ["none"]}, DataError, "the list none was not found"),
        ({"train": []}, DataError, "no training pictures"),
        ({"val": ["mine/bare"]}, DataError, "none of 1 pictures has a box"),
        ({"val": ["mine/gone"]}, DataError, r"d\.xml: cannot be read"),
        ({"classes": []}, ConfigError, "classes"),
        ({"classes": ["cat", "cat"]}, ConfigError, "classes"),
        ({"train_samples": 4}, ConfigError, "train_samples=4"),
    ],
)
def test_lists_and_classes_that_cannot_be_used_are_named(root, changes, error, said):
    for name, lines in {"empty": [], "bare": ["b"], "gone": ["d"]}.items():
        write_list(root / "mine", name, *lines)
    with pytest.raises(error, match=said):
        load_voc(root=root, **{**OWN, **changes})


def test_a_missing_year_is_fetched_through_torchvision(tmp_path, monkeypatch):
    asked = []

    def fetch(root, year, image_set, download):
        asked.append((str(root), year, image_set, download))
        folder = tmp_path / "VOCdevkit" / "VOC2007"
        add(folder, "000001", annotation(thing("dog", 1, 1, 9, 9)))
        write_list(folder, "trainval", "000001")

    monkeypatch.setattr(torchvision.datasets, "VOCDetection", fetch)
    data = load_voc(root=tmp_path, train=["VOC2007/trainval"], val=[], test=[])
    assert len(data.train) == 1
    assert asked == [(str(tmp_path), "2007", "trainval", True)]
    load_voc(root=tmp_path, train=["VOC2007/trainval"], val=[], test=[])
    assert len(asked) == 1


@pytest.mark.parametrize(("own", "download"), [(False, True), (False, False), (True, True)])
def test_data_that_cannot_be_had_are_named_with_a_way_out(root, tmp_path, monkeypatch, own, download):
    def fail(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "VOCDetection", fail)
    with pytest.raises(DataError, match="no route to host" if download else "VOC2007") as raised:
        load_voc(root=root if own else tmp_path / "none", download=download)
    assert "no download" in raised.value.hint


@pytest.mark.parametrize("inside", [True, False])
def test_lists_that_are_there_are_named_with_their_words(root, monkeypatch, inside):
    monkeypatch.setattr(torchvision.datasets, "VOCDetection", lambda *args, **kwargs: pytest.fail("fetched"))
    folder = "" if inside else "mine/"
    choice = {"root": root / "mine"} if inside else {"root": root, "train": ["mine/nosuch"]}
    with pytest.raises(DataError, match=rf"(?m)has the lists {folder}train, {folder}val$") as error:
        load_voc(**choice)
    assert f"'dataset.train=[{folder}train]' 'dataset.val=[{folder}val]' 'dataset.test=[]'" in error.value.hint


def test_names_of_files_and_classes_are_found_in_either_unicode_form(tmp_path):
    folder, composed, apart = tmp_path / "mine", "\u00e9t\u00e9", "e\u0301te\u0301"
    for name, word in ((apart, "ge\u0301ant"), ("\u00e0", "g\u00e9ant")):
        add(folder, name, annotation(thing(word, 1, 1, 9, 9)))
    (folder / "JPEGImages" / f"{apart}.jpg").rename(folder / "JPEGImages" / f"{composed}.jpg")
    write_list(folder, "train", composed, "a\u0300")
    data = load_voc(root=tmp_path, **{**OWN, "val": [], "classes": ["cat", "ge\u0301ant"]})
    assert {*data.train.listing.paths} == {*map(str, (folder / "JPEGImages").iterdir())}
