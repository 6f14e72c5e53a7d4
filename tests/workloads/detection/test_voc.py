"""Pascal VOC's folders: what the XML files say, lists, downloads, and files that are wrong."""

from __future__ import annotations

import pytest
import torch
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
    assert batch.more["labels"].tolist() == [[0, 1], [-1, -1], [1, -1]]
    assert batch.more["kinds"].tolist() == [[OBJECT, DIFFICULT], [0, 0], [OBJECT, 0]]
    assert batch.targets[0].flatten().tolist() == pytest.approx([0, 0, 16, 16, 16, 16, 32, 32])
    assert (len(data.train), len(data.val), data.test) == (3, 1, None)
    assert data.facts() == {
        "num_classes": 2, "class_names": ("cat", "dog"), "in_channels": 3, "image_size": 32, "boxes": "pixels",
    }  # fmt: skip


def test_only_training_pictures_are_varied(root):
    data = load_voc(root=root, augment=True, **OWN)
    assert torch.equal(data.val.fetch([0], 0, 0).targets, data.val.fetch([0], 1, 1).targets)
    assert len({tuple(data.train.fetch([0], epoch, 0).targets[0, 0].tolist()) for epoch in range(9)}) > 2


def test_the_twenty_classes_are_the_default(root):
    write_list(root / "mine", "cats", "d")
    add(root / "mine", "d", annotation(thing("cat", 1, 1, 9, 9)))
    data = load_voc(root=root, train=["mine/cats"], val=[], test=[])
    assert len(data.class_names) == 20
    assert data.class_names[data.train.fetch([0], 0, 0).more["labels"][0, 0]] == "cat"


@pytest.mark.parametrize("where", ["mine/train", "train"])
def test_lists_may_lie_in_the_root_itself(root, where):
    start = root if "/" in where else root / "mine"
    assert len(load_voc(root=start, **{**OWN, "train": [where], "val": []}).train) == 3


def test_several_lists_are_one_part(root):
    assert len(load_voc(root=root, **{**OWN, "train": ["mine/train", "mine/val"]}).train) == 4


def test_a_part_of_the_training_pictures_is_a_part(root):
    data = load_voc(root=root, train_samples=2, **OWN)
    assert len(data.train) == 2
    with pytest.raises(ConfigError, match="train_samples=4"):
        load_voc(root=root, train_samples=4, **OWN)


