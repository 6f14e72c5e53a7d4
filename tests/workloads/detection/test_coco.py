"""COCO's form: categories by id, crowds, folders, and files that are wrong."""

from __future__ import annotations

import json
import math

import pytest
from PIL import Image

from mptrain.system.errors import DataError
from mptrain.workloads.detection.boxes import CROWD, OBJECT
from mptrain.workloads.detection.datasets.coco import load_coco

OWN = {"train": "mine", "val": None, "image_size": 32, "augment": False}


def content(**other):
    """Two pictures; the ids of the categories have gaps and another order, as COCO's have."""
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 40, "height": 20},
            {"id": 3, "file_name": "b.png", "width": 40, "height": 20},
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 90, "bbox": [0, 0, 20, 10], "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 1, "bbox": [20, 10, 20, 10], "iscrowd": 1},
        ],
        **other,
    }


def write(root, part, said):
    (root / "annotations").mkdir(exist_ok=True)
    (root / part).mkdir(exist_ok=True)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 20), (9, 99, 200)).save(root / part / name)
    text = said if isinstance(said, str) else json.dumps(said)
    (root / "annotations" / f"instances_{part}.json").write_text(text)


def test_boxes_categories_and_crowds_are_read(tmp_path):
    write(tmp_path, "mine", content())
    data = load_coco(root=tmp_path, **OWN)
    batch = data.train.fetch([0, 1], 0, 0)
    assert data.class_names == ("person", "toothbrush")
    assert batch.extras["labels"].tolist() == [[1, 0], [-1, -1]]
    assert batch.extras["kinds"].tolist() == [[OBJECT, CROWD], [0, 0]]
    assert batch.targets[0].flatten().tolist() == pytest.approx([0, 0, 16, 16, 16, 16, 32, 32])
    assert (len(data.train), data.val, data.test) == (2, None, None)


def test_other_parts_have_the_classes_of_the_training_part(tmp_path):
    write(tmp_path, "mine", content())
    fewer = [{"id": 90, "name": "toothbrush"}]
    write(tmp_path, "other", content(categories=fewer, annotations=content()["annotations"][:1]))
    data = load_coco(root=tmp_path, **{**OWN, "val": "other"})
    assert data.val.fetch([0], 0, 0).extras["labels"].tolist() == [[1]]
    write(tmp_path, "strange", content(categories=[*content()["categories"], {"id": 4, "name": "plane"}]))
    with pytest.raises(DataError, match=r"1 categories that are missing from .*, such as plane"):
        load_coco(root=tmp_path, **{**OWN, "val": "strange"})


def annotated(**changed):
    """A file whose only annotation differs from a valid one by these keys."""
    return content(annotations=[{"id": 1, "image_id": 7, "category_id": 1, "bbox": [0, 0, 1, 1], **changed}])


#: Words of the error by content of a file.
BAD_FILES = [
    ("is not valid JSON", "{"),
    ("is not valid JSON", "[" * 200_000),
    ("the file is not a JSON object with the lists images", "[1]"),
    ("lacks 'categories'", {"images": [], "annotations": []}),
    ("annotation 1 has no bbox", content(annotations=[{"id": 1, "image_id": 7, "category_id": 1}])),
    ("image 7 has no file_name", content(images=[{"id": 7, "width": 4, "height": 4}], annotations=[])),
    ("to image 99, which is not in the list", annotated(image_id=99)),
    ("annotation 1 has the bbox [0, 0] instead of four numbers", annotated(bbox=[0, 0])),
    ('annotation 1 has the bbox ["a", 1, 2, 3] instead of', annotated(bbox=["a", 1, 2, 3])),
    ("annotation 5 has the bbox null", annotated(id=5, bbox=None)),
    ("annotation number 1 of the list has no image_id", content(annotations=[{"bbox": []}])),
    ("annotation number 1 of the list is not an object", content(annotations=[7])),
    ("annotation 4 has the invalid image_id [7]", annotated(id=4, image_id=[7])),
    ("category number 1 of the list has no id", content(categories=[{"name": "cat"}])),
    ("its images are not a list", content(images={"7": "a.png"})),
    ("image 7 has the invalid file_name 5", content(images=[{"id": 7, "file_name": 5}])),
    ("image 7 has the size null x 4 instead", content(images=[{**content()["images"][0], "width": None, "height": 4}])),
    ("none of 2 pictures has a box", content(annotations=[])),
    ("is not an instances file", content(images=[{**content()["images"][0], "width": math.inf}])),
    ("is not an instances file", annotated(bbox=[1, 1, 10**400, 1])),
    ("several categories have the name 'person'", content(categories=[{"id": n, "name": "person"} for n in (1, 2)])),
    ("several categories have the id 90", content(categories=[{"id": 90, "name": name} for name in "ab"])),
    ("several images have the id 3", content(images=[{"id": 3, "file_name": f"{name}.png"} for name in "ab"])),
]


@pytest.mark.parametrize(("said", "written"), BAD_FILES)
def test_a_file_of_another_form_is_one_line(tmp_path, said, written):
    write(tmp_path, "mine", written)
    with pytest.raises(DataError) as raised:
        load_coco(root=tmp_path, **OWN)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


BAD_BOXES = {
    "has no area inside": {"category_id": 1, "bbox": [5, 5, -2, 9]},
    r"\(60, 5, 69, 14\) has no area": {"category_id": 1, "bbox": [60, 5, 9, 9]},
    "unknown category 12": {"category_id": 12, "bbox": [5, 5, 9, 9]},
}


