import re
from dataclasses import replace

import pytest

from mptrain.config.compose import compose, reload
from mptrain.lab.commands.diagnose import write_forecast
from mptrain.lab.pages.loss_scale_pages import forecast_page, recommend
from mptrain.report.forecast_blocks import ONE_BECOMES_ALL
from mptrain.report.plotting import Drawing
from mptrain.runlog import RunDirectory, RunPaths
from mptrain.study.pages.sweep_points import read_measured
from mptrain.system.errors import StorageError
from tests.histograms_by_hand import look
from tests.report.folders import make_run, make_sweep
from tests.report.microscope import make_looked_at, sampled_steps

pytestmark = pytest.mark.usefixtures("undrawn")

SCALES = (1, 128, 8192, 1048576)


def sweep_of(folder):
    """Write a sweep of fp32, dynamic scaling and static scales with two seeds. The largest scale fails."""
    points = [(["precision=fp32", "seed=0"], "done", {"metric": 0.95, "precision": "fp32"})]
    points += [(["precision=fp16_dynamic", "seed=0"], "done", {"metric": 0.94})]
    for scale in SCALES:
        for seed in (0, 1):
            lost = {"status": "failed", "overflows": dict.fromkeys(range(1, 31), "unexpected"), "steps": 40}
            done = {"metric": 0.1 if scale == 1 else 0.9 + 0.02 * seed}
            words = ["precision=fp16_static", f"scaler.scale={scale}", f"seed={seed}"]
            points.append((words, "failed", lost) if scale > 2**15 else (words, "done", done))
    return make_sweep(folder, points)


def test_a_recommendation_is_a_page_with_a_row_for_each_scale(tmp_path):
    found = recommend(make_looked_at(tmp_path / "run", scale=1.0, precision="fp32"))
    page = forecast_page(found)
    assert page.title == "mlp on digits, fp32"
    assert page.lead.startswith("Recommended static loss scale: 2^")
    assert [plot.name for plot in page.plots()] == ["forecast"]
    table = found.table("main")
    assert [row[0].text for row in table.rows] == [f"2^{exponent}" for exponent in range(25)]
    marks = "".join(
        {"underflow": "u", "usable": "o", "recommended": "R", "overflow": "x"}[row[1].text] for row in table.rows
    )
    assert re.fullmatch("u+o*Ro*x+", marks)
    written = write_forecast(found)
    assert written.html.name == "forecast.html"
    assert 'class="status' not in written.html.read_text()  # no badge of how the run ended
    assert "figures/forecast.svg" in written.md.read_text()
    assert "****" not in written.md.read_text()
    assert (tmp_path / "run" / "figures" / "forecast.svg").exists()


def test_a_sweep_is_shown_beside_it_where_its_scale_is_static(tmp_path, drawn):
    measured = read_measured(sweep_of(tmp_path / "sweep"))
    assert list(measured.kinds) == ["fp16_static"]
    runs = measured.kinds["fp16_static"]
    assert len(runs) == 2 * len(SCALES)
    assert {run.exponent for run in runs} == {0, 7, 13, 20}
    assert [run.failed for run in measured.at("fp16_static", 20)] == [True, True]
    run = make_looked_at(tmp_path / "run")
    found = recommend(run, tmp_path / "sweep")
    rows = {row[0].text: [cell.text for cell in row[-2:]] for row in found.table("main").rows}
    assert rows["2^0"] == ["0.1000 (n=2)", "0"]
    assert rows["2^7"] == ["0.9100 (n=2)", "0"]
    assert rows["2^20"] == ["2 of 2 failed", "75 %"]
    assert rows["2^1"] == ["", ""]
    assert "means of n runs." in found.table("main").note
    page = forecast_page(found)
    assert "a cross marks runs that failed" in page.plots()[0].caption
    assert ">skipped (%)<" in page.plots()[0].svg


