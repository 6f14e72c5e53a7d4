"""What ``mptrain doctor dataset=NAME ...`` tells of a data set without looking at a model."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mptrain.cli.train import train
from mptrain.lab.commands import doctor_checks as module
from mptrain.lab.doctor import data_check
from tests.loops import each


def picture(number, size=(12, 10)):
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def fill(root, parts, counts):
    numbers = itertools.count()
    for part, (name, count) in itertools.product(parts, counts.items()):
        (root / part / name).mkdir(parents=True)
        for item in range(count):
            picture(next(numbers)).save(root / part / name / f"{item}.png")


def test_everything_about_a_folder_is_told_at_once(terminal, tmp_path):
    fill(tmp_path / "pics", ("train", "val", "test"), {"ant": 4, "bee": 3})
    train = tmp_path / "pics" / "train"
    (train / "cat").mkdir()
    (train / "ant" / "notes.txt").write_text("no picture")
    (train / "ant" / "text.png").write_text("no picture")
    (train / "ant" / "cut.jpg").write_bytes((train / "ant" / "0.png").read_bytes()[:150])
    Image.new("I;16", (12, 10), 50_000).save(train / "bee" / "deep.png")
    picture(90).convert("CMYK").save(train / "bee" / "ink.jpg")
    picture(91, (1, 1)).save(train / "bee" / "dot.png")
    frames = [picture(92).convert("P"), picture(93).convert("P")]
    frames[0].save(train / "bee" / "moving.gif", save_all=True, append_images=frames[1:])
    picture(94, (640, 480)).save(train / "bee" / "named.jpg", "PNG")
    shutil.copy(train / "ant" / "3.png", tmp_path / "pics" / "test" / "ant" / "leak.png")
    picture(0).save(train / "ant" / "again.bmp")  # the same pixels in another format
    shutil.copy(train / "ant" / "1.png", train / "bee" / "wrong.png")
    assert terminal("doctor", "dataset=image_folder", "dataset.root=pics") == 6
    assert terminal.out.startswith("image_folder: 3 errors stop training, 2 other problems; 31 files read; 3x224x224, ")
    assert "3 classes, 1 without images in train" in " ".join(terminal.out.split("\n\n")[0].split())
    out = re.sub(" +", " ", terminal.out.replace("\n  ", " "))
    for row in (
        "samples 16 7 8 ",
        "class train val test ant 7 4 5 bee 9 3 3 cat 0 0 0",
        "width, min / median / max 1 / 12 / 640 12 / 12 / 12 12 / 12 / 12",
        "most frequent sizes in pixels: 12x10 (27), 1x1 (1), 640x480 (1)",
        "found: pics/train/ant/cut.jpg: cannot be decoded: ",
        "found: pics/train/ant/text.png: cannot be decoded: it is no picture of a known format",
        "hint: fix or remove them; dataset.on_error=skip skips and counts unusable files",
        "found: pics/train/cat: the class has no images",
        "hint: put images there, or remove the folder; known extensions: ",
        "found: same pixels in splits train and test: pics/train/ant/3.png, pics/test/ant/leak.png",
        "found: same pixels in classes ant and bee: pics/train/ant/1.png, pics/train/bee/wrong.png",
        "note: same pixels: 2 files: pics/train/ant/0.png, pics/train/ant/again.bmp",
        "note: 16-bit (the high byte is used): pics/train/bee/deep.png",
        "note: CMYK: pics/train/bee/ink.jpg",
        "note: 1x1 pixels: pics/train/bee/dot.png",
        "note: palette, several frames (the first is used): pics/train/bee/moving.gif",
        "note: PNG named .jpg: pics/train/bee/named.jpg",
        "note: no pictures, left out: 1 .txt file, such as pics/train/ant/notes.txt",
        "note: classes without samples in train: cat",
        "note: pictures are resized to 224x224, and the median of their shorter sides is 10: dataset.image_size=10",
    ):
        assert row in out.replace("\n", " "), row
    assert not terminal.err
    assert "FP32" not in terminal.out


def test_a_folder_without_a_problem_ends_with_0_and_does_not_build_a_model(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mptrain.lab.commands.doctor_checks.check_scaling", lambda *_: pytest.fail("the model was asked for")
    )
    fill(tmp_path / "pics", ("train", "val", "test"), {"ant": 4, "bee": 3})
    assert terminal("doctor", "dataset=image_folder", "dataset.root=pics") == 0
    first, samples, classes = terminal.out.rstrip().split("\n\n")[:3]
    assert first == "image_folder: no errors; 21 files read; 3x224x224, 2 classes"
    assert samples.split()[:7] == ["train", "val", "test", "samples", "7", "7", "7"]
    assert classes.split() == ["class", "train", "val", "test", "ant", "4", "4", "4", "bee", "3", "3", "3"]


@pytest.fixture
def trains(terminal, monkeypatch):
    """A terminal whose training is not replaced."""
    monkeypatch.setattr("mptrain.cli.train.train", train)
    return terminal


@pytest.mark.long
def test_a_single_class_is_an_error_for_doctor_as_for_training(trains, tmp_path):
    fill(tmp_path / "pics", (".",), {"ant": 10})
    words = ("dataset=image_folder", "dataset.root=pics", "dataset.image_size=16", "dataset.workers=0")
    said = "task=classify needs num_classes, which dataset=image_folder does not have: the images are all in one class "
    said += "folder, ant, and at least two classes are needed hint: put those of each class into ROOT/CLASS"
    assert trains(*words, "model=cnn") == 2
    assert f"error: {said}" in " ".join(trains.err.split())
    assert trains("doctor", *words) == 6
    assert trains.out.startswith("image_folder: 1 error stops training; 10 files read; ")
    assert f"found: {said}" in " ".join(trains.out.split())
    assert "on_error" not in trains.out
    assert trains("doctor", *words, "dataset.channels=1", "model=dcgan", "train.batch_size=4") in (0, 4)
    assert "needs num_classes" not in trains.out


def test_skipping_does_not_help_with_an_empty_class_and_is_not_proposed_for_it(trains, tmp_path):
    fill(tmp_path / "pics", (".",), {"ant": 5, "bee": 5, "cat": 0})
    words = ("dataset=image_folder", "dataset.root=pics", "dataset.on_error=skip")
    assert trains("doctor", *words) == 6
    assert "found: pics/cat: the class has no images\nhint: put images there, or remove the folder" in trains.out
    assert "on_error" not in trains.out
    assert trains("model=mlp", *words) == 6
    assert "hint: put images there, or remove the folder" in " ".join(trains.err.split())


@pytest.mark.parametrize("workers", [0, 2])
def test_training_names_the_command_that_lists_all_its_problems(trains, tmp_path, workers):
    fill(tmp_path / "my pics", (".",), {"ant": 5, "bee": 5})
    for name in ("ant", "bee"):
        (tmp_path / "my pics" / name / "text.png").write_text("no picture")
    words = ["dataset=image_folder", "dataset.root=my pics", "dataset.image_size=8", f"dataset.workers={workers}"]
    command = shlex.join(["mptrain", "doctor", *words])
    assert trains("model=mlp", "train.batch_size=4", *words) == 6
    assert f"list all such files: {command}" in " ".join(trains.err.split())
    state = json.loads(next((tmp_path / "outputs").rglob("run.json")).read_text())
    assert state["hint"].endswith(command)
    (tmp_path / "my pics" / "cat").mkdir()
    assert trains("model=mlp", "train.batch_size=4", *words) == 6
    assert "my pics/cat: the class has no images" in trains.err
    assert f"list all such files: {command}" in " ".join(trains.err.split())
    assert trains(*shlex.split(command)[1:]) == 6
    assert trains.out.startswith("image_folder: 3 errors stop training; ")


def test_small_pictures_that_are_enlarged_much_are_a_note(terminal, tmp_path):
    fill(tmp_path / "pics", (".",), {"ant": 5, "bee": 5})
    words = ("doctor", "dataset=image_folder", "dataset.root=pics")
    assert terminal(*words, "dataset.image_size=20") == 0
    assert "dataset.image_size=10 would keep that size" in " ".join(terminal.out.split())
    assert terminal(*words, "dataset.image_size=19") == 0
    assert "resized" not in terminal.out


def test_a_leak_ends_with_6_also_after_the_model_was_checked(terminal, tmp_path):
    fill(tmp_path / "pics", ("train", "val"), {"ant": 4, "bee": 4})
    shutil.copy(tmp_path / "pics/train/ant/0.png", tmp_path / "pics/val/ant/leak.png")
    words = ("dataset=image_folder", "dataset.root=pics", "dataset.image_size=8", "dataset.augment=false")
    assert terminal("doctor", *words, "model=mlp", "train.batch_size=4") == 6
    assert "found: same pixels in splits train and val" in terminal.out
    assert "mlp in amp_dynamic: no problems found" in terminal.out


def test_of_many_classes_the_smallest_and_largest_are_shown_and_long_lists_end(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CLASSES", 4)
    monkeypatch.setattr(module, "FILES_NAMED", 2)
    fill(tmp_path / "pics", (".",), {f"k{number}": number for number in (5, 1, 3, 2, 4, 6)})
    for number in range(3):
        picture(50 + number).convert("RGBA").save(tmp_path / "pics" / "k6" / f"alpha{number}.png")
    assert terminal("doctor", "dataset=image_folder", "dataset.root=pics", "dataset.val_share=0") == 0
    assert [line.split() for line in terminal.out.split("\n\n")[2].splitlines()] == [
        ["class", "train"],
        ["k1", "1"],
        ["k2", "2"],
        ["(2", "classes", "in", "between)"],
        ["k5", "5"],
        ["k6", "9"],
    ]
    assert re.search(
        r"note: transparency \(left out\): 3 files: \S+alpha0.png,\s+\S+alpha1.png and\s+1 more", terminal.out
    )


def test_of_large_splits_evenly_spaced_files_are_read_and_that_is_said(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(data_check, "FILES", 4)
    fill(tmp_path / "pics", (".",), {"ant": 10, "bee": 10})
    assert terminal("doctor", "dataset=image_folder", "dataset.root=pics", "dataset.val_share=0") == 0
    assert terminal.out.startswith("image_folder: no errors; 4 files read of 20, evenly spaced; ")


@pytest.mark.long
@each(
    ("words", "rows"),
    [
        (("digits",), ["samples 1,200 200 397", "0 119 20 39"]),
        (("number_words", "dataset.train_samples=50"), ["samples 50 600 600", "source tokens, min / median / max"]),
        (("tone_words",), ["seconds, min / median / max", "letters, min / median / max"]),
        (("made_up_sounds",), ["recordings 160 24 48", "bell 40 6 12", "audio samples, min / median / max 4,000"]),
        (("digit_scenes",), ["boxes 5,813 386 786", "boxes of a picture, min / median / max 1 / 2 / 3"]),
        (("text", "dataset.path=book.txt", "dataset.sequence_length=16", "dataset.val_share=0.2"), ["tokens 2,"]),
    ],
)
def test_other_data_sets_tell_sizes_classes_and_lengths(terminal, words, rows):
    Path("book.txt").write_text("one two three four five six seven eight.\n" * 400)
    assert terminal("doctor", f"dataset={words[0]}", *words[1:]) == 0
    assert terminal.out.startswith(f"{words[0]}: no errors; ")
    assert all(row in re.sub(" +", " ", terminal.out) for row in rows)


def test_missing_data_and_contradictory_words_are_errors(terminal):
    assert terminal("doctor", "dataset=image_folder", "dataset.root=nowhere") == 6
    assert terminal("doctor", "dataset=image_folder", "dataset.val_samples=1", "dataset.val_share=0.1") == 2
