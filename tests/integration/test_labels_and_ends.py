"""A run remembers what its outputs mean and where it ends, and says so instead of going on regardless."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mptrain.config.compose import compose
from mptrain.run.evaluation import evaluate_run
from mptrain.run.resume import launch, resume
from mptrain.system.errors import CheckpointError, ConfigError, DataError
from tests.small_runs import TINY, run_in_process

TEXT = (
    "model=char_lstm", "dataset=text", "dataset.path=book.txt", "dataset.sequence_length=8", "train.batch_size=4",
    "model.embedding_size=4", "model.hidden_size=4", "precision=fp32", "train.max_steps=2", "run.name=run",
)  # fmt: skip


def train(*words):
    return launch(compose(words), lambda opening: []).root


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_weights_are_not_evaluated_or_trained_on_another_vocabulary_of_the_same_size():
    text = "the quick brown fox jumps over the lazy dog. " * 40
    Path("book.txt").write_text(text)
    train(*TEXT)
    before = evaluate_run("outputs/run", [], "last", average=True).records
    Path("book.txt").write_text(text[::-1].replace("q", "Q").replace("z", "Z"))
    for attempt in (
        lambda: evaluate_run("outputs/run", [], "last", average=True),
        lambda: resume("outputs/run", ["train.max_steps=4"], lambda opening: []),
    ):
        with pytest.raises(CheckpointError, match=r"has other labels \(classes, tokens\) than"):
            attempt()
    Path("book.txt").write_text(text)
    assert evaluate_run("outputs/run", [], "last", average=True).records == before


def test_the_run_keeps_labels_files_and_preparation():
    Path("book.txt").write_text("abcabcabcabc\n" * 40)
    train(*TEXT)
    card = json.loads(Path("outputs/run/data.json").read_text())
    assert sorted(card["labels"])[1:] == ["a", "b", "c"] or set("abc") <= set(card["labels"])
    assert card["files"] == {"train": [str(Path("book.txt").absolute())]}
    assert card["vocabulary_size"] == len(card["labels"])
    train(*TINY, "run.name=digits")
    card = json.loads(Path("outputs/digits/data.json").read_text())
    assert card["labels"] == list("0123456789")
    assert card["preparation"]["mean"] == [0.3046]
    assert card["preparation"]["resize"]["side"] == 8


@pytest.mark.parametrize("path", ["''", "."])
def test_an_empty_path_is_not_the_present_folder(path):
    Path("other").mkdir()
    Path("other/notes.txt").write_text("some text " * 200)
    with pytest.raises(DataError, match=r"dataset.path is empty or the current folder"):
        train(*TEXT, f"dataset.path={path}")


@pytest.mark.parametrize(
    ("words", "again", "message"),
    [
        (
            ["train.max_steps=6"],
            ["train.max_steps=3"],
            "is at step 6, and train.epochs=3 with train.max_steps=3 ends it",
        ),
        (["train.max_steps=6"], ["seed=1"], "there is nothing left to do"),
        (["train.max_minutes=0.0001"], ["seed=1"], "there is nothing left to do"),
    ],
)
def test_an_end_that_lies_behind_is_refused_and_the_run_stays_as_it_was(words, again, message):
    root = train(*TINY, *words, "run.name=run")
    before = {path.name: path.read_bytes() for path in root.iterdir() if path.is_file() and path.name != "run.lock"}
    with pytest.raises(ConfigError, match=message):
        resume(str(root), again, lambda opening: [])
    assert {path.name: path.read_bytes() for path in root.iterdir() if path.name in before} == before


def test_a_run_is_found_by_its_name():
    train(*TINY, "run.name=mine", "train.max_steps=2")
    assert evaluate_run("mine", [], "last", average=True).root == Path("outputs/mine")
    assert resume("mine", ["train.max_steps=3"], lambda opening: []).summary["steps"] == 3


def test_the_command_that_export_proposes_makes_the_same_model(tmp_path):
    words = (*TINY, "model.hidden=[7,5]", "train.max_steps=2", "run.name=r")
    assert run_in_process(*words, cwd=tmp_path).returncode == 0
    said = run_in_process("export", "r", cwd=tmp_path).stdout
    tune = shlex.split(said.partition(" fine-tune ")[2])
    data = [word for word in TINY if word.startswith("dataset")]
    assert data
    assert tune[:2] == ["mptrain", "model=mlp"]
    assert set(tune[2:]) == {"model.hidden=[7,5]", "model.weights=outputs/r/export/last-float32.pt", *data}
    assert re.search(r"perceptron\.mlp\(hidden=.7,\s+5.,.*num_outputs=10", said, flags=re.DOTALL)
    assert "last-float32.pt.json: labels and input preparation" in said
    refused = run_in_process("export", "r", "--output", ".", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--output . is a folder" in refused.stderr
