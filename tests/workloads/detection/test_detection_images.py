"""Pictures with boxes from files: crops, mirroring and squares move the boxes along; faults name the file or are skipped."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.detection.boxes import (
    CROP_DRAWS,
    CROWD,
    OBJECT,
    Boxes,
    mirrored,
    random_window,
    resized,
    through_window,
)
from mptrain.workloads.detection.detection_images import (
    AnnotatedImage,
    Listing,
    PictureOptions,
    PictureSplit,
    wrong_boxes,
)


def boxes(*rows, kinds=None):
    corners = torch.tensor(rows, dtype=torch.float32).view(-1, 4)
    kinds = torch.full((len(corners),), OBJECT) if kinds is None else torch.tensor(kinds)
    return Boxes(corners, torch.arange(len(corners)), kinds)


def painted(path, size, box, mode="RGB"):
    """A black picture with one white rectangle."""
    image = Image.new(mode, size)
    image.paste(255 if mode == "L" else (255, 255, 255), tuple(box))
    image.save(path)
    return str(path)


def split_of(*annotated, on_error="stop", **choices):
    listing = Listing(annotated)
    chosen = {"image_size": 20, "channels": 3, "fit": "stretch", "augment": False, **choices}
    options = PictureOptions(**chosen, train_samples=None, workers=0)
    return PictureSplit(listing, torch.arange(len(listing)), options, Faults(on_error))


def white(image):
    """Left, upper, right, lower of what is nearly white."""
    rows, columns = torch.nonzero(image[0] > 200, as_tuple=True)
    return [columns.min().item(), rows.min().item(), columns.max().item() + 1, rows.max().item() + 1]


@pytest.mark.parametrize(("fit", "expected"), [("stretch", [5, 5, 15, 15]), ("letterbox", [5, 2.5, 15, 7.5])])
def test_a_picture_becomes_a_square_and_its_boxes_with_it(tmp_path, fit, expected):
    path = painted(tmp_path / "a.png", (80, 40), [20, 10, 60, 30])
    batch = split_of(AnnotatedImage(path, ((20, 10, 60, 30, 1, OBJECT),), (80, 40)), fit=fit).fetch([0], 0, 0)
    assert batch.targets[0].tolist() == [expected]
    assert batch.inputs.shape == (1, 3, 20, 20)
    assert batch.inputs.dtype == torch.uint8
    assert white(batch.inputs[0]) == pytest.approx(expected, abs=1)
    if fit == "letterbox":
        assert batch.inputs[0, :, 10:].max() == 0


def test_augmented_boxes_stay_on_their_objects(tmp_path):
    path = painted(tmp_path / "a.png", (80, 60), [30, 20, 54, 44])
    split = split_of(AnnotatedImage(path, ((30, 20, 54, 44, 0, OBJECT),), (80, 60)), augment=True, image_size=64)
    seen = set()
    for epoch in range(40):
        batch = split.fetch([0], epoch, 0)
        assert white(batch.inputs[0]) == pytest.approx(batch.targets[0, 0].tolist(), abs=1.5)
        seen.add(tuple(batch.targets[0, 0].tolist()))
    assert len(seen) > 15


def test_a_window_shows_the_centre_of_an_object_or_is_the_whole():
    """The small ones of two objects may be cut off; an object that is a crowd does not count."""
    own = boxes([10, 10, 30, 40], [60, 50, 90, 70], [0, 0, 100, 80], kinds=[OBJECT, OBJECT, CROWD])
    parts = 0
    for draws in uniforms(0, 0, range(200), CROP_DRAWS).tolist():
        left, upper, right, lower = window = random_window(100, 80, own, draws)
        assert 0 <= left < right <= 100
        assert 0 <= upper < lower <= 80
        shown = through_window(own, window, (1.0, 1.0))
        assert (shown.kinds == OBJECT).any()
        assert 0.5 <= (right - left) / (lower - upper) <= 2
        parts += window != (0, 0, 100, 80)
        assert random_window(50, 40, boxes(), draws) == (0, 0, 50, 40)
        assert random_window(50, 40, boxes([5, 5, 20, 20], kinds=[CROWD]), draws) == (0, 0, 50, 40)
    assert parts > 50
    assert mirrored(boxes([1, 2, 30, 40]), 50).corners.tolist() == [[20, 2, 49, 40]]


def test_boxes_are_cut_at_the_window_and_gone_with_their_centre():
    own = boxes([0, 0, 20, 20], [30, 30, 60, 60], [90, 90, 99, 99])
    shown = through_window(own, (8, 8, 48, 48), (0.5, 2.0))
    assert shown.labels.tolist() == [0, 1]
    assert shown.corners.tolist() == [[0, 0, 6, 24], [11, 44, 20, 80]]
    assert len(through_window(boxes([10, 10, 11, 60]), (0, 0, 100, 100), (0.3, 0.3)).labels) == 0  # below a pixel
    assert len(resized(boxes([10, 10, 10.00001, 60], [0, 0, 5, 5]), 100, 100, (0.3, 0.3)).labels) == 1  # equal in FP32


@pytest.mark.parametrize("row", [[5, 5, 5, 9], [9, 5, 5, 9], [30, 5, 40, 9], [-9, 0, 0, 9], [0, 0, float("nan"), 9]])
def test_boxes_without_area_in_the_picture_are_wrong(row):
    assert "has no area" in wrong_boxes(torch.tensor([[0.0, 0.0, 9.0, 9.0], row]), 20, 10)
    assert wrong_boxes(torch.tensor([[-3.0, -1.0, 25.0, 12.0]]), 20, 10) is None  # sticks out


@pytest.mark.parametrize(("mode", "channels"), [("L", 3), ("L", 1), ("RGB", 1), ("P", 3), ("RGBA", 3)])
def test_pictures_of_any_kind_have_the_channels_asked_for(tmp_path, mode, channels):
    image = Image.new("L" if mode == "P" else mode, (20, 20))
    image.convert(mode).save(tmp_path / "a.png")
    batch = split_of(AnnotatedImage(str(tmp_path / "a.png"), (), None), channels=channels).fetch([0], 0, 0)
    assert batch.inputs.shape == (1, channels, 20, 20)
    assert batch.extras["labels"].tolist() == [[-1]]


def broken(tmp_path, what):
    path = tmp_path / "bad.jpg"
    if what == "cut short":
        Image.effect_noise((64, 64), 50).save(path)
        path.write_bytes(path.read_bytes()[:600])
    elif what == "empty":
        path.write_bytes(b"")
    elif what in ("another size", "a box outside"):
        Image.new("RGB", (30, 20)).save(path)
    rows = ((100.0, 100.0, 120.0, 120.0, 0, OBJECT),) if what == "a box outside" else ()
    return AnnotatedImage(str(path), rows, (20, 30) if what == "another size" else None)


@pytest.mark.parametrize("what", ["missing", "empty", "cut short", "another size", "a box outside"])
def test_an_unusable_picture_is_named_or_counted_once(tmp_path, what):
    good = AnnotatedImage(painted(tmp_path / "good.png", (20, 20), [2, 2, 9, 9]), ((2, 2, 9, 9, 3, OBJECT),), None)
    with pytest.raises(DataError, match=r"bad\.jpg: cannot be used") as raised:
        split_of(broken(tmp_path, what)).fetch([0], 0, 0)
    assert "\n" not in str(raised.value)
    split = split_of(broken(tmp_path, what), good, on_error="skip")
    for epoch in range(2):
        assert split.fetch([0, 1], epoch, 0).extras["labels"].tolist() == [[3]]
    assert split.skipped == 1
    with pytest.raises(DataError, match="no picture of the batch"):
        split.fetch([0], 0, 0)


def test_a_listing_gives_each_picture_its_own_boxes():
    rows = ((0, 0, 1, 1, 4, 0), (1, 1, 2, 2, 5, 1)), (), ((3, 3, 4, 4, 6, 2),)
    listing = Listing([AnnotatedImage("abc"[n], own, None if n else (9, 8)) for n, own in enumerate(rows)])
    assert [listing.boxes(index).labels.tolist() for index in range(3)] == [[4, 5], [], [6]]
    assert [listing.boxes(index).kinds.tolist() for index in range(3)] == [[0, 1], [], [2]]
    assert listing.boxes(2).corners.tolist() == [[3, 3, 4, 4]]
    assert [listing.size(index) for index in range(3)] == [(9, 8), None, None]


def test_what_is_measured_has_every_object_however_thin(tmp_path):
    rows = ((10, 10, 11, 60, 0, OBJECT), (70, 10, 300, 30, 1, OBJECT))
    path = painted(tmp_path / "a.png", (80, 80), [10, 10, 11, 60])
    measured = split_of(AnnotatedImage(path, rows, (80, 80))).fetch([0], 0, 0)
    assert measured.targets[0].tolist() == [[2.5, 2.5, 2.75, 15.0], [17.5, 2.5, 20.0, 7.5]]
    trained = split_of(AnnotatedImage(path, rows, (80, 80)), augment=True)
    assert all((trained.fetch([0], epoch, 0).extras["labels"] == -1).all() for epoch in range(5))
