import json
import re
import shlex
import subprocess
import sys

import pytest

from mptrain.config.compose import compose
from tests.histograms_by_hand import counted, look
from tests.report.folders import make_sweep
from tests.report.microscope import make_looked_at, sampled_steps


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


def faint(scale=1.0, dtype="float16", first=()):
    """Looks of an FP16 run: the first module's gradients are zeros, or some that are hardly above."""
    made = {"first": [*first, *[0.0] * 40], "second": [2.0**-24] * 9 + [0.0] * 300, "last": [0.5, 0.25]}
    tensors = {name: counted(values, dtype) for name, values in made.items()}
    weights = {f"{name}.weight": counts for name, counts in tensors.items()}
    return [look(at, tensors, weights, scale) for at in (1, 10, 20)]


#: What nothing may say beside a module that was not seen.
BOUNDS = re.compile(
    r"Recommended|[Uu]sable|[Ee]vidence|95 % confidence|Even without|no module loses|[Nn]othing overflows|expected to overflow|rounds 0|Hardly"
)


@pytest.mark.parametrize("first", [(), (2.0**-24, 2.0**-23)])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_no_bound_stands_beside_gradients_that_were_not_seen(terminal, tmp_path, scale, first):
    words = ["model=mlp", "precision=fp16_static", f"scaler.scale={scale:g}", "+train.note=1", "seed=7", "run.name=x"]
    run = make_looked_at(
        tmp_path / "run",
        faint(scale, first=first),
        config=compose([*words[:3], "seed=7"]).yaml,
        words=words,
        scale=scale,
    )
    assert terminal("recommend", "run") == 6
    shown = " ".join(terminal.out.split())
    page = (run / "forecast.md").read_text().partition("## Run")[0]
    assert terminal("recommend", "run", "--json") == 6
    answer = json.loads(terminal.out)["learners"]["main"]
    assert terminal("report", "run") == 0
    report = (run / "report.md").read_text()
    report = report[report.index("FP16 range") : report.index("| parameter")]
    for text in (shown, page, report, *answer["reasons"], answer["sentence"]):
        assert not BOUNDS.search(text), BOUNDS.search(text)
    assert (answer["recommended"], answer["overrides"], answer["scales"], answer["lowest"], answer["top"]) == (
        None, [], [], None, None,
    )  # fmt: skip
    assert [(one["name"], one["all_zero"]) for one in answer["unseen"]] == (
        [("first", 3), ("second", 0)] if not first else [("second", 0), ("first", 0)]
    )
    rows = re.findall(r"\| (first|second|last) \| float16 \| ([^|]*) \|", report)[:3]
    assert rows == [*((one["name"], "not seen") for one in answer["unseen"]), ("last", "0")]
    command = shlex.join(["mptrain", "model=mlp", "+train.note=1", "seed=7", "precision=fp32"])
    for text in (shown, page, report, answer["sentence"]):
        assert f"{command} diagnostics=histograms diagnostics.every=10; then" in text
        assert "scaler=dynamic" in text


def test_a_watched_loop_is_told_what_to_change(terminal, tmp_path):
    make_looked_at(tmp_path / "run", faint(), config="watched:\n  model: Sequential\n", steps=120)
    assert terminal("recommend", "run") == 6
    shown = " ".join(terminal.out.split())
    assert (
        "FP32 shows them, for 299 steps or more: the same loop in FP32, without autocast and GradScaler, with every=9 in mptrain.watch"
        in shown
    )
    assert "torch.amp.GradScaler with its default arguments" in shown
    make_looked_at(tmp_path / "high", faint(2.0**16), config="watched:\n  model: Sequential\n", scale=2.0**16)
    assert terminal("recommend", "high") == 6
    assert "GradScaler with its default" not in terminal.out  # its first scale did not show them


@pytest.mark.parametrize(("dtype", "code"), [("float32", 0), ("bfloat16", 0), ("float16", 6)])
def test_the_same_zeros_are_zeros_in_fp32_and_bfloat16(terminal, tmp_path, dtype, code):
    make_looked_at(tmp_path / "run", faint(dtype=dtype), scale=1.0)
    assert terminal("recommend", "run") == code


def test_a_short_run_is_not_said_to_show_what_it_cannot(terminal, tmp_path):
    """The 1 % stands in one sentence: how many steps it takes."""
    make_looked_at(tmp_path / "run", sampled_steps(16, dtype="float16", scale=2.0**14), steps=150)
    assert terminal("recommend", "run") == 6
    shown = " ".join(terminal.out.split())
    assert "it takes 299 steps to show that less than 1 % of them are skipped (95 % confidence)" in shown
    assert shown.count("95 %") == 1
