"""Scenes of digits: exact boxes, digits of one part only, canvases that follow from their number."""

from __future__ import annotations

import pytest
import torch
from torchvision.ops import box_iou

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.splits import stratified_order
from mptrain.workloads.detection.boxes import OBJECT, Boxes, DetectionSplit, detection_batch
from mptrain.workloads.detection.datasets import digit_scenes
from mptrain.workloads.detection.datasets.digit_scenes import load_digit_scenes
from mptrain.workloads.images.datasets.digits import digits_path, read_digits


@pytest.fixture(scope="module")
def scenes():
    return load_digit_scenes(train_samples=60, val_samples=20, test_samples=30)


def test_a_canvas_has_one_to_three_digits_of_every_class(scenes):
    counts = [len(one.labels) for one in scenes.train.boxes]
    assert set(counts) == {1, 2, 3}
    assert set(torch.cat([one.labels for one in scenes.train.boxes]).tolist()) == set(range(10))
    assert (len(scenes.train), len(scenes.val), len(scenes.test)) == (60, 20, 30)
    assert scenes.facts() == {
        "num_classes": 10, "class_names": tuple("0123456789"), "in_channels": 1, "image_size": 64, "boxes": "pixels",
        "num_outputs": 10, "input_shape": (1, 64, 64),
    }  # fmt: skip


@pytest.mark.parametrize("side", [64, 256])
def test_boxes_are_exact_and_digits_grow_with_the_canvas(side):
    """All ink is inside boxes, which do not touch, and each edge of a box has ink of its digit."""
    scenes = load_digit_scenes(image_size=side, train_samples=30, val_samples=0, test_samples=0)
    for image, one in zip(scenes.train.images, scenes.train.boxes, strict=True):
        ink = image[0] >= 32
        outside = ink.clone()
        for left, upper, right, lower in one.corners.int().tolist():
            inside = ink[upper:lower, left:right]
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            outside[upper:lower, left:right] = False
        assert not outside.any()
        assert (one.kinds == OBJECT).all()
        assert box_iou(one.corners, one.corners).fill_diagonal_(0).max() == 0
    heights = torch.cat([one.corners[:, 3] - one.corners[:, 1] for one in scenes.train.boxes])
    assert 0.15 < heights.mean() / side < 0.6


def test_canvases_to_train_on_hold_digits_to_train_on_only(monkeypatch):
    used = {}

    def record(digits, targets, side, count, part):
        used[part] = {tuple(digit.flatten().tolist()) for digit in digits}
        return draw(digits, targets, side, count, part)

    draw = digit_scenes.draw_scenes
    monkeypatch.setattr(digit_scenes, "draw_scenes", record)
    load_digit_scenes(train_samples=2, val_samples=2, test_samples=2)
    images, targets = read_digits(digits_path())
    order = stratified_order(targets)
    expected = {0: order[:1200], 1: order[1200:1400], 2: order[1400:]}  # as load_digits divides them
    assert used == {
        part: {tuple(digit.flatten().tolist()) for digit in images[chosen]} for part, chosen in expected.items()
    }


def test_a_canvas_follows_from_its_number_alone(scenes):
    more = load_digit_scenes(train_samples=90, val_samples=0, test_samples=0)
    assert torch.equal(more.train.images[:60], scenes.train.images)
    assert torch.equal(more.train.fetch([7], 3, 5).targets, scenes.train.fetch([7], 0, 0).targets)
    assert more.val is None
    assert more.test is None


def test_prepared_canvases_have_mean_zero_and_deviation_one():
    scenes = load_digit_scenes(train_samples=400, val_samples=0, test_samples=0)
    batch = scenes.prepare(scenes.train.fetch(range(400), 0, 0), torch.device("cpu"), torch.contiguous_format)
    assert abs(batch.inputs.mean().item()) < 0.05
    assert batch.inputs.std().item() == pytest.approx(1.0, abs=0.05)
    assert batch.targets.dtype == torch.float32
    assert batch.cast(torch.float16).targets.dtype == torch.float32


def boxes(count):
    return Boxes(torch.ones(count, 4), torch.arange(count), torch.full((count,), OBJECT))


@pytest.mark.parametrize(("counts", "labels"), [((2, 0, 1), [[0, 1], [-1, -1], [0, -1]]), ((0, 0), [[-1], [-1]])])
def test_places_are_as_many_as_the_fullest_picture_needs(counts, labels):
    batch = detection_batch(torch.zeros(len(counts), 1, 4, 4, dtype=torch.uint8), [boxes(count) for count in counts])
    assert batch.extras["labels"].tolist() == labels
    assert batch.extras["kinds"].shape == (len(counts), len(labels[0]))
    assert batch.targets.shape == (len(counts), len(labels[0]), 4)
    assert batch.targets[1].abs().sum() == 0


def test_small_canvases_and_pictures_without_boxes_are_refused():
    with pytest.raises(ConfigError, match="image_size=16"):
        load_digit_scenes(image_size=16)
    with pytest.raises(DataError, match="none of 2 pictures"):
        DetectionSplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [boxes(0), boxes(0)])