def test_kinds_of_a_sweep_have_columns_and_names_of_their_own(tmp_path, drawn):
    modes = ("fp16_static", "amp_static")
    points = [
        ([f"precision={mode}", f"scaler.scale={scale}"], "done", {"metric": 0.75})
        for mode in modes
        for scale in (8, 64)
    ]
    found = recommend(make_looked_at(tmp_path / "run"), make_sweep(tmp_path / "sweep", points))
    table = found.table("main")
    assert table.head[-4:] == tuple(f"{of}, {mode}" for mode in modes for of in ("top1 (test)", "skipped"))
    assert table.note.endswith("measured by the sweep.")
    assert table.rows[3][-2].text == "0.7500"
    svg = forecast_page(found).plots()[0].svg
    assert all(f"measured: {mode}" in svg for mode in modes)


def test_a_sweep_without_static_scales_gets_an_example(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", [(["optimizer.lr=0.1"], "done", {}), (["optimizer.lr=1"], "done", {})])
    with pytest.raises(StorageError, match="no run with a static loss scale") as refused:
        recommend(make_looked_at(tmp_path / "run"), sweep)
    assert "scaler.scale=1,128,16384" in refused.value.hint


def test_a_run_without_histograms_is_told_how_to_get_them(tmp_path):
    with pytest.raises(StorageError, match="has no histograms") as refused:
        recommend(make_run(tmp_path / "run"))
    assert refused.value.hint == "train it with diagnostics=histograms"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (look(1, {"a": [2.0**-40] * 3, "b": [8.0]}), "No static loss scale is usable at every step, from 2 sampled steps"),
        (look(1, {"a": [70000.0]}), "overflow FP16 even without"),
        (look(1, {"a": [0.0]}), "gradients are zero"),
        (look(1, {"a": [1.5 * 2.0**-30] * 3, "b": [1024.0]}), "2^5 (32), from 2 sampled steps of a run of 300 steps"),
        (look(1, {"a": [float("inf")]}, overflow=True), "Every sampled step overflowed"),
        (look(1, {"a": [1.0]}, scale=0.0), "No scale can be recommended"),
    ],
)  # fmt: skip
def test_what_cannot_be_recommended_is_said_in_words(tmp_path, record, words):
    found = recommend(make_looked_at(tmp_path / "run", [record, replace(record, step=2)], scale=1.0))
    assert words in found.sentences()[0]
    assert write_forecast(found).html.exists()


@pytest.mark.parametrize(("count", "steps", "asked"), [(1, 300, "diagnostics.every=10"), (3, 60, "299 steps or more")])
def test_too_little_to_go_by_names_no_scale(tmp_path, count, steps, asked):
    found = recommend(make_looked_at(tmp_path / "run", sampled_steps(count), scale=1.0, steps=steps))
    (sentence,) = found.sentences()
    assert sentence.startswith("No loss scale can be recommended yet")
    assert f"run of {steps} steps" in sentence
    assert asked in sentence
    page = forecast_page(found)
    assert page.lead == sentence
    assert {row[1].text for row in found.table("main").rows} == {"underflow", "unsure", "overflow"}
    assert "ecommended:" not in page.plots()[0].caption


ONE, TWO = ("main",), ("discriminator", "generator")


@pytest.mark.parametrize(
    ("words", "expected", "learners"),
    [
        (["precision=fp32"], "precision=fp16_static scaler.scale=", ONE),
        (["precision=bf16"], "precision=fp16_static scaler.scale=", TWO),
        (["precision=fp16_dynamic"], "scaler=static scaler.scale=", TWO),
        (["precision=amp_dynamic", "scaler.init_scale=8"], "scaler=static scaler.scale=", ONE),
        (["precision=fp16_static"], "scaler.scale=", ONE),
        (["precision=amp_static", "scaler.scale=8"], "scaler.scale=", TWO),
        (["precision=fp16_dynamic", "scaler=static"], "scaler.scale=", ONE),
    ],
)
def test_the_words_of_a_recommendation_give_that_run_that_scale(tmp_path, words, expected, learners):
    gan = ["task=gan", "model=dcgan", "dataset=digits", "dataset.image_size=16"] if learners is TWO else []
    config = compose([*gan, *words])
    seen = [one for name in learners for one in sampled_steps(2, learner=name)]
    found = recommend(make_looked_at(tmp_path / "run", seen, config=config.yaml, learners=learners))
    for name, sentence in zip(learners, found.sentences(), strict=True):
        own = expected.replace("scaler.scale", f"learners.{name}.scaler.scale") if gan else expected
        scale = 2 ** found.forecasts[name].recommended
        assert f" {own}{scale}." in sentence
        given = f"{own}{scale}".split()
        again = compose([*gan, *given]) if "precision" in own else reload(config.yaml, given)
        assert again.precision.compute == "float16"
        scaler = again.for_learner(name).scaler.build()
        assert scaler.describe().startswith("static")
        assert scaler.scale == scale


