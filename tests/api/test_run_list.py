"""Lists of runs print as a table of a dozen rows, with the status and the number that the terminal has."""

from __future__ import annotations

import copy
import pickle

import pytest

import mptrain
from tests.report.folders import make_run

CONFIG = """seed: {seed}
chosen:
  precision: {precision}
scaler: {{_target_: my.{precision}}}
"""


@pytest.fixture
def folder(tmp_path):
    for at in range(14):
        config = CONFIG.format(seed=at, precision="fp32" if at % 2 else "amp_dynamic")
        make_run(tmp_path / f"run-{at:02d}", steps=3, metric=0.5 + at / 100, config=config)
    make_run(tmp_path / "cut <b>", steps=3, status="running")
    return tmp_path


def test_a_list_is_a_table_of_a_dozen_rows(folder):
    found = mptrain.runs(folder)
    head, *rows, more = repr(found).splitlines()
    assert head.split() == ["run", "status", "steps", "metric"]
    assert (len(rows), more) == (12, "... and 3 more runs")
    assert isinstance(found, list)
    assert len(found) == 15
    for same in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert repr(same) == repr(found)
    assert repr(type(found)()) == "run  status  steps  metric"


def test_the_number_that_runs_are_sorted_by_and_a_note_on_test_data_are_shown(folder):
    found = mptrain.runs(folder, sort="top1")
    head, first, *_ = repr(found).splitlines()
    assert head.split() == ["run", "status", "steps", "metric", "test_top1"]
    assert first.split()[1:] == ["done", "3", "top1", "0.6300", "(test)", "0.6300"]
    assert "the first looks better than it is" in " ".join(repr(found).split())
    assert "overrides" in found._repr_html_()


def test_a_run_that_was_killed_is_shown_as_the_terminal_does_and_its_name_is_escaped(folder):
    found = mptrain.runs(folder, "status=killed")
    assert repr(found).splitlines()[1].split()[-3:-1] == ["<b>", "killed"]
    assert "cut &lt;b&gt;" in found._repr_html_()


def test_a_table_of_pandas_has_what_differs(folder):
    pytest.importorskip("pandas")
    table = mptrain.runs(folder, "status=done").to_dataframe()
    assert list(table.columns[:5]) == ["run", "status", "reason", "started", "steps"]
    assert {"seed", "precision", "test_top1"} <= set(table)
    assert not [name for name in table if name.startswith("chosen.") or name.endswith("_target_")]
    assert len(table) == 14
    assert table["test_top1"].max() == 0.63
    assert list(mptrain.runs(folder, "status=failed").to_dataframe()) == list(table.columns[:5])
