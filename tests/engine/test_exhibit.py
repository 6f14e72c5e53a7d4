"""What a task shows becomes files that other programs open."""

from __future__ import annotations

import csv
import json

import torch
from PIL import Image
from scipy.io import wavfile

from mptrain.engine.exhibit import keep_exhibits, on_host
from mptrain.workloads.base.task import Pictures, Sounds, Texts

TEXTS = Texts(("source", "model"), (('say "hi"', "a\ttab"), ("two\nlines", "ünïcode"), ("", "=1+1")))


def test_each_kind_of_exhibit_has_its_files(tmp_path):
    sounds = Sounds(torch.tensor([[0.0, 1.0, -1.0, 2.0, float("nan")], [0.5] * 5]), 8000)
    shown = {"grid": Pictures(torch.rand(4, 1, 5, 5)), "said": TEXTS, "clip": sounds}
    names = keep_exhibits(tmp_path / "samples", 12, shown)
    assert not (tmp_path / "samples" / "captions.json").exists()
    assert names == ["grid-000012.png", "said-000012.tsv", "clip-1-000012.wav", "clip-2-000012.wav"]
    with Image.open(tmp_path / "samples" / names[0]) as picture:
        assert picture.size == (13, 13)
    with (tmp_path / "samples" / names[1]).open(newline="", encoding="utf-8") as file:
        assert tuple(map(tuple, csv.reader(file, dialect="excel-tab"))) == (TEXTS.columns, *TEXTS.rows)
    rate, samples = wavfile.read(tmp_path / "samples" / names[2])
    assert rate == 8000
    assert samples.tolist() == [0, 32767, -32767, 32767, 0]


def test_half_precision_is_widened_on_the_host():
    sounds = on_host(Sounds(torch.ones(1, 3, dtype=torch.float16), 16000))
    assert isinstance(sounds, Sounds)
    assert sounds.samples.dtype == torch.float32
    pictures = on_host(Pictures(torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), "grey"))
    assert isinstance(pictures, Pictures)
    assert (pictures.pixels.dtype, pictures.caption) == (torch.float32, "grey")
    assert on_host(TEXTS) is TEXTS


def test_a_text_with_carriage_returns_or_half_a_letter_stays_one_row(tmp_path):
    keep_exhibits(tmp_path / "samples", 1, {"said": Texts(("one", "two"), (("a\rb\r\nc", "d"), ("\ud800", "e")))})
    with (tmp_path / "samples" / "said-000001.tsv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file, dialect="excel-tab")) == [["one", "two"], ["a\nb\nc", "d"], ["?", "e"]]


def test_a_sheet_has_the_columns_that_were_asked_for(tmp_path):
    keep_exhibits(tmp_path / "samples", 1, {"rows": Pictures(torch.rand(6, 1, 5, 5), columns=3)})
    with Image.open(tmp_path / "samples" / "rows-000001.png") as picture:
        assert picture.size == (3 * 6 + 1, 2 * 6 + 1)


def test_captions_stand_beside_the_files(tmp_path):
    sounds = Sounds(torch.zeros(2, 5), 8000, ("one", "ünïcode \ud800"))
    names = keep_exhibits(tmp_path / "samples", 7, {"clip": sounds, "grid": Pictures(torch.rand(1, 1, 5, 5), "noise")})
    assert "captions.json" not in names  # trackers show what is named
    found = json.loads((tmp_path / "samples" / "captions.json").read_text(encoding="utf-8"))
    assert found == {"clip-1": "one", "clip-2": "ünïcode ?", "grid": "noise"}
