"""Data that were changed behind a run's back are noticed: gone on with, evaluated again, compared."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.small_runs import run_in_process

WORDS = (
    "model=char_lstm", "model.hidden_size=16", "model.embedding_size=8", "dataset=text", "dataset.path=text",
    "dataset.tokens=char", "dataset.sequence_length=8", "train.batch_size=4", "train.epochs=2", "threads=1",
)  # fmt: skip
LETTERS = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text").mkdir()
    for part, times in (("train", 20), ("valid", 5), ("test", 5)):
        (folder / "text" / f"{part}.txt").write_text(LETTERS * times)
    done = run_in_process(*WORDS, "precision=fp32", "run.name=a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def trained(finished, tmp_path):
    """A finished run on three files of text, in the folder that it was started from."""
    return shutil.copytree(finished, tmp_path / "copy")


def change(folder, part):
    """The same letters in another order, so that nothing but the samples is another."""
    file = folder / "text" / f"{part}.txt"
    file.write_text(file.read_text()[::-1])


def test_unchanged_data_are_not_spoken_of(trained):
    resumed = run_in_process("resume", "a", "train.epochs=3", cwd=trained)
    assert resumed.returncode == 0, resumed.stderr
    assert "data have changed" not in resumed.stderr
    assert "differ from those" not in run_in_process("eval", "a", cwd=trained).stdout


def test_a_run_that_goes_on_with_other_samples_says_so_and_belongs_to_no_arm(trained):
    shutil.copytree(trained / "outputs/a", trained / "outputs/b")
    change(trained, "train")
    resumed = run_in_process("resume", "a", "train.epochs=3", cwd=trained)
    assert resumed.returncode == 0, resumed.stderr
    said = "the training data have changed: epoch 2 would not have the same samples"
    assert f"warning: {said}" in resumed.stderr
    assert said in json.loads((trained / "outputs/a/run.json").read_text())["attempts"][-1]["changes"]
    compared = run_in_process("compare", "outputs/a", "outputs/b", cwd=trained)
    said = "changed its configuration on resume: train.epochs was 2, now 3; the training data have changed"
    assert said in " ".join((compared.stdout + compared.stderr).split())


def test_an_evaluation_of_other_samples_says_so_unless_a_key_explains_it(trained):
    change(trained, "test")
    found = run_in_process("eval", "a", cwd=trained).stdout
    assert "note=the test data differ from those that the run evaluated: " in found
    assert "the val data" not in found
    assert "differ from those" not in run_in_process("eval", "a", "train.batch_size=2", cwd=trained).stdout


def test_a_comparison_objects_to_other_test_data(trained):
    change(trained, "test")
    assert run_in_process(*WORDS, "precision=bf16", "run.name=b", cwd=trained).returncode == 0
    compared = run_in_process("compare", "outputs/a", "outputs/b", cwd=trained)
    said = " ".join((compared.stdout + compared.stderr).split())
    assert "the evaluated samples of b and a differ for seed 0" in said
    assert "evaluated samples have the same digest" not in said
