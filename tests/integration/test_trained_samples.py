"""A run records the samples that it trained on, and says wherever it meets them again."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
from PIL import Image

from mptrain.cli.main import main
from tests.small_runs import TINY

WORDS = (
    *("model=mlp", "model.hidden=[8]", "precision=fp32", "device=cpu", "threads=1", "train.epochs=1"),
    *("train.batch_size=64", "dataset=image_folder", "dataset.image_size=8", "dataset.workers=0"),
)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """304 pictures in four class folders."""
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    for number in range(304):
        place = tmp_path / "pictures" / "abcd"[number % 4]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return tmp_path / "pictures"


def said(capsys, *words, code=0):
    """Sentences on leakage that a command prints."""
    capsys.readouterr()
    assert main([*words]) == code
    out, err = capsys.readouterr()
    return [
        line.partition("=" if line.startswith("note=") else ": ")[2]
        for line in (out + err).splitlines()
        if "trained on" in line
    ]


@pytest.mark.long
def test_evaluations_and_resumed_runs_say_how_many_samples_were_trained_on(pictures, capsys):
    train = (*WORDS, "dataset.root=pictures", "dataset.val_share=0.2", "dataset.test_share=0.2")
    assert said(capsys, *train, "run.name=run") == []
    assert said(capsys, "eval", "outputs/run") == []
    half = said(capsys, "eval", "outputs/run", "dataset.val_share=0.5")
    assert len(half) == 1
    count, total = (int(word) for word in half[0].split(" val samples")[0].split(" of "))
    assert 60 < count < total < 190
    other = said(capsys, "eval", "outputs/run", "dataset.split_seed=1")
    assert [sentence.split(" ", 3)[3] for sentence in other] == [
        "val samples were trained on",
        "test samples were trained on",
    ]
    for path in random.Random(1).sample(sorted(pictures.rglob("*.png")), 10):
        path.unlink()
    assert said(capsys, "eval", "outputs/run") == []
    assert said(capsys, "resume", "outputs/run", "train.epochs=2") == []
    assert len(said(capsys, "resume", "outputs/run", "train.epochs=3", "dataset.split_seed=1")) == 2
    assert len(said(capsys, "eval", "outputs/run", "dataset.split_seed=0")) == 2  # of both trainings


def test_weights_of_a_run_bring_its_samples_along(pictures, capsys):
    train = (*WORDS, "dataset.root=pictures")
    assert said(capsys, *train, "run.name=run") == []
    assert main(["export", "outputs/run"]) == 0
    assert main(["export", "outputs/run", "--output", "away.pt"]) == 0
    for number, weights in enumerate(("outputs/run", "outputs/run/export/last-float32.pt", "away.pt")):
        more = (f"model.weights={weights}", "dataset.split_seed=1", f"run.name=fine{number}")
        assert len(said(capsys, *train, *more)) == 1, weights
    assert len(said(capsys, "eval", "outputs/fine1")) == 1
    assert said(capsys, *train, "model.weights=outputs/run", "run.name=same") == []


def test_another_folder_is_a_test_set_and_pictures_are_known_under_other_names(pictures, capsys, tmp_path):
    train = (*WORDS, "dataset.root=pictures", "train.early_stopping={}")
    assert said(capsys, *train, "run.name=run") == []
    chance = np.random.default_rng(1)
    for number in range(5):
        for place in ("new/test/b", "plain/c"):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            Image.fromarray(chance.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(tmp_path / place / f"{number}.png")
    for folder in ("new", "plain"):
        assert said(capsys, "eval", "outputs/run", f"dataset.root={folder}") == []
        assert main(["eval", "outputs/run", f"dataset.root={folder}"]) == 0
        assert "split=test samples=5 " in capsys.readouterr().out
    for number, path in enumerate(sorted(pictures.rglob("*.png"))):
        shutil.copy(path, tmp_path / "new/test/b" / f"copy{number}.png")
    (sentence,) = said(capsys, "eval", "outputs/run", "dataset.root=new")
    assert sentence.endswith(" of 309 test samples were trained on")
    assert main([*WORDS, "dataset.root=new"]) == 6
    assert "put the training images into ROOT/train" in capsys.readouterr().err


def test_images_in_memory_are_known_as_well(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (*TINY, "train.epochs=1", "precision=fp32", "device=cpu", "threads=1", "dataset.train_samples=null")
    assert said(capsys, *words, "run.name=run") == []
    assert said(capsys, "eval", "outputs/run") == []
    (sentence,) = said(capsys, "eval", "outputs/run", "dataset.val_samples=400")
    assert sentence.endswith(" of 400 val samples were trained on")
    (tmp_path / "outputs/run/trained_samples.bin").unlink()
    assert said(capsys, "eval", "outputs/run") == ["it is not on record which samples the weights were trained on"]
