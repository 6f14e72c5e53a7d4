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
    assert batch.more["labels"].tolist() == [[1, 0], [-1, -1]]
    assert batch.more["kinds"].tolist() == [[OBJECT, CROWD], [0, 0]]
    assert batch.targets[0].flatten().tolist() == pytest.approx([0, 0, 16, 16, 16, 16, 32, 32])
    assert (len(data.train), data.val, data.test) == (2, None, None)


def test_other_parts_have_the_classes_of_the_training_part(tmp_path):
    write(tmp_path, "mine", content())
    fewer = [{"id": 90, "name": "toothbrush"}]
    write(tmp_path, "other", content(categories=fewer, annotations=content()["annotations"][:1]))
    data = load_coco(root=tmp_path, **{**OWN, "val": "other"})
    assert data.val.fetch([0], 0, 0).more["labels"].tolist() == [[1]]
    write(tmp_path, "strange", content(categories=[*content()["categories"], {"id": 4, "name": "plane"}]))
    with pytest.raises(DataError, match=r"1 categories that are missing from .*, such as plane"):
        load_coco(root=tmp_path, **{**OWN, "val": "strange"})


BAD_FILES = {
    "is not valid JSON": "",
    "is not valid JSON: ": "{",
    "is not an instances file": "[]",
    "lacks 'categories'": {"images": [], "annotations": []},
    "annotation 1 has no bbox": content(annotations=[{"id": 1, "image_id": 7, "category_id": 1}]),
    "image 7 has no file_name": content(images=[{"id": 7, "width": 4, "height": 4}], annotations=[]),
    "to image 99, which is not in the list": content(annotations=[{"id": 1, "image_id": 99, "category_id": 1, "bbox": [0, 0, 1, 1]}]),
    "annotation 1 has the bbox [0, 0] instead of four numbers": content(
        annotations=[{"id": 1, "image_id": 7, "category_id": 1, "bbox": [0, 0]}]),
    "annotation 1 has the bbox [\"a\", 1, 2, 3] instead of": content(
        annotations=[{"id": 1, "image_id": 7, "category_id": 1, "bbox": ["a", 1, 2, 3]}]),
    "annotation 5 has the bbox null": content(annotations=[{"id": 5, "image_id": 7, "category_id": 1, "bbox": None}]),
    "annotation number 2 of the list has no image_id": content(annotations=[content()["annotations"][0], {"bbox": []}]),
    "annotation number 1 of the list is not an object": content(annotations=[7]),
    "annotation 4 has the invalid image_id [7]": content(
        annotations=[{"id": 4, "image_id": [7], "category_id": 1, "bbox": [0, 0, 1, 1]}]),
    "category number 1 of the list has no id": content(categories=[{"name": "cat"}]),
    "its images are not a list": content(images={"7": "a.png"}),
    "image 7 has the invalid file_name 5": content(images=[{"id": 7, "file_name": 5}]),
    "image 7 has the size null x 4 instead of two numbers": content(
        images=[{"id": 7, "file_name": "a.png", "width": None, "height": 4}], annotations=[]),
    "the file is not a JSON object with the lists images": "[1]",
    "none of 2 pictures has a box": content(annotations=[]),
}  # fmt: skip


@pytest.mark.parametrize("said", BAD_FILES)
def test_a_file_of_another_form_is_one_line(tmp_path, said):
    write(tmp_path, "mine", BAD_FILES[said])
    with pytest.raises(DataError) as raised:
        load_coco(root=tmp_path, **OWN)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


BAD_BOXES = {
    "has no area inside": {"id": 3, "image_id": 3, "category_id": 1, "bbox": [5, 5, -2, 9]},
    "(60, 5, 69, 14) has no area": {"id": 3, "image_id": 3, "category_id": 1, "bbox": [60, 5, 9, 9]},
    "unknown category 12": {"id": 3, "image_id": 3, "category_id": 12, "bbox": [5, 5, 9, 9]},
}


@pytest.mark.parametrize("said", BAD_BOXES)
def test_a_wrong_box_is_named_or_its_picture_skipped(tmp_path, said):
    write(tmp_path, "mine", content(annotations=[*content()["annotations"], BAD_BOXES[said]]))
    data = load_coco(root=tmp_path, on_error="skip", **OWN)
    assert len(data.train) == 1
    assert data.train.skipped == 1
    with pytest.raises(DataError, match=r"mine/b\.png") as raised:
        load_coco(root=tmp_path, **OWN)
    assert said in str(raised.value)


