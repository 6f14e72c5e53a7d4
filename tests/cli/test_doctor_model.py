"""What ``mptrain doctor KEY=VALUE ...`` prints, and how it ends."""

from __future__ import annotations

import math

import pytest

from mptrain.cli import doctor_model as module
from mptrain.diagnostics.scaling import Distances, by_module
from mptrain.numerics.formats import FLOAT16

TINY = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=32", "train.batch_size=8")


def test_a_sound_model_ends_with_0_and_a_table(terminal):
    assert terminal("doctor", *TINY, "precision=amp_static") == 0
    first, blank, head, *rows = terminal.out.splitlines()
    assert first.startswith("mlp in amp_static: nothing is wrong; loss scales 2^")
    assert (blank, head.split()) == ("", ["module", "FP32", "forward", "backward", "scales", "note"])
    assert [row.split()[0] for row in rows[:4]] == ["1", "3", "5", "7"]
    assert "one step of 8 samples" in terminal.out
    assert "note: the constant scale, 2^10, is right" in terminal.out
    assert "found:" not in terminal.out
    assert not terminal.err


def test_what_is_wrong_ends_with_4_by_name_and_with_a_hint(terminal):
    assert terminal("doctor", *TINY, "precision=fp16_static", "scaler.scale=16777216") == 4
    assert terminal.out.startswith("mlp in fp16_static: something is wrong; ")
    assert "found: scaler: the configured scale 2^24 is outside of" in terminal.out
    assert "hint: write scaler=static scaler.scale=" in terminal.out


def test_every_line_fits_a_narrow_terminal(terminal, monkeypatch):
    monkeypatch.setattr(module, "width_of", lambda stream: 80)
    assert terminal("doctor", "model=cnn", *TINY[2:], "precision=fp16_static", "precision.keep_fp32=[]") == 4
    assert max(map(len, terminal.out.splitlines())) <= 80
    assert "found: 1, 4, 8, 12: parameters and statistics of 4 norms are FP16" in terminal.out


def test_where_a_dynamic_scale_begins_is_said(terminal):
    assert terminal("doctor", *TINY, "precision=amp_dynamic", "scaler.init_scale=16777216") == 0
    assert "note: the first scale, 2^24, is too high and will come down" in terminal.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x",), "doctor takes KEY=VALUE, but there is 'x'"),
        (("model=mlp", "-m"), "doctor knows no -m"),
        (("model=mlp", "precision=fp32"), "computes nothing in half precision"),
        (("model=mlp", "inject.step=1", "inject.tensor=input"), "the doctor looks at a model as it is"),
        (("model=mpl",), "no option 'mpl' in model"),
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
    return Distances(f"{name}.weight", 1, 1.0, 1e-7, 1e-2, 0.0, errors, shifts)


def test_many_modules_are_shown_by_what_holds_them_with_the_worst_of_each():
    inside = [of(f"layer{number}.{part}") for number in range(20) for part in ("conv", "norm")]
    inside[1] = of("layer0.norm", best=0.5, good=(1, 2))
    lines = module.table(by_module(inside, FLOAT16), 110)
    assert len(lines) == 21
    assert lines[1].split() == ["layer0", "(2)", "1e-07", "1", "%", "50", "%", "2^1", "too", "far", "off"]
    assert "2^0 to 2^1" in lines[2]


def test_long_names_lose_their_beginning():
    name = ".".join(["transformer"] * 12)
    *_, row = module.table(by_module([of(name)], FLOAT16), 80)
    assert row.startswith("…")
    assert "former  " in row
    assert len(row) <= 80


def planted(fault):
    own = ("model._target_=faulty_networks.network", "extensions.allow=[faulty_networks]", "~model.widths")
    return (*own, f"+model.fault={fault}", *TINY[1:], "precision=fp16_dynamic")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("beside_softmax", "2 things are wrong; while outputs are wrong, gradients say nothing about loss scales"),
        ("divides", "something is wrong; FP32 itself is not finite, so no loss scale is judged"),
        ("clip", "something is wrong; gradients do not follow the loss scale, so none is judged"),
    ],
)
def test_no_loss_scale_is_called_right_where_something_worse_is_wrong(terminal, fault, said):
    assert terminal("doctor", *planted(fault)) == 4
    assert said in " ".join(terminal.out.split("\n\n")[0].split())
    assert "is right" not in terminal.out
