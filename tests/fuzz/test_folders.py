"""Whatever the files of a sweep or a comparison hold, a report is made of them or they are said to be damaged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptrain.report import plotting
from mptrain.report.html_and_markdown import page_of
from mptrain.runlog.sweeps import SweepPaths, read_sweep
from mptrain.study.comparison.results import read_comparisons, write_comparisons
from tests.fuzz.hostile import examples, misfit, only_our_errors, spoiled
from tests.report.folders import make_comparison, make_sweep

VERDICT = {
    "schema": 2,
    "recipe": "mine",
    "title": "Mine",
    "claim": "It works.",
    "verdict": "holds",
    "words": ["a=1"],
    "expectations": [{"text": "a.top1 < b.top1", "outcome": "met", "numbers": "0.1"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "sweep"
    runs = {"steps": 5, "loss": lambda step: 1.0 / step}
    points = [([f"scaler.scale={scale}", "seed=0"], "done", runs) for scale in (1, 8)]
    make_sweep(place, [*points, (["scaler.scale=128", "seed=0"], "failed", None)])
    page_of(place)
    return place


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "compared"
    write_comparisons(SweepPaths(place).comparison, {"": make_comparison(place, arms=("fp32", "amp_dynamic"), seeds=2)})
    page_of(place)
    return place


@pytest.fixture(autouse=True)
def _unfigured(monkeypatch):
    monkeypatch.setattr(plotting.Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(plotting, "_tidied", lambda *_: "<svg/>")


def spoil(path, whole, data):
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(spoiled(whole)))
    else:
        path.write_text(json.dumps(data.draw(misfit(json.loads(whole)))))


@pytest.fixture(scope="module")
def whole(folder, compared):
    return SweepPaths(folder).json.read_bytes(), SweepPaths(compared).comparison.read_bytes()


@examples(30, 1000)
@given(data=st.data())
def test_a_spoiled_sweep(folder, whole, data):
    spoil(SweepPaths(folder).json, whole[0], data)
    with only_our_errors(folder):
        read_sweep(folder)
        page_of(folder)


@examples(30, 1000)
@given(data=st.data())
def test_a_spoiled_comparison(compared, whole, data):
    spoil(SweepPaths(compared).comparison, whole[1], data)
    with only_our_errors(compared):
        read_comparisons(SweepPaths(compared).comparison)
        page_of(compared)


@examples(30, 1000)
@given(data=st.data())
def test_a_spoiled_verdict(folder, whole, data):
    SweepPaths(folder).json.write_bytes(whole[0].replace(b'"kind": "sweep"', b'"kind": "recipe"'))
    spoil(SweepPaths(folder).verdict, json.dumps(VERDICT).encode(), data)
    with only_our_errors(folder):
        page_of(folder)
