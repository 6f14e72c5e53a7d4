from dataclasses import replace

import pytest

from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Table
from mptrain.runlog.run_reader import read_run
from mptrain.study.pages.sweep_page import labels, runs_page
from mptrain.system.errors import StorageError
from tests.report.folders import HOSTILE, make_run
from tests.report.policy import without_script


def runs_with(tmp_path, *overrides):
    return [read_run(make_run(tmp_path / f"{at}", steps=3, words=words)) for at, words in enumerate(overrides)]


def test_runs_are_named_by_the_overrides_in_which_they_differ(tmp_path):
    runs = runs_with(
        tmp_path,
        ("model=mlp", "optimizer.lr=0.1", "run.name=a"),
        ("model=mlp", "optimizer.lr=0.2", "precision=fp32", "run.name=b"),
        ("model=mlp", "optimizer.lr=0.2", "precision=fp32", "seed=7"),
    )
    assert labels(runs) == ["lr=0.1", "lr=0.2, fp32", "lr=0.2, fp32, seed=7"]


def test_runs_without_differing_overrides_are_named_by_their_folders(tmp_path):
    runs = runs_with(tmp_path, ("model=mlp",), ("model=mlp",), ("model=cnn",), ("model=cnn",))
    assert labels(runs) == ["mlp (0)", "mlp (1)", "cnn (2)", "cnn (3)"]
    same = runs_with(tmp_path / "x", ("model=mlp",), ("model=mlp",))
    assert labels(same) == ["0", "1"]
    elsewhere = replace(same[1], paths=replace(same[0].paths, root=tmp_path / "y" / "0"))
    assert labels([same[0], elsewhere]) == [str(tmp_path / "x" / "0"), str(tmp_path / "y" / "0")]


def test_all_runs_are_curves_of_the_same_figures_without_a_verdict(tmp_path):
    folders = [
        make_run(tmp_path / "a", steps=40, words=("seed=0",), overflows={3: "unexpected"}),
        make_run(tmp_path / "b", steps=60, words=("seed=1",), learners=("critic", "artist")),
        make_run(tmp_path / "c", steps=60, words=("seed=2",), metric=None, status="failed"),
    ]
    page = runs_page(folders)
    assert page.status.text == ""
    names = {plot.name: [series.name for series in plot.charts[0].series] for plot in page.plots()}
    curves = ["seed=0", "seed=1, critic", "seed=1, artist", "seed=2"]
    assert names == {
        "losses": curves,
        "validation-0": ["seed=0", "seed=1", "seed=2"],
        "validation-1": ["seed=0", "seed=1", "seed=2"],
        "grad-norms": curves,
        "rates": curves,
        "scales": curves,
    }
    losses = page.plots()[0].charts[0].series
    assert [series.x[-1] for series in losses] == [40, 60, 60, 60]
    assert len({(series.colour, series.dash) for series in losses}) == 4
    (table,) = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    rows = [[cell.text for cell in row] for row in table.rows]
    assert [row[:3] for row in rows] == [
        ["seed=0", "done", "40"],
        ["seed=1", "done", "60"],
        ["seed=2", "failed (exit code 4)", "60"],
    ]
    assert rows[0][5] == "2.5 %"
    text = html(page) + markdown_page(page, "figures")
    assert "without a verdict" in text
    for word in ("better", "worse", "equivalent"):
        assert word not in without_script(html(page))


def test_hostile_overrides_stay_names(tmp_path):
    runs = [make_run(tmp_path / str(at), steps=3, words=(f"note={text}",)) for at, text in enumerate(HOSTILE[:4])]
    text = without_script(html(runs_page(runs)))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(StorageError, match="no run directory"):
        runs_page([make_run(tmp_path / "a", steps=3), tmp_path / "missing"])