@pytest.mark.parametrize("said", BAD_BOXES)
def test_a_wrong_box_is_named_or_its_picture_skipped(tmp_path, stops_or_skips, said):
    wrong = {"id": 3, "image_id": 3, **BAD_BOXES[said]}
    write(tmp_path, "mine", content(annotations=[*content()["annotations"], wrong]))
    data = stops_or_skips(load_coco, rf"mine/b\.png.*{said}", root=tmp_path, **OWN)
    assert len(data.train) == 1


def test_an_empty_box_is_left_out_and_its_picture_kept(tmp_path):
    boxes = ([5, 5, 0, 9], [5, 5, 9, 0], [5, 5, 0, 0])
    empty = [{"id": 3 + n, "image_id": 7, "category_id": 1, "bbox": box} for n, box in enumerate(boxes)]
    write(tmp_path, "mine", content(annotations=[*empty, *content()["annotations"]]))
    data = load_coco(root=tmp_path, **{**OWN, "val": "mine"})
    assert data.train.fetch([0, 1], 0, 0).extras["labels"].tolist() == [[1, 0], [-1, -1]]
    assert data.train.skipped == 0
    assert data.describe() == "3x32x32, 6 empty boxes left out"  # of both parts


@pytest.mark.parametrize("sizes", [True, False])
def test_boxes_that_stick_out_are_cut_and_others_a_fault(tmp_path, sizes):
    images = [{key: one[key] for key in ("id", "file_name")} for one in content()["images"]]
    images = content()["images"] if sizes else images
    boxes = [[-5, 0, 15, 10], [30, 5, 10.9, 9], [0, 0, 40, 25], [0, 0, 9, 9]]
    said = [{"id": number, "image_id": 7, "category_id": 1, "bbox": box} for number, box in enumerate(boxes)]
    write(tmp_path, "mine", content(images=images, annotations=said))
    data = load_coco(root=tmp_path, **OWN)
    assert data.describe() == "3x32x32, 2 boxes clipped at the edge"  # 0.9 pixels are how annotations round
    corners = data.train.fetch([0], 0, 0).targets[0].tolist()
    assert corners[0] == pytest.approx([0, 0, 8, 16])
    assert corners[2] == pytest.approx([0, 0, 32, 32])
    outside = {"id": 9, "image_id": 7, "category_id": 1, "bbox": [40, 0, 9, 9]}
    write(tmp_path, "mine", content(images=images, annotations=[*said, outside]))
    with pytest.raises(DataError, match=r"mine/a\.png: .*\(40, 0, 49, 9\) has no area"):
        load_coco(root=tmp_path, **OWN)


@pytest.mark.parametrize(("broken", "said"), [(False, "it has 9x9 pixels, but its annotation says 40x20"), (True, "")])
def test_pictures_of_short_lists_are_read_before_training(tmp_path, monkeypatch, broken, said):
    said = rf"a\.png: cannot be used: {said}"
    write(tmp_path, "mine", content())
    Image.new("RGB", (9, 9)).save(tmp_path / "mine" / "a.png")
    if broken:
        (tmp_path / "mine" / "a.png").write_text("no picture")
    with pytest.raises(DataError, match=said):
        load_coco(root=tmp_path, **OWN)
    monkeypatch.setattr("mptrain.workloads.detection.detection_images.HEADERS", 1)
    data = load_coco(root=tmp_path, **OWN)
    with pytest.raises(DataError, match=said):
        data.train.fetch([0], 0, 0)


def test_missing_pictures_and_folders_are_found_before_training(tmp_path, stops_or_skips):
    write(tmp_path, "mine", content())
    (tmp_path / "mine" / "b.png").unlink()
    data = stops_or_skips(load_coco, rf"(?m)^{tmp_path}/mine/b\.png: the file does not exist$", root=tmp_path, **OWN)
    assert (len(data.train), data.describe()) == (1, "3x32x32")
    (tmp_path / "mine").rename(tmp_path / "elsewhere")
    for on_error in ("stop", "skip"):
        with pytest.raises(DataError, match=rf"the picture folder {tmp_path}/mine does not exist"):
            load_coco(root=tmp_path, on_error=on_error, **OWN)
    (tmp_path / "annotations/instances_mine.json").unlink()
    with pytest.raises(DataError, match=r"instances_mine\.json cannot be read") as raised:
        load_coco(root=tmp_path, **OWN)
    assert "instances_PART.json" in raised.value.hint


def test_pictures_may_lie_in_folders_below_or_anywhere(tmp_path):
    said = content()
    said["images"][0]["file_name"] = "below/a.png"
    said["images"][1]["file_name"] = str(tmp_path / "far" / "b.png")
    write(tmp_path, "mine", said)
    for name, place in (("a.png", tmp_path / "mine" / "below"), ("b.png", tmp_path / "far")):
        place.mkdir()
        (tmp_path / "mine" / name).rename(place / name)
    assert len(load_coco(root=tmp_path, **OWN).train.fetch([0, 1], 0, 0).inputs) == 2


@pytest.mark.parametrize("headers", [0, 5000])
def test_a_size_that_no_picture_has_is_the_fault_of_that_picture(tmp_path, monkeypatch, headers):
    said = content()
    said["images"][1]["width"] = 3_000_000_000
    write(tmp_path, "mine", said)
    monkeypatch.setattr("mptrain.workloads.detection.detection_images.HEADERS", headers)
    data = load_coco(root=tmp_path, on_error="skip", **OWN)
    assert len(data.train) == (1 if headers else 2)
    assert len(data.train.fetch(range(len(data.train)), 0, 0).inputs) == 1
    assert data.train.skipped == 1
