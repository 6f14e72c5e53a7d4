"""Detection: average precision by hand and by pycocotools as a whole, what need not be found, and pictures."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re

import pytest
import torch
from torch import nn

from mptrain.system.errors import EnvironmentRefused
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.detection.boxes import CROWD, DIFFICULT, OBJECT, Boxes, detection_batch
from mptrain.workloads.detection.models.detectors import ssd_small
from mptrain.workloads.detection.task import Detect, matches_of

TASK = Detect(num_classes=3, boxes="pixels")
PERFECT = pytest.approx({"map50": 1.0, "map": 1.0})


def boxes(*rows, kinds=None):
    """Rows of left, upper, right, lower, class."""
    table = torch.tensor(rows, dtype=torch.float32).view(-1, 5)
    kinds = torch.full((len(table),), OBJECT) if kinds is None else torch.tensor(kinds)
    return Boxes(table[:, :4], table[:, 4].long(), kinds)


def batch_of(*pictures, side=32):
    return detection_batch(torch.rand(len(pictures), 1, side, side), pictures)


def said(*rows):
    """Rows of left, upper, right, lower, class, score."""
    table = torch.tensor(rows, dtype=torch.float32).view(-1, 6)
    return {"boxes": table[:, :4], "labels": table[:, 4].long(), "scores": table[:, 5]}


class Oracle(nn.Module):
    """Says what it was told, whatever it sees; its losses are the number of objects of each image."""

    def __init__(self, *found) -> None:
        super().__init__()
        self.found = list(found)

    def forward(self, images, boxes=None, labels=None):
        if boxes is None:
            return self.found
        return {"objects": (labels >= 0).sum(1).half(), "ones": torch.ones(len(images))}


def scored(found, pictures):
    return TASK.score(TASK.answers(Oracle(*found), batch_of(*pictures)))


def test_what_was_said_exactly_is_scored_one():
    truth = boxes([2, 2, 12, 12, 0], [15, 3, 28, 20, 2])
    assert scored([said([2, 2, 12, 12, 0, 0.9], [15, 3, 28, 20, 2, 0.8])], [truth]) == PERFECT


def test_average_precision_is_what_it_is_by_hand():
    """Two objects; hit, miss, hit, by falling score: precision 1 up to recall .5, then 2/3, at 101 recalls."""
    truth = boxes([0, 0, 10, 10, 1], [20, 20, 30, 30, 1])
    found = said([0, 0, 10, 10, 1, 0.9], [10, 10, 20, 20, 1, 0.8], [20, 20, 30, 30, 1, 0.7])
    expected = (51 * 1.0 + 50 * 2 / 3) / 101
    assert scored([found], [truth])["map50"] == pytest.approx(expected)


def test_overlap_decides_which_thresholds_a_box_meets():
    """An overlap of .8 meets .5 to .8, seven of ten thresholds."""
    found = scored([said([0, 0, 8, 10, 0, 0.9])], [boxes([0, 0, 10, 10, 0])])
    assert found["map50"] == pytest.approx(1.0)
    assert found["map"] == pytest.approx(0.7)


def test_stretching_a_picture_changes_no_metric():
    truth, found = boxes([0, 0, 10, 10, 0]), said([1, 0, 9, 11, 0, 0.9])
    stretched = Boxes(truth.corners * torch.tensor([3.0, 0.5, 3.0, 0.5]), truth.labels, truth.kinds)
    also = {**found, "boxes": found["boxes"] * torch.tensor([3.0, 0.5, 3.0, 0.5])}
    assert scored([found], [truth]) == scored([also], [stretched])


def test_the_right_place_with_another_class_is_wrong():
    assert scored([said([0, 0, 10, 10, 1, 0.9])], [boxes([0, 0, 10, 10, 0])])["map50"] == 0.0


def test_a_second_box_on_the_same_object_is_wrong():
    """The wrong one comes first by its place in another picture: precision is 1/2 and then 2/3."""
    truth = boxes([0, 0, 10, 10, 0])
    twice = said([0, 0, 10, 10, 0, 0.9], [0, 0, 10, 9.5, 0, 0.8])
    assert scored([twice, said([0, 0, 10, 10, 0, 0.1])], [truth, truth])["map50"] == pytest.approx(
        (51 + 50 * 2 / 3) / 101
    )


@pytest.mark.parametrize("kind", [DIFFICULT, CROWD])
def test_what_need_not_be_found_is_neither_right_nor_wrong(kind):
    truth = boxes([0, 0, 10, 10, 0], [20, 20, 30, 30, 0], kinds=[OBJECT, kind])
    for also in ([], [[20, 20, 30, 30, 0, 0.95]]):
        assert scored([said([0, 0, 10, 10, 0, 0.5], *also)], [truth])["map50"] == pytest.approx(1.0)


def test_a_crowd_excuses_many_boxes_and_a_difficult_object_one():
    inside = [[20, 20, 25, 25, 0, 0.95], [25, 25, 30, 30, 0, 0.9]]
    whole = [[20, 20, 30, 30, 0, 0.95], [20, 20, 30, 30, 0, 0.9]]
    for kind, rows, expected in ((CROWD, inside, 1.0), (DIFFICULT, whole, 0.5)):
        truth = boxes([0, 0, 10, 10, 0], [20, 20, 30, 30, 0], kinds=[OBJECT, kind])
        assert scored([said([0, 0, 10, 10, 0, 0.5], *rows)], [truth])["map50"] == pytest.approx(expected)


def test_an_image_without_boxes_counts_what_is_found_there_as_wrong():
    truth = boxes([0, 0, 10, 10, 0])
    right, empty = said([0, 0, 10, 10, 0, 0.5]), said([0, 0, 10, 10, 0, 0.9])
    assert scored([right, said()], [truth, boxes()])["map50"] == pytest.approx(1.0)
    assert scored([right, empty], [truth, boxes()])["map50"] == pytest.approx(0.5)


def test_where_there_is_nothing_to_find_there_is_no_score():
    found = scored([said([0, 0, 5, 5, 0, 0.9])], [boxes()])
    assert math.isnan(found["map50"])
    assert math.isnan(found["map"])


def test_answers_may_be_there_twice_and_in_any_order():
    truth = boxes([0, 0, 10, 10, 0])
    answers = TASK.answers(Oracle(said([0, 0, 10, 10, 0, 0.9]), said([11, 11, 20, 20, 0, 0.5])), batch_of(truth, truth))
    once = TASK.score(answers)
    assert TASK.score([answers[1], answers[0]]) == once
    assert TASK.score([answers[0]] * 3) == PERFECT
    assert TASK.score([answers[0], answers[0], answers[1]])["map50"] > once["map50"]


def test_scores_are_those_of_pycocotools_as_a_whole(capsys):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    source = torch.Generator().manual_seed(0)
    pictures, found = [], []
    for _ in range(12):
        low = torch.rand(4, 2, generator=source) * 20
        corners = torch.cat([low, low + 3 + torch.rand(4, 2, generator=source) * 20], 1)
        labels = torch.randint(3, (4,), generator=source)
        pictures.append(Boxes(corners, labels, torch.tensor([OBJECT, OBJECT, OBJECT, CROWD])))
        moved = torch.cat([corners + torch.rand(4, 4, generator=source), corners])
        moved[:, 2:] += 0.5
        labels = torch.cat([labels, torch.randint(3, (4,), generator=source)])
        found.append({"boxes": moved, "labels": labels, "scores": torch.rand(8, generator=source)})
    truth = {
        "images": [{"id": i} for i in range(12)],
        "categories": [{"id": c} for c in range(3)],
        "annotations": [
            {"id": 10 * i + j + 1, "image_id": i, "category_id": int(c), "bbox": xywh(b), "area": area(b), "iscrowd": int(k == CROWD)}
            for i, one in enumerate(pictures)
            for j, (b, c, k) in enumerate(zip(one.corners.tolist(), one.labels, one.kinds, strict=True))
        ],
    }  # fmt: skip
    answers = [
        {"image_id": i, "category_id": int(c), "bbox": xywh(b), "score": float(s)}
        for i, one in enumerate(found)
        for b, c, s in zip(one["boxes"].tolist(), one["labels"], one["scores"], strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(answers), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    ours = scored(found, pictures)
    assert ours["map"] == pytest.approx(judge.stats[0], abs=1e-6)
    assert ours["map50"] == pytest.approx(judge.stats[1], abs=1e-6)
    assert 0.05 < ours["map"] < 0.9
    assert capsys.readouterr().out == ""


def xywh(box):
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


def test_an_overflow_in_a_detection_is_left_out():
    found = said([0, 0, 10, 10, 0, 0.9], [0, 0, 10, math.inf, 0, 0.95], [0, 0, math.nan, 4, 0, 0.95])
    assert scored([found], [boxes([0, 0, 10, 10, 0])]) == PERFECT


def test_matches_name_only_classes_that_are_there():
    truth = boxes([0, 0, 10, 10, 2])
    matches = matches_of(said([1, 1, 9, 9, 0, 0.3]), truth.corners, truth.labels, truth.kinds, num_classes=3)
    assert sorted(matches) == [0, 2]


def test_losses_are_summed_by_image_in_double_precision():
    batch = batch_of(boxes([0, 0, 9, 9, 0], [3, 3, 9, 9, 1]), boxes())
    measured = TASK.measure(Oracle(), batch)
    assert {name: values.tolist() for name, values in measured.items()} == {
        "loss": [3.0, 1.0],
        "objects": [2.0, 0.0],
        "ones": [1.0, 1.0],
    }
    assert {values.dtype for values in measured.values()} == {torch.float64}
    assert TASK.loss(Oracle(), batch).item() == 2.0
    assert TASK.loss(Oracle(), batch).dtype == torch.float32
    assert TASK.summarise({"loss": 6.0}, 4) == {"loss": 1.5}


def test_the_network_is_told_of_objects_only():
    batch = batch_of(boxes([0, 0, 9, 9, 0], [3, 3, 9, 9, 1], [1, 1, 8, 8, 2], kinds=[OBJECT, DIFFICULT, CROWD]))
    assert TASK.measure(Oracle(), batch)["objects"].tolist() == [1.0]


def test_a_batch_cut_anywhere_keeps_its_places():
    batch = batch_of(boxes([0, 0, 9, 9, 0], [3, 3, 9, 9, 1]), boxes(), boxes([1, 1, 5, 5, 2]))
    assert [TASK.measure(Oracle(), part)["objects"].tolist() for part in batch.split(3)] == [[2.0], [0.0], [1.0]]


def test_pictures_show_the_truth_in_green_and_what_was_found_in_red():
    truth = boxes([4, 4, 12, 12, 0], [20, 20, 30, 30, 1], kinds=[OBJECT, DIFFICULT])
    found = said([16, 4, 28, 12, 0, 0.9], [1, 1, 3, 3, 0, 0.2])
    batch = batch_of(truth, boxes())
    batch = Batch(torch.zeros_like(batch.inputs), batch.targets, more=batch.more)
    sheet = TASK.exhibits(Oracle(found, said()), batch)["boxes"]
    assert re.match("Green: true boxes.*red: detections", sheet.caption)
    shown = sheet.pixels
    assert shown.shape == (2, 3, 192, 192)
    colours = {tuple(round(value * 255) for value in pixel) for pixel in shown[0].flatten(1).T.unique(dim=0).tolist()}
    assert {(0, 200, 0), (255, 64, 0), (120, 120, 120)} <= colours
    assert shown[1].max() == 0
    assert shown[0, :, :24, :24].max() == 0  # the box that was not certain


def test_a_small_network_learns_four_scenes_by_heart():
    from mptrain.workloads.detection.datasets.digit_scenes import load_digit_scenes

    torch.manual_seed(0)
    dataset = load_digit_scenes(image_size=32, train_samples=4, val_samples=0, test_samples=0)
    batch = dataset.prepare(dataset.train.fetch(range(4), 0, 0), torch.device("cpu"), torch.contiguous_format)
    task = Detect(num_classes=10, boxes="pixels")
    model = ssd_small(num_classes=10, in_channels=1, image_size=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(60):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    model.train()  # four scenes are too few for the running statistics of BatchNorm
    with torch.no_grad():
        assert task.score(task.answers(model, batch))["map50"] > 0.95


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pycocotools" else known(name))
    with pytest.raises(EnvironmentRefused, match="pycocotools") as refused:
        Detect(num_classes=3, boxes="pixels")
    assert refused.value.hint == "pip install 'mptrain[detection]'"
