"""Runs on picture files of other kinds than 8-bit RGB."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from small_runs import loop_of

from mptrain.cli.main import main

pytestmark = pytest.mark.workload

WORDS = (
    "dataset=image_folder",
    "dataset.image_size=8",
    "dataset.workers=0",
    "model=mlp",
    "precision=fp32",
    "train.batch_size=8",
    "train.epochs=4",
)


def test_two_classes_of_16_bits_are_told_apart_and_what_was_converted_is_said_once(tmp_path):
    root, chance = tmp_path / "data", np.random.default_rng(0)
    for part, name, level in ((part, *one) for part in ("train", "val") for one in (("dark", 5000), ("light", 50000))):
        (root / part / name).mkdir(parents=True)
        for number in range(8):
            values = (level + chance.normal(0, 1500, (10, 10))).clip(0, 65535)
            Image.fromarray(values.astype(np.uint16)).save(root / part / name / f"{number}.png")
    loop = loop_of(tmp_path, *WORDS, f"dataset.root={root}")
    loop.run()
    assert loop.progress.last["val"]["top1"] == 1.0
    events = [json.loads(line) for line in (loop.storage.paths.events).read_text().splitlines()]
    (said,) = [event["message"] for event in events if event["event"] == "warning"]
    assert said.startswith("train has unusual files, 16-bit (the high byte is used): 16 files, such as /")


def test_runs_that_decode_in_another_way_are_not_compared_without_saying_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "data" / place).mkdir(parents=True)
        for number in range(4):
            coarse = chance.integers(0, 256, (6, 8, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((128, 96)).save(tmp_path / "data" / place / f"{number}.jpg")
    words = (*WORDS[:-1], "train.epochs=1", "dataset.root=data", "device=cpu", "threads=1")
    for way in ("full", "draft"):
        assert main([*words, f"dataset.decode={way}", f"run.name={way}"]) == 0
    cards = [json.loads((tmp_path / "outputs" / way / "data.json").read_text()) for way in ("full", "draft")]
    assert cards[1] == {**cards[0], "decode": "draft"}
    capsys.readouterr()
    assert main(["compare", "full", "draft"]) == 0  # two single runs: side by side
    said = " ".join(capsys.readouterr().out.split())
    assert "no verdict: " in said
    assert "dataset.decode is full in full, draft in draft" in said
    for what in ("first batches", "descriptions of the data", "evaluated samples"):
        assert what in said, what
    assert main(["compare", "full", "draft", "--by", "dataset.decode"]) == 0
    assert "arms also differ in dataset.decode, as claimed" in " ".join(capsys.readouterr().out.split())
