"""What ``mptrain doctor KEY=VALUE ...`` prints, and how it ends."""

from __future__ import annotations

import math
import re

import pytest
from PIL import Image

from mptrain.cli.blocks import block_lines
from mptrain.lab.commands import doctor_checks as module
from mptrain.lab.step.ranges import GradientErrors, by_module
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


@pytest.mark.long
def test_every_line_fits_a_narrow_terminal(terminal, monkeypatch):
    monkeypatch.setattr("mptrain.cli.messages.line_width", lambda stream: 80)
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal("doctor", "model=cnn", *TINY[2:], "precision=fp16_static", "precision.keep_fp32=[]") == 4
    assert max(map(len, terminal.out.splitlines())) <= 80
    assert "found: 1, 4, 8, 12: parameters and statistics of 4 norm layers are FP16" in terminal.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=mlp", "precision=fp32"), "computes nothing in half precision"),
        (("model=mlp", "precision=mxfp8_emulated"), "mptrain formats compares the gradients"),
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


@pytest.mark.parametrize("fault", ["beside_softmax", "clip"])
def test_no_loss_scale_is_called_right_where_something_worse_is_wrong(terminal, fault):
    own = ("model._target_=tests.faulty_networks.network", "extensions.allow=[tests.faulty_networks]", "~model.widths")
    assert terminal("doctor", *own, f"+model.fault={fault}", *TINY[1:], "precision=fp16_dynamic") == 4
    assert "so loss scales are not evaluated" in " ".join(terminal.out.split("\n\n")[0].split())
    assert "is usable" not in terminal.out
