"""What ``mptrain doctor KEY=VALUE ...`` prints, and how it ends."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from PIL import Image

from mptrain.cli import doctor_model as module
from mptrain.cli.blocks import block_lines
from mptrain.inspection.doctor_ranges import GradientErrors, by_module
from mptrain.numerics.formats import FLOAT16

TINY = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=32", "train.batch_size=8")


def test_a_sound_model_ends_with_0_and_a_table(terminal):
    assert terminal("doctor", *TINY, "precision=amp_static") == 0
    first, blank, head, *rows = terminal.out.splitlines()
    assert first.startswith("mlp in amp_static: no problems found; usable loss scales: 2^")
    assert (blank, head.split()) == ("", ["module", "FP32", "forward", "backward", "scales", "note"])
    assert [row.split()[0] for row in rows[:4]] == ["1", "3", "5", "7"]
    assert "one step of 8 samples" in terminal.out
    assert "note: the constant scale, 2^10, is usable" in terminal.out
    assert re.search(r"note: gradients are off by up to 0\.0\d+ %, most in [1357]\n", terminal.out)
    assert "found:" not in terminal.out
    assert not terminal.err


def test_what_is_wrong_ends_with_4_by_name_and_with_a_hint(terminal):
    assert terminal("doctor", *TINY, "precision=fp16_static", "scaler.scale=16777216") == 4
    assert terminal.out.startswith("mlp in fp16_static: 1 problem found; ")
    assert "found: scaler: the loss scale 2^24 is outside the usable range" in terminal.out
    assert "hint: set scaler=static scaler.scale=" in terminal.out


def test_every_line_fits_a_narrow_terminal(terminal, monkeypatch):
    monkeypatch.setattr("mptrain.cli.messages.line_width", lambda stream: 80)
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal("doctor", "model=cnn", *TINY[2:], "precision=fp16_static", "precision.keep_fp32=[]") == 4
    assert max(map(len, terminal.out.splitlines())) <= 80
    assert "found: 1, 4, 8, 12: parameters and statistics of 4 norm layers are FP16" in terminal.out


def test_where_a_dynamic_scale_begins_is_said(terminal):
    assert terminal("doctor", *TINY, "precision=amp_dynamic", "scaler.init_scale=16777216") == 0
    assert "note: the initial scale, 2^24, is too high and will decrease" in terminal.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=mlp", "precision=fp32"), "computes nothing in half precision"),
        (("model=mlp", "inject.step=1", "inject.tensor=input"), "doctor checks a model without injected faults"),
    ],
)
def test_wrong_words_end_with_2(terminal, words, said):
    assert terminal("doctor", *words) == 2
    assert said in terminal.err


def test_a_device_that_is_not_there_ends_with_3(terminal, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert terminal("doctor", *TINY, "device=cuda") == 3
    assert "torch sees no CUDA device" in terminal.err


def of(name, best=1e-3, good=(0, 1)):
    shifts = {exponent: 0.0 if exponent in good else math.inf for exponent in range(3)}
    errors = {exponent: best if exponent in good else math.inf for exponent in range(3)}
    return GradientErrors(f"{name}.weight", 1, 1.0, 1e-7, 1e-2, 0.0, errors, shifts)


def test_many_modules_are_shown_by_what_holds_them_with_the_worst_of_each():
    inside = [of(f"layer{number}.{part}") for number in range(20) for part in ("conv", "norm")]
    inside[1] = of("layer0.norm", best=0.5, good=(1, 2))
    rows = [[cell.text for cell in row] for row in module.scale_table(by_module(inside, FLOAT16)).rows]
    assert len(rows) == 20
    assert rows[0] == ["layer0 (2)", "1e-07", "1 %", "50 %", "2^1", "error too large"]
    assert rows[1][4] == "2^0 to 2^1"


def test_long_names_stay_whole_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = ".".join(["transformer"] * 12)
    _, *rows = block_lines([module.scale_table(by_module([of(name)], FLOAT16))])
    assert max(map(len, rows)) <= 80
    assert "".join(row.split(" ")[0] for row in rows) == name


@pytest.fixture
def pictures(tmp_path):
    """Two classes of plain pictures; and the name of a folder to put others in."""
    for part, name, number in itertools.product(("train", "val"), ("ant", "bee"), range(4)):
        path = tmp_path / part / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((12, 10), 60).save(path)
    return tmp_path


FOLDER = ("model=mlp", "dataset=image_folder", "dataset.image_size=8", "dataset.augment=false", "train.batch_size=4")


def test_every_file_of_a_folder_that_stops_training_is_listed_at_once_with_what_would_be_converted(terminal, pictures):
    plain, odd = Image.effect_noise((12, 10), 60), pictures / "train" / "ant"
    whole = (odd / "0.png").read_bytes()
    (odd / "cut.png").write_bytes(whole[: len(whole) // 2])
    (odd / "text.png").write_text("no picture")
    (pictures / "train" / "empty").mkdir()
    plain.rotate(90).save(pictures / "val" / "loose.png")
    plain.resize((1, 1)).save(odd / "one.png")
    plain.rotate(180).convert("CMYK").save(odd / "ink.jpg")
    plain.rotate(180).convert("RGBA").save(pictures / "val" / "ant" / "alpha.png")
    plain.save(odd / "moving.gif", save_all=True, append_images=[plain.rotate(90)])
    Image.new("I;16", (12, 10), 50_000).save(odd / "deep.png")
    plain.save(odd / "other.png", "JPEG")
    assert terminal("doctor", *FOLDER, f"dataset.root={pictures}") == 6
    lines = terminal.out.replace("\n  ", " ").splitlines()
    assert lines[0] == "image_folder: 4 errors stop training; 24 files read"
    assert [line.split(": ")[1].removeprefix(f"{pictures}/") for line in lines if line.startswith("found: ")] == [
        "train/ant/cut.png",
        "train/ant/text.png",
        "val/loose.png",
        "train/empty",
    ]
    notes = {line.split(": ")[1]: line.split(": ")[2] for line in lines if line.startswith("note: ")}
    assert {remark.removeprefix("palette, "): place.rpartition("/")[2] for remark, place in notes.items()} == {
        "1x1 pixels": "one.png",
        "CMYK": "ink.jpg",
        "transparency (left out)": "alpha.png",
        "several frames (the first is used)": "moving.gif",
        "16-bit (the high byte is used)": "deep.png",
        "JPEG named .png": "other.png",
        "classes without samples in train": "empty",
    }
    assert not terminal.err


def test_files_that_training_leaves_out_are_notes_and_the_model_is_looked_at(terminal, pictures):
    (pictures / "train" / "ant" / "text.png").write_text("no picture")
    assert terminal("doctor", *FOLDER, f"dataset.root={pictures}", "dataset.on_error=skip") == 0
    first, _, note, blank, model = terminal.out.replace("\n  ", " ").splitlines()[:5]
    assert first == "image_folder: no errors, 1 skipped; 17 files read"
    assert note.startswith(f"note: {pictures}/train/ant/text.png: skipped: cannot be decoded: ")
    assert (blank, model.partition(":")[0]) == ("", "mlp in amp_dynamic")


def test_photos_are_read_through_as_well(terminal, tmp_path):
    for number in range(4):
        Image.effect_noise((64, 64), 60).save(tmp_path / f"{number}.png")
    whole = (tmp_path / "0.png").read_bytes()
    for name in ("cut", "half"):
        (tmp_path / f"{name}.png").write_bytes(whole[: len(whole) // 2])
    words = ("dataset=photo_folder", f"dataset.root={tmp_path}", "dataset.patch_size=16", "dataset.tile_size=16")
    assert terminal("doctor", "model=dncnn", *words, "dataset.channels=1", "dataset.degradation=noise") == 6
    said = terminal.out.replace("\n  ", " ")
    assert said.startswith("photo_folder: 2 errors stop training; ")
    assert all(f"{name}.png: cannot be decoded: " in said for name in ("cut", "half"))


def planted(fault):
    own = ("model._target_=faulty_networks.network", "extensions.allow=[faulty_networks]", "~model.widths")
    return (*own, f"+model.fault={fault}", *TINY[1:], "precision=fp16_dynamic")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("beside_softmax", "1 problem found; outputs are wrong, so loss scales are not evaluated"),
        ("divides", "1 problem found; FP32 is not finite either, so loss scales are not evaluated"),
        (
            "clip",
            "1 problem found; gradients are not proportional to the loss scale, so loss scales are not evaluated",
        ),
    ],
)
def test_no_loss_scale_is_called_right_where_something_worse_is_wrong(terminal, fault, said):
    assert terminal("doctor", *planted(fault)) == 4
    assert said in " ".join(terminal.out.split("\n\n")[0].split())
    assert "is usable" not in terminal.out
