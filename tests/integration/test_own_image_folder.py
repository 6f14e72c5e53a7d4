"""Training on class folders as people have them, with shares held out: what it leaves out and converts is on record."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

from mptrain.cli.main import main

WORDS = (
    "model=mlp",
    "dataset=image_folder",
    "dataset.root=pics",
    "dataset.val_share=0.2",
    "dataset.test_share=0.2",
    "dataset.image_size=8",
    "dataset.workers=0",
    "dataset.on_error=skip",
    "train.batch_size=4",
    "precision=fp32",
    "device=cpu",
    "threads=1",
)


def test_class_folders_train_and_say_once_what_was_left_out_and_converted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        folder = tmp_path / "pics" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        level = np.random.default_rng(number).integers(0, 80, (9, 9, 3), dtype=np.uint8) + 170 * (number % 2)
        Image.fromarray(level.astype(np.uint8)).convert("CMYK").save(folder / f"{number}.jpg")
    (tmp_path / "pics/dark/broken.png").write_text("no picture")
    (tmp_path / "pics/light/notes.txt").write_text("no picture")
    assert main([*WORDS, "train.epochs=4", "run.name=whole"]) == 0
    said = capsys.readouterr().err
    assert said.count("warning: no pictures, left out: 1 .txt file, such as pics/light/notes.txt") == 1
    assert said.count("CMYK: ") == 1
    assert said.count("broken.png (cannot be decoded: it is no picture of a known format)") == 1
    run = tmp_path / "outputs" / "whole"
    messages = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert sum(".txt file" in event.get("message", "") for event in messages) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert sum(summary["converted_files"].values()) == 20
    assert sum(summary["unusable_samples"].values()) == 1
    assert json.loads((run / "data.json").read_text())["other_files"] == {".txt": 1}
    assert summary["test"]["top1"] == 1.0
