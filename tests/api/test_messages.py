"""What functions for Python say of a mistake: in words of Python, and what to write instead."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader

import mptrain
from mptrain.system.errors import MptrainError
from tests.report.folders import make_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_run(tmp_path / "outputs/good", steps=3)
    (tmp_path / "log.csv").write_text("step,loss\n1,2\n2,1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CALLS = {
    "a folder as text": (
        lambda: mptrain.train("model=cnn", config_dirs="mine"),
        "config_dirs=.*mine: there is no such",
    ),
    "a list": (
        lambda: mptrain.train(["model=cnn"]),
        r"an override is a list; each word is an argument of its own: \(\*words\)",
    ),
    "values to sweep": (lambda: mptrain.train("seed=1,2"), "two values for one key: call train once for each"),
    "a configuration": (lambda: mptrain.train(config_name="none"), "config_name=none: no such file"),
    "a filter": (lambda: mptrain.runs("outputs", "sede=1"), "sede=1: no run has the key"),
    "a number": (lambda: mptrain.runs("outputs", sort="topp"), "sort=topp: no run has such a number"),
    "a mistyped folder": (lambda: mptrain.runs("outptus"), "no folder outptus; did you mean outputs"),
    "a mistyped last": (lambda: mptrain.open_run("lsat"), "no run directory lsat; did you mean last"),
    "no margin": (
        lambda: mptrain.compare(logs={"a": "log.csv", "b": "log.csv"}, metric="loss"),
        "needs margin=.*margin=0.01",
    ),
    "a loader": (
        lambda: mptrain.train("model=mlp", dataloader=DataLoader([(torch.ones(2), 0)])),
        r"no argument dataloader; .*data=loader\.dataset.*train\.batch_size=N",
    ),
    "a length": (lambda: mptrain.open_run("good").predict("a", length=0), "length=0: must be a whole number from 1 to"),
    "a seed": (lambda: mptrain.open_run("good").predict("a", seed=True), "seed=True: must be .*; seed=N: draw others"),
    "heat": (lambda: mptrain.open_run("good").predict("a", temperature=-1), "temperature=-1: must be 0 or a positive"),
    "an ending": (lambda: mptrain.open_run("good").export("net.zip"), "output=net.zip"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_mistake_is_answered_in_words_of_python(folder, kind):
    call, said = CALLS[kind]
    with pytest.raises(MptrainError) as caught:
        call()
    message = f"{caught.value}; {caught.value.hint}"
    assert re.search(said, message), message
    assert not re.search(r"(?<!\S)-", message)


def test_names_of_the_package_are_completed():
    assert {"train", "compare", "open_run", "watch", "MptrainError"} < set(dir(mptrain))
    assert all(getattr(mptrain, name) is not None for name in dir(mptrain))


@pytest.mark.parametrize("look", [mptrain.open_run, mptrain.runs, mptrain.recommend])
def test_a_name_that_no_file_can_have_is_an_error_of_ours(look):
    with pytest.raises(MptrainError, match="too long"):
        look("x" * 300)


def test_a_watch_into_a_name_that_no_folder_can_have_is_refused():
    net = torch.nn.Linear(2, 2)
    with pytest.raises(MptrainError, match="too long"):
        mptrain.watch(net, torch.optim.SGD(net.parameters(), 0.1), dir="x" * 300)


def test_an_error_has_no_control_characters_and_no_secrets(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2hunter2")
    with pytest.raises(MptrainError) as caught:
        mptrain.open_run("a\x1b[31mhunter2hunter2")
    assert "no run directory a\\x1b[31m${oc.env:API_TOKEN}" in str(caught.value)
