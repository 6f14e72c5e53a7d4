import subprocess
import sys

import pytest
from report.folders import make_sweep
from report.microscope import make_looked_at, sampled_steps


def test_it_prints_the_scale_the_table_and_where_the_page_is(terminal, tmp_path):
    make_looked_at(tmp_path / "outputs" / "one")
    assert terminal("recommend", "one") == 0
    lines = terminal.out.splitlines()
    assert lines[0].startswith("Recommended static loss scale: 2^")
    assert sum(line.startswith("2^") for line in lines) == 25
    assert any(line.startswith("2^24 ") and "overflow" in line for line in lines)
    assert lines[-2:] == ["outputs/one/forecast.html", "outputs/one/forecast.md"]
    assert all(len(line) <= 160 for line in lines)
    assert "\x1b" not in terminal.out
    assert "scaler.scale=" in (tmp_path / "outputs" / "one" / "forecast.html").read_text()


@pytest.mark.parametrize("learners", [("main",), ("critic", "artist")])
def test_too_few_looks_name_no_scale_and_end_with_the_code_of_missing_data(terminal, tmp_path, learners):
    """One learner that was looked at often enough does not speak for the other."""
    counts = dict(zip(learners, (1, 3), strict=False))
    records = [one for name, count in counts.items() for one in sampled_steps(count, learner=name)]
    make_looked_at(tmp_path / "run", records, learners=learners, scale=1.0)
    assert terminal("recommend", "run") == 6
    first = " ".join(terminal.out.split("\n\n")[0].split())
    assert "No loss scale can be recommended yet, from 1 sampled step of a run of 300 steps" in first
    assert "diagnostics.every=10." in first
    assert ("Recommended" in first) == (len(learners) > 1)
    assert (tmp_path / "run" / "forecast.html").exists()


def test_a_sweep_adds_what_it_measured(terminal, tmp_path):
    make_looked_at(tmp_path / "run")
    make_sweep(tmp_path / "sweep", [([f"scaler.scale={scale}"], "done", {"metric": 0.75}) for scale in (8, 64)])
    assert terminal("recommend", "run", "--sweep", "sweep") == 0
    assert any(line.startswith("2^6 ") and "0.7500" in line for line in terminal.out.splitlines())


def test_a_sweep_without_static_scales_says_so(terminal, tmp_path):
    make_looked_at(tmp_path / "run")
    make_sweep(tmp_path / "other", [(["optimizer.lr=1"], "done", {})])
    assert terminal("recommend", "run", "--sweep=other") == 6
    assert "no run with a static loss scale" in terminal.err


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_it_needs_no_torch(tmp_path, option):
    path = make_looked_at(tmp_path / "run")
    words = ["recommend", str(path), *option]
    code = f"import sys; from mptrain.cli.main import main; main({words}); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_width_that_there_is_and_nothing_is_cut_off(terminal, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    make_looked_at(tmp_path / "run")
    make_sweep(tmp_path / "sweep", [([f"scaler.scale={scale}"], "done", {"metric": 0.75}) for scale in (8, 64)])
    assert terminal("recommend", "run") == 0
    table = terminal.out.split("\n\n")[2].splitlines()
    assert len(table) >= 26
    assert all(len(line) <= columns for line in table)
    assert terminal("recommend", "run", "--sweep", "sweep") == 0
    assert "skipped" in next(line for line in terminal.out.splitlines() if line.startswith("scale "))
    assert "…" not in terminal.out
