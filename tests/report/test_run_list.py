"""Lists of runs: which fit, which is the best, and where their reports are."""

from __future__ import annotations

import math
import re
from urllib.parse import unquote

import pytest

from mptrain.config.config_diff import flat
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.run_list import filtered, find_runs, ordered, runs_page, runs_table, sort_notes
from mptrain.runlog.run_state import read_summary, write_summary
from mptrain.system.errors import StorageError, UsageError
from tests.report.folders import HOSTILE, make_run

CONFIG = """seed: {seed}
optimizer:
  lr: {lr}
train:
  ema_decay: null
chosen:
  model: {model}
  precision: {precision}
model:
  name: {name}
"""


def make(root, name, *, model="cnn", precision="fp32", lr="0.001", title="null", seed=0, numbers=(), **more):
    config = CONFIG.format(seed=seed, lr=lr, model=model, precision=precision, name=title)
    path = make_run(root / name, steps=3, config=config, **more)
    if numbers:
        file = path / "summary.json"
        write_summary(file, {**read_summary(file), **dict(numbers)})
    return path


@pytest.fixture
def runs(tmp_path):
    make(tmp_path, "a", precision="fp16_static", metric=0.5, numbers={"test": {"loss": 3.0}, "train_seconds": 5.0})
    make(tmp_path, "b", model="torchvision", title="resnet18", lr="1e-2", metric=0.9, numbers={"test": {"loss": 4.0}})
    make(tmp_path, "deep/c", precision="fp16_dynamic", status="failed", reason="it diverged")
    make(tmp_path, "d", status="running", seed=7)
    make(tmp_path, "e", metric=float("nan"), numbers={"test": {"loss": 2.0}})
    found, notes = find_runs(tmp_path)
    assert not notes
    return found


def names(runs):
    return "".join(run.path[-1] for run in runs)


def test_all_runs_with_their_status_the_newest_first(runs):
    assert {run.path[-1]: run.status for run in runs} == {
        "a": "done", "b": "done", "c": "failed", "d": "killed", "e": "done",
    }  # fmt: skip
    assert [run.started for run in runs] == sorted((run.started for run in runs), reverse=True)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), "abcde"), (("status=failed",), "c"), (("status=[fk]*",), "cd"), (("precision=fp16*",), "ac"),
        (("precision=fp16*", "status=done"), "a"), (("model=resnet*",), "b"), (("model=torchvision",), "b"),
        (("optimizer.lr=1e-3",), "acde"), (("optimizer.lr=0.010",), "b"), (("seed=7",), "d"), (("run=*deep*",), "c"),
        (("reason=*diverged",), "c"), (("train.ema_decay=null",), "abcde"), (("chosen.model=cnn",), "acde"),
        (("seed=8",), ""), (("model=",), ""), (("model=CNN",), ""),
        (("top1>0.5",), "b"), (("top1>=0.5",), "ab"), (("top1<0.9", "top1>-1e3"), "a"), (("loss<=3",), "ae"),
        (("top1>1",), ""), (("top1>=0.9",), "b"), (("top1 > 0.5",), "b"), (("status=[!d]*",), "cd"), (("top1=null",), ""),
        (("started>2001-02",), "abcde"), (("started<2001",), ""), (("started>=2999-01-01",), ""),
        (("top1=0.50",), "a"), (("optimizer.lr>1e-3",), "b"), (("seed<7",), "abce"), (("precision>0",), ""),
    ],
)  # fmt: skip
def test_runs_that_fit_all_patterns(runs, patterns, expected):
    assert sorted(names(filtered(runs, patterns))) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [("top1", "no pattern"), ("top1>high", "a number"), ("top1<nan", "a number"), ("top1=>1", "comparison")],
)
def test_what_is_no_filter_is_refused_with_one(runs, text, said):
    with pytest.raises(UsageError, match=said) as raised:
        filtered(runs, [text])
    assert "top1" in raised.value.hint or ">=" in raised.value.hint


def test_a_loss_that_is_infinite_is_larger_than_any_number(tmp_path):
    make(tmp_path, "a", metric=0.5, numbers={"test": {"loss": math.inf}})
    make(tmp_path, "b", metric=0.5, numbers={"test": {"loss": math.nan}})
    assert names(filtered(find_runs(tmp_path)[0], ["loss>1e30"])) == "a"


