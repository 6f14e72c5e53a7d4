"""Detection: average precision by hand and by pycocotools as a whole, what need not be found, and pictures."""

from __future__ import annotations

import contextlib
import io
import math
import re

import pytest
import torch
from torch import nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.detection.boxes import CROWD, DIFFICULT, OBJECT, Boxes, detection_batch
from mptrain.workloads.detection.models.detectors import ssd_small
from mptrain.workloads.detection.task import Detect

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


ONE, TWO, FAR = [0, 0, 10, 10, 0], [20, 20, 30, 30, 0], [50, 50, 60, 60, 0]
EMPTY = ([], [])
#: Objects, found boxes with scores, and average precision at an overlap of a half and over all ten.
SCORES = {
    "exact": ([([[2, 2, 12, 12, 0], [15, 3, 28, 20, 2]], [[2, 2, 12, 12, 0, 0.9], [15, 3, 28, 20, 2, 0.8]])], 1, 1),
    # Hit, miss, hit, by falling score: precision 1 up to recall .5, then 2/3, at 101 recalls.
    "by hand": ([([ONE, TWO], [[*ONE, 0.9], [*FAR, 0.8], [*TWO, 0.7]])], (51 + 50 * 2 / 3) / 101, None),
    "an overlap of .8 meets .5 to .8": ([([ONE], [[0, 0, 8, 10, 0, 0.9]])], 1, 0.7),
    "another class": ([([ONE], [[0, 0, 10, 10, 1, 0.9]])], 0, 0),
    # The wrong one comes first by its place in another picture: precision is 1/2 and then 2/3.
    "a second box": (
        [([ONE], [[*ONE, 0.9], [0, 0, 10, 9.5, 0, 0.8]]), ([ONE], [[*ONE, 0.1]])],
        (51 + 50 * 2 / 3) / 101,
        None,
    ),
    "nothing there, nothing found": ([([ONE], [[*ONE, 0.5]]), EMPTY], 1, 1),
    "nothing there, something found": ([([ONE], [[*ONE, 0.5]]), ([], [[*ONE, 0.9]])], 0.5, 0.5),
    "nothing anywhere": ([([], [[*ONE, 0.9]])], math.nan, math.nan),
    "an overflow": ([([ONE], [[*ONE, 0.9], [0, 0, 10, math.inf, 0, 0.95], [0, 0, math.nan, 4, 0, 0.95]])], 1, 1),
}


@pytest.mark.parametrize("case", SCORES)
def test_average_precision_is_what_it_is_by_hand(case):
    pictures, map50, whole = SCORES[case]
    found = scored([said(*rows) for _, rows in pictures], [boxes(*rows) for rows, _ in pictures])
    assert found["map50"] == pytest.approx(map50, nan_ok=True)
    assert found["map"] == pytest.approx(found["map"] if whole is None else whole, nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "found", "expected"),
    [
        *[(kind, rows, 1.0) for kind in (DIFFICULT, CROWD) for rows in ([], [[*TWO, 0.95]])],
        (CROWD, [[20, 20, 25, 25, 0, 0.95], [25, 25, 30, 30, 0, 0.9]], 1.0),  # excuses many boxes
        (DIFFICULT, [[*TWO, 0.95], [*TWO, 0.9]], 0.5),  # excuses one
    ],
)
def test_what_need_not_be_found_is_neither_right_nor_wrong(kind, found, expected):
    truth = boxes(ONE, TWO, kinds=[OBJECT, kind])
    assert scored([said([*ONE, 0.5], *found)], [truth])["map50"] == pytest.approx(expected)


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
    pictures, found, annotations, answers = [], [], [], []
    for image in range(12):
        low = torch.rand(4, 2, generator=source) * 20
        corners = torch.cat([low, low + 3 + torch.rand(4, 2, generator=source) * 20], 1)
        labels, kinds = torch.randint(3, (4,), generator=source), [OBJECT, OBJECT, OBJECT, CROWD]
        pictures.append(Boxes(corners, labels, torch.tensor(kinds)))
        moved = torch.cat([corners + torch.rand(4, 4, generator=source), corners])
        moved[:, 2:] += 0.5
        guessed = torch.cat([labels, torch.randint(3, (4,), generator=source)])
        found.append({"boxes": moved, "labels": guessed, "scores": torch.rand(8, generator=source)})
        for number, (box, label, kind) in enumerate(zip(corners.tolist(), labels.tolist(), kinds, strict=True)):
            size = {"bbox": xywh(box), "area": xywh(box)[2] * xywh(box)[3], "iscrowd": int(kind == CROWD)}
            annotations.append({"id": 10 * image + number + 1, "image_id": image, "category_id": label, **size})
        for box, label, score in zip(moved.tolist(), guessed.tolist(), found[-1]["scores"].tolist(), strict=True):
            answers.append({"image_id": image, "category_id": label, "bbox": xywh(box), "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"images": [{"id": n} for n in range(12)], "categories": [{"id": n} for n in range(3)]}
        coco.dataset["annotations"] = annotations
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


def test_losses_of_objects_alone_are_summed_by_image_in_float64():
    kinds = [OBJECT, OBJECT, DIFFICULT, CROWD]
    batch = batch_of(boxes([0, 0, 9, 9, 0], [3, 3, 9, 9, 1], [1, 1, 8, 8, 2], [1, 1, 7, 7, 2], kinds=kinds), boxes())
    measured = TASK.measure(Oracle(), batch)
    expected = {"loss": [3.0, 1.0], "objects": [2.0, 0.0], "ones": [1.0, 1.0]}
    assert {name: values.tolist() for name, values in measured.items()} == expected
    assert {values.dtype for values in measured.values()} == {torch.float64}
    assert [TASK.measure(Oracle(), part)["objects"].tolist() for part in batch.split(2)] == [[2.0], [0.0]]
    loss = TASK.loss(Oracle(), batch)
    assert (loss.item(), loss.dtype) == (2.0, torch.float32)
    assert TASK.summarise({"loss": 6.0}, 4) == {"loss": 1.5}


def test_pictures_show_truth_in_green_and_finds_in_red():
    truth = boxes([4, 4, 12, 12, 0], [20, 20, 30, 30, 1], kinds=[OBJECT, DIFFICULT])
    found = said([16, 4, 28, 12, 0, 0.9], [1, 1, 3, 3, 0, 0.2])
    batch = batch_of(truth, boxes())
    batch = Batch(torch.zeros_like(batch.inputs), batch.targets, extras=batch.extras)
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