WRONG = {
    "is not valid XML": "<annotation><object>",
    "no element found": "",
    "'bird', which is not in dataset.classes": annotation(thing("bird", 1, 1, 9, 9)),
    "did you mean cat": annotation(thing("cats", 1, 1, 9, 9)),
    "no bndbox": annotation("<object><name>cat</name></object>"),
    "xmin is 'left', which is not a finite number": annotation(thing("cat", "left", 1, 9, 9)),
    "box 1 (9, 0, 5, 9) has no area": annotation(thing("cat", 10, 1, 5, 9)),
    "(49, 29, 60, 40) has no area inside": annotation(thing("cat", 50, 30, 60, 40)),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_annotation_is_named(root, said):
    add(root / "mine", "c", WRONG[said])
    with pytest.raises(DataError) as raised:
        load_voc(root=root, **OWN)
    assert "c.xml: " in str(raised.value)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_annotation_is_skipped_and_counted(root, said):
    add(root / "mine", "c", WRONG[said])
    data = load_voc(root=root, on_error="skip", **OWN)
    assert len(data.train) == 2
    assert data.train.skipped == 1
    assert data.val.skipped == 0


def test_a_missing_annotation_is_named(root):
    (root / "mine" / "Annotations" / "b.xml").unlink()
    with pytest.raises(DataError, match=r"b\.xml: cannot be read"):
        load_voc(root=root, **OWN)


def test_a_missing_picture_is_found_before_the_first_step_and_stops_or_is_counted(root):
    (root / "mine" / "JPEGImages" / "b.jpg").unlink()
    with pytest.raises(DataError, match=r"JPEGImages/b\.jpg: the file does not exist"):
        load_voc(root=root, **OWN)
    data = load_voc(root=root, on_error="skip", **OWN)
    assert (len(data.train), data.train.skipped, data.val.skipped) == (2, 1, 0)
    (root / "mine" / "JPEGImages").rename(root / "elsewhere")
    with pytest.raises(DataError, match=r"mine/JPEGImages does not exist"):
        load_voc(root=root, **OWN)


@pytest.mark.parametrize(("train", "said"), [(["mine/empty"], "names no picture"), (["mine/none"], "was not found")])
def test_lists_that_are_empty_or_missing_are_named(root, train, said):
    write_list(root / "mine", "empty")
    with pytest.raises(DataError, match=said):
        load_voc(root=root, **{**OWN, "train": train})


def test_pictures_without_a_single_box_are_refused(root):
    write_list(root / "mine", "bare", "b")
    with pytest.raises(DataError, match="none of 1 pictures has a box"):
        load_voc(root=root, **{**OWN, "val": ["mine/bare"]})


def test_something_to_train_on_is_needed(root):
    with pytest.raises(DataError, match="no training pictures"):
        load_voc(root=root, **{**OWN, "train": []})


def test_boxes_that_stick_out_are_cut_off_and_counted(root):
    assert load_voc(root=root, **OWN).describe() == "3x32x32"
    add(root / "mine", "c", annotation(thing("dog", -5, 5, 15, 15), thing("cat", 0, 0, 41, 20), size=None))
    assert load_voc(root=root, **OWN).describe() == "3x32x32, 1 box clipped at the edge"


@pytest.mark.parametrize("classes", [[], ["cat", "cat"]])
def test_classes_must_differ(root, classes):
    with pytest.raises(ConfigError, match="classes"):
        load_voc(root=root, **{**OWN, "classes": classes})


def test_a_year_that_is_not_there_is_fetched_through_torchvision(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("download", [True, False])
def test_data_that_cannot_be_had_are_one_line_and_a_way_out(tmp_path, monkeypatch, download):
    def fail(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "VOCDetection", fail)
    with pytest.raises(DataError, match="VOC2007") as raised:
        load_voc(root=tmp_path, download=download)
    assert "no download" in raised.value.hint


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        (annotation(thing("cat", 1, 1, 9, 9), size=("inf", 20)), "size: width is 'inf', which is not a finite number"),
        (annotation(thing("cat", 1, 1, "nan", 9)), "bndbox: xmax is 'nan', which is not a finite number"),
        ("<?xml version='1.0' encoding='klingon'?><annotation/>", "is not valid XML: unknown encoding"),
    ],
)
def test_numbers_that_are_not_finite_and_unknown_encodings_are_wrong_annotations(root, xml, said):
    (root / "mine" / "Annotations" / "a.xml").write_text(xml)
    with pytest.raises(DataError, match=said):
        load_voc(root=root, **OWN)


@pytest.mark.parametrize("width", [3_000_000_000, "1e30"])
@pytest.mark.parametrize("headers", [0, 5000])
def test_a_size_that_no_picture_has_is_the_fault_of_that_picture(root, monkeypatch, width, headers):
    monkeypatch.setattr("mptrain.workloads.detection.detection_images.HEADERS", headers)
    add(root / "mine", "a", annotation(thing("cat", 1, 1, 9, 9), size=(width, 20)))
    data = load_voc(root=root, on_error="skip", **{**OWN, "val": []})
    assert len(data.train.fetch(range(len(data.train)), 0, 0).inputs) == 2
    assert "annotation says" in "".join(data.train.faults.found.values())


@pytest.mark.parametrize("inside", [True, False])
def test_lists_that_are_there_are_named_with_the_words_that_choose_them(root, monkeypatch, inside):
    monkeypatch.setattr(torchvision.datasets, "VOCDetection", lambda *args, **kwargs: pytest.fail("fetched"))
    folder = "" if inside else "mine/"
    choice = {"root": root / "mine"} if inside else {"root": root, "train": ["mine/nosuch"]}
    with pytest.raises(
        DataError, match=rf"was not found: {choice['root']} has the lists {folder}train, {folder}val$"
    ) as error:
        load_voc(**choice)
    assert f"write 'dataset.train=[{folder}train]' 'dataset.val=[{folder}val]' 'dataset.test=[]'; " in error.value.hint


def test_lists_of_ones_own_beside_them_do_not_keep_published_ones_from_being_fetched(root, monkeypatch):
    def fetch(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "VOCDetection", fetch)
    with pytest.raises(DataError, match="no route to host"):
        load_voc(root=root)


def test_where_a_list_was_looked_for_is_said_as_it_is(tmp_path):
    wanted = tmp_path / "mine" / "ImageSets" / "Main" / "train.txt"
    with pytest.raises(DataError, match=rf"the list mine/train was not found: looked for {wanted} and "):
        load_voc(root=tmp_path, **OWN)
    with pytest.raises(DataError, match="the list train was not found"):
        load_voc(root=tmp_path, **{**OWN, "train": ["train"]})