def test_looks_without_a_usable_scale_are_said_to_be_left_out(tmp_path):
    none = recommend(make_looked_at(tmp_path / "none", [look(1, {"a": [1.0]}, scale=0.0)]))
    (reason,) = none.reasons("main")
    assert reason.startswith("1 sampled step left out")
    assert none.table("main") is None
    some = recommend(make_looked_at(tmp_path / "some", [*sampled_steps(2), look(50, {"a": [1.0]}, scale=0.0)]))
    assert any(reason.startswith("1 sampled step left out") for reason in some.reasons("main"))
    every = recommend(make_looked_at(tmp_path / "all"))
    assert not any("left out" in reason for reason in every.reasons("main"))
    assert every.forecasts["main"].steps == 300  # the norms between the looks count
    assert "300 steps in all" in " ".join(every.reasons("main"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model=mlp", "seed=3", "threads=1"], []),
        (["model=mlp", "train.epochs=7"], ["train.epochs is 30 in the run, 7 in the sweep."]),
        (["model=cnn", "optimizer.lr=0.5"], ["model._target_ is", "optimizer.lr is"]),
    ],
)
def test_a_sweep_of_another_configuration_is_warned_of(tmp_path, words, named):
    config = compose(["model=mlp", "train.epochs=30", "precision=fp32"]).yaml
    run = make_looked_at(tmp_path / "run", scale=1.0, config=config)
    points = []
    for scale in (8, 64):
        given = ["train.epochs=30", *words, "precision=fp16_static", f"scaler.scale={scale}"]
        points.append((given, "done", {"config": compose(given).yaml}))
    found = recommend(run, make_sweep(tmp_path / "sweep", points))
    assert bool(found.unlike) == bool(named)
    assert all(one in found.unlike for one in named)
    text = write_forecast(found).md.read_text()
    assert ("The sweep's configuration differs from this run" in text) == bool(named)


def test_a_run_that_goes_on_is_said_to(tmp_path):
    path = make_looked_at(tmp_path / "run", status="running")
    assert any("the run has not ended" in note for note in recommend(path).notes)
    with RunDirectory(RunPaths(path)).lock():
        found = recommend(path)
        assert any("still running" in note for note in found.notes)
        assert "still running" in write_forecast(found).md.read_text()
    assert recommend(make_looked_at(tmp_path / "ended")).notes == ()


def test_where_a_scale_overflows_one_is_said_to_become_all(tmp_path):
    said = recommend(make_looked_at(tmp_path / "run")).reasons("main")
    assert f"{ONE_BECOMES_ALL[0].upper()}{ONE_BECOMES_ALL[1:]}." in said
    calm = recommend(make_looked_at(tmp_path / "calm", [look(1, {"a": [2.0**-12] * 3})], scale=1.0))
    assert not any("become an overflow" in reason for reason in calm.reasons("main"))


def test_the_axes_of_a_forecast_with_a_sweep_have_some_height(tmp_path, monkeypatch):
    """Nothing drawn outside the axes may shrink them."""
    heights = []

    def measure(figure):
        figure.figure.canvas.draw()
        heights.extend(axes.get_position().height for axes in figure.figure.axes)
        finish(figure)

    finish = Drawing.finish
    monkeypatch.setattr(Drawing, "finish", measure)
    points = [([f"scaler.scale={scale}"], "done", {"metric": 0.9}) for scale in (8, 64)]
    points += [(["scaler.scale=1048576"], "failed", {"status": "failed"})]
    forecast_page(recommend(make_looked_at(tmp_path / "run"), make_sweep(tmp_path / "sweep", points)))
    assert len(heights) == 3
    assert heights[0] > 0.2
    assert min(heights[1:]) > 0.1
