"""What functions for Python say of a mistake: in words of Python, and what to write instead."""

from __future__ import annotations

import re

import pytest
from report.folders import make_run

import mptrain
from mptrain.system.errors import MptrainError


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
    "a list": (lambda: mptrain.train(["model=cnn"]), r"an override is a list; give texts: mptrain.train\("),
    "values to sweep": (lambda: mptrain.train("seed=1,2"), "two values for one key: call train once for each"),
    "a configuration": (lambda: mptrain.train(config_name="none"), "config_name= none: no such file"),
    "a filter": (lambda: mptrain.runs("outputs", "sede=1"), "sede=1: no run has the key"),
    "a number": (lambda: mptrain.runs("outputs", sort="topp"), "sort=topp: no run has such a number"),
    "a mistyped folder": (lambda: mptrain.runs("outptus"), "no folder outptus; did you mean outputs"),
    "a mistyped last": (lambda: mptrain.open_run("lsat"), "no run directory lsat; did you mean last"),
    "no margin": (
        lambda: mptrain.compare(logs={"a": "log.csv", "b": "log.csv"}, metric="loss"),
        "needs margin=.*margin=0.01",
    ),
    "an ending": (lambda: mptrain.open_run("good").export("net.zip"), "output= net.zip"),
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