def test_a_key_that_no_run_has_is_named_with_one_that_is_meant(runs):
    with pytest.raises(UsageError, match="no run has the key 'precison'") as raised:
        filtered(runs, ["precison=fp16"])
    assert raised.value.hint == "did you mean precision?"
    with pytest.raises(UsageError, match="no run has such a number") as raised:
        ordered(runs, "los")
    assert raised.value.hint == "did you mean loss?"
    assert filtered([], ["precison=fp16"]) == ordered([], "los") == []


@pytest.mark.parametrize(
    ("key", "first", "without"), [("top1", "ba", "cde"), ("loss", "eab", "cd"), ("train_seconds", "", "cd")]
)
def test_the_best_is_first_and_runs_without_the_number_last(runs, key, first, without):
    sorted_names = names(ordered(runs, key))
    assert sorted_names.startswith(first)
    assert set(sorted_names[-len(without) :]) == set(without)


def test_the_run_says_which_direction_is_better(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        make(tmp_path, name, metric=value, numbers={"metric_name": "distance", "higher_is_better": False})
    found = find_runs(tmp_path)[0]
    assert names(ordered(found, "distance")) == "ab"
    assert names(ordered(found, "terms_per_second"))  # equal: any order


def test_runs_are_sorted_by_validation_data_and_those_without_come_last(tmp_path):
    for name, val, test in (("a", 0.5, 0.9), ("b", 0.7, 0.2), ("c", None, 0.95)):
        numbers = {"val": {"top1": val, "loss": 1 - val} if val else None, "test": {"top1": test}}
        make(tmp_path, name, metric=test, numbers=numbers)
    found = find_runs(tmp_path)[0]
    assert names(ordered(found, "top1")) == names(ordered(found, "val_top1")) == "bac"
    assert names(ordered(found, "test_top1")) == names(ordered(found, "test_metric")) == "cab"
    assert names(ordered(found, "metric")) == "bac"
    assert names(ordered(found, "val_loss")) == "bac"
    assert names(filtered(found, ["top1>0.6"])) == "b"
    assert not sort_notes(found, "top1")
    assert "val_top1" in str(runs_table(found, "top1").head)
    assert "sorted by top1 on test data" in sort_notes([run for run in found if run.path.endswith("c")], "top1")[0]


def test_the_page_links_to_reports_that_are_there_and_shows_any_text(tmp_path):
    for number, text in enumerate(HOSTILE):
        make(tmp_path, f"{number} {text[:40]}".replace("/", "_").replace("\x00", ""), words=(f"model={text}",))
    make(tmp_path, "without")
    found, notes = find_runs(tmp_path)
    for run in found:
        if not run.path.endswith("without"):
            run.run.paths.report_html.write_text("there")
    page = runs_page(tmp_path, found, notes)
    text, plain = html(page), markdown_page(page, "figures")
    assert text.count("<script") == 1  # that of the page
    assert "<svg" not in text
    links = re.findall(r'<td[^>]*><a href="([^"]*)">', text)
    assert len(links) == len(HOSTILE)
    for link in links:
        assert link.startswith("./")
        assert (tmp_path / unquote(link, errors="surrogateescape")).read_text() == "there"
        assert f"]({link})" in plain
    assert "1 run without a report" in text


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(StorageError, match="there is no folder"):
        find_runs(tmp_path / "nowhere")


def test_only_the_sections_of_a_key_are_read_however_a_configuration_is_laid_out(tmp_path, monkeypatch):
    make(tmp_path, "a", lr="0.5")
    make(tmp_path, "b", lr="0.25")
    (tmp_path / "b/config.yaml").write_text("{optimizer: {lr: 0.25}, chosen: {model: cnn}}\n")
    read = []
    monkeypatch.setattr("mptrain.report.run_list.flat", lambda text: read.append(text) or flat(text))
    found, _ = find_runs(tmp_path)
    assert names(filtered(found, ["optimizer.lr<0.4"])) == "b"
    assert names(filtered(found, ["model=c?n", "optimizer.lr>0.4"])) == "a"
    assert not any("train:" in text for text in read)
    read.clear()
    assert names(filtered(found, ["run=*a"])) == "a"
    assert not read
