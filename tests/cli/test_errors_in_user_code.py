"""An exception in a user's own class is blamed on its line, wherever mptrain calls it, and never on mptrain."""

from __future__ import annotations

import importlib
import sys

import pytest

from mptrain.cli.main import main
from tests.small_runs import TINY

PARTS = """
from dataclasses import dataclass
from mptrain.optimizer.rules import SGD
from mptrain.scaler import DynamicScaler, Scaler
from mptrain.schedule import Cosine

@dataclass(frozen=True, kw_only=True)
class MyScaler(DynamicScaler): pass

@dataclass(frozen=True, kw_only=True)
class MyRule(SGD): pass

@dataclass(frozen=True, kw_only=True)
class MySchedule(Cosine): pass

@dataclass(frozen=True)
class Unfinished(Scaler): pass

def fail(*_):
    raise TypeError("oops")
"""
PLACE = f"parts_that_fail.py:{len(PARTS.splitlines())} in fail"
ALLOW = "extensions.allow=[parts_that_fail]"
WORDS = ("--config-dir", "conf", *TINY, "precision=amp_dynamic", ALLOW)
OWN = ("scaler=mine", "optimizer=mine", "schedule=mine")


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "parts_that_fail.py").write_text(PARTS)
    of = {
        "scaler/mine": "MyScaler",
        "scaler/bad": "Unfinished",
        "optimizer/mine": "MyRule",
        "schedule/mine": "MySchedule",
    }
    for option, name in of.items():
        path = tmp_path / f"conf/{option}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"_target_: parts_that_fail.{name}\n" + "lr: 0.1\n" * (name == "MyRule"))
    yield importlib.import_module("parts_that_fail")
    sys.modules.pop("parts_that_fail")


@pytest.mark.parametrize(
    ("of", "method"),
    [
        *[("MyScaler", name) for name in ("after", "describe", "floor", "initial", "measure", "range_in_words")],
        *[("MySchedule", "factor"), ("MyRule", "state"), ("MyRule", "apply")],
    ],
)
def test_the_line_is_named_wherever_it_is_called(parts, monkeypatch, capsys, of, method):
    kept = getattr(getattr(parts, of), method)
    monkeypatch.setattr(getattr(parts, of), method, property(parts.fail) if isinstance(kept, property) else parts.fail)
    assert main([*WORDS, *OWN]) == 2
    said = capsys.readouterr().err
    assert f"error: {PLACE}: TypeError: oops\nhint: this code is allowed by extensions.all" in said
    assert "Traceback" not in said


def test_a_checkpoint_is_not_blamed_for_a_method_that_reads_it(parts, monkeypatch, capsys):
    assert main([*WORDS, *OWN, "run.name=begun"]) == 0
    monkeypatch.setattr(parts.MyScaler, "resume", parts.fail)
    assert main(["resume", "outputs/begun", "train.epochs=9", ALLOW]) == 2
    assert f"error: {PLACE}: TypeError: oops" in capsys.readouterr().err


@pytest.mark.usefixtures("parts")
def test_a_class_without_a_method_is_named(capsys):
    assert main([*WORDS, "scaler=bad"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: parts_that_fail.Unfinished cannot be built with its defaults: TypeError: Can't inst")