@pytest.mark.parametrize("bbox", [[5, 5, 0, 9], [5, 5, 9, 0], [5, 5, 0, 0]])
def test_a_box_without_width_or_height_is_left_out_and_counted_and_its_picture_kept(tmp_path, bbox):
    empty = {"id": 3, "image_id": 7, "category_id": 1, "bbox": bbox}
    write(tmp_path, "mine", content(annotations=[empty, *content()["annotations"]]))
    data = load_coco(root=tmp_path, **{**OWN, "val": "mine"})
    assert data.train.fetch([0, 1], 0, 0).more["labels"].tolist() == [[1, 0], [-1, -1]]
    assert data.train.skipped == 0
    assert data.describe() == "3x32x32, 2 empty boxes left out"  # one in each part
    assert load_coco(root=tmp_path, **OWN).describe() == "3x32x32, 1 empty box left out"


@pytest.mark.parametrize("sizes", [True, False])
def test_boxes_that_stick_out_are_cut_off_and_counted_and_those_outside_are_a_fault(tmp_path, sizes):
    images = [{"id": one["id"], "file_name": one["file_name"]} for one in content()["images"]]
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
    with pytest.raises(
        DataError, match=r"mine/a\.png: .*box 5 \(40, 0, 49, 9\) has no area inside the picture of 40x20"
    ):
        load_coco(root=tmp_path, **OWN)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (False, r"a\.png: cannot be used: it has 9x9 pixels, but its annotation says 40x20"),
        (True, r"a\.png: cannot be used: "),
    ],
)
def test_another_size_and_what_is_no_picture_are_found_before_the_first_step_in_short_lists(
    tmp_path, monkeypatch, broken, said
):
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


def test_missing_pictures_are_found_before_the_first_step_and_stop_or_are_counted(tmp_path):
    write(tmp_path, "mine", content())
    (tmp_path / "mine" / "b.png").unlink()
    with pytest.raises(DataError, match=rf"^{tmp_path}/mine/b\.png: the file does not exist$") as raised:
        load_coco(root=tmp_path, **OWN)
    assert "dataset.on_error=skip to skip and count such samples" in raised.value.hint
    data = load_coco(root=tmp_path, on_error="skip", **OWN)
    assert (len(data.train), data.train.skipped, data.describe()) == (1, 1, "3x32x32")


def test_a_missing_folder_of_pictures_is_named(tmp_path):
    write(tmp_path, "mine", content())
    (tmp_path / "mine").rename(tmp_path / "elsewhere")
    for on_error in ("stop", "skip"):
        with pytest.raises(DataError, match=rf"the picture folder {tmp_path}/mine does not exist"):
            load_coco(root=tmp_path, on_error=on_error, **OWN)


def test_pictures_may_lie_in_folders_below_or_anywhere(tmp_path):
    said = content()
    said["images"][0]["file_name"] = "below/a.png"
    said["images"][1]["file_name"] = str(tmp_path / "far" / "b.png")
    write(tmp_path, "mine", said)
    for name, place in (("a.png", tmp_path / "mine" / "below"), ("b.png", tmp_path / "far")):
        place.mkdir()
        (tmp_path / "mine" / name).rename(place / name)
    assert len(load_coco(root=tmp_path, **OWN).train.fetch([0, 1], 0, 0).inputs) == 2


def test_a_missing_file_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match=r"instances_mine\.json cannot be read") as raised:
        load_coco(root=tmp_path, **OWN)
    assert "instances_PART.json" in raised.value.hint


@pytest.mark.parametrize(
    ("where", "key", "value"), [("images", "width", math.inf), ("annotations", "bbox", [1, 1, 10**400, 1])]
)
def test_numbers_too_large_for_any_picture_are_one_line(tmp_path, where, key, value):
    said = content()
    said[where][0][key] = value
    write(tmp_path, "mine", said)
    with pytest.raises(DataError, match="is not an instances file"):
        load_coco(root=tmp_path, **OWN)


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


def test_json_that_is_too_deep_is_one_line(tmp_path):
    write(tmp_path, "mine", "[" * 200_000)
    with pytest.raises(DataError, match="is not valid JSON"):
        load_coco(root=tmp_path, **OWN)


@pytest.mark.parametrize(
    ("key", "twice", "said"),
    [
        ("categories", {"id": 2, "name": "person"}, "several categories have the name 'person'"),
        ("categories", {"id": 90, "name": "comb"}, "several categories have the id 90"),
        ("images", {"id": 3, "file_name": "c.png"}, "several images have the id 3"),
    ],
)
def test_what_is_there_twice_is_named(tmp_path, key, twice, said):
    write(tmp_path, "mine", content(**{key: [*content()[key], twice]}))
    with pytest.raises(DataError, match=rf"instances_mine\.json is not an instances file: {said}"):
        load_coco(root=tmp_path, **OWN)
