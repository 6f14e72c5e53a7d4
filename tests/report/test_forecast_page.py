from dataclasses import replace

import pytest
from histograms_by_hand import look
from report.folders import make_run, make_sweep
from report.microscope import make_looked_at, sampled_steps

from mptrain.config.compose import compose, reload
from mptrain.report.forecast_blocks import ONE_BECOMES_ALL
from mptrain.report.forecast_page import forecast_page, recommend
from mptrain.report.plotting import Drawing
from mptrain.report.report_files import write_forecast
from mptrain.report.sweep_points import read_measured
from mptrain.runlog import RunDirectory, RunPaths
from mptrain.system.errors import StorageError

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


def test_a_recommendation_is_a_page_with_a_figure_and_a_row_for_each_scale(tmp_path):
    found = recommend(make_looked_at(tmp_path / "run", scale=1.0, precision="fp32"))
    page = forecast_page(found)
    assert page.title == "mlp on digits, fp32"
    assert page.lead.startswith("Recommended static loss scale: 2^")
    assert [plot.name for plot in page.plots()] == ["forecast"]
    table = found.table("main")
    assert [row[0].text for row in table.rows] == [f"2^{exponent}" for exponent in range(25)]
    marks = [row[1].text for row in table.rows]
    assert marks.count("recommended") == 1
    order = ["underflow", "usable", "overflow"]
    found_order = ["usable" if mark == "recommended" else mark for mark in marks]
    assert found_order == sorted(found_order, key=order.index)
    assert set(found_order) == set(order)
    written = write_forecast(found)
    assert written.html.name == "forecast.html"
    assert "figures/forecast.svg" in written.md.read_text()
    assert (tmp_path / "run" / "figures" / "forecast.svg").exists()


def test_a_sweep_is_shown_beside_it_and_points_without_a_static_scale_are_not(tmp_path):
    measured = read_measured(sweep_of(tmp_path / "sweep"))
    assert list(measured.kinds) == ["fp16_static"]
    runs = measured.kinds["fp16_static"]
    assert len(runs) == 2 * len(SCALES)
    assert {run.exponent for run in runs} == {0, 7, 13, 20}
    assert [run.failed for run in measured.at("fp16_static", 20)] == [True, True]
    found = recommend(make_looked_at(tmp_path / "run"), tmp_path / "sweep")
    rows = {row[0].text: [cell.text for cell in row[-2:]] for row in found.table("main").rows}
    assert rows["2^0"] == ["0.1000 (n=2)", "0"]
    assert rows["2^7"] == ["0.9100 (n=2)", "0"]
    assert rows["2^20"] == ["2 of 2 failed", "75 %"]
    assert rows["2^1"] == ["", ""]
    page = forecast_page(found)
    assert "a cross marks runs that failed" in page.plots()[0].caption
    assert ">skipped (%)<" in page.plots()[0].svg


def test_kinds_of_a_sweep_have_columns_and_names_of_their_own(tmp_path):
    points = [
        ([f"precision={mode}", f"scaler.scale={scale}"], "done", {"metric": 0.9})
        for mode in ("fp16_static", "amp_static")
        for scale in (8, 64)
    ]
    found = recommend(make_looked_at(tmp_path / "run"), make_sweep(tmp_path / "sweep", points))
    assert found.table("main").head[-4:] == (
        "top1 (test), fp16_static", "skipped, fp16_static", "top1 (test), amp_static", "skipped, amp_static",
    )  # fmt: skip
    svg = forecast_page(found).plots()[0].svg
    assert "measured: fp16_static" in svg
    assert "measured: amp_static" in svg


def test_a_sweep_without_static_scales_is_refused_with_an_example(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", [(["optimizer.lr=0.1"], "done", {}), (["optimizer.lr=1"], "done", {})])
    with pytest.raises(StorageError, match="no run with a static loss scale") as refused:
        recommend(make_looked_at(tmp_path / "run"), sweep)
    assert "scaler.scale=1,128,16384" in refused.value.hint


def test_a_run_without_histograms_is_told_how_to_get_them(tmp_path):
    with pytest.raises(StorageError, match="has no histograms") as refused:
        recommend(make_run(tmp_path / "run"))
    assert refused.value.hint == "train it with diagnostics=histograms"


TWO = "2 sampled steps of a run of 300 steps ("


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (look(1, {"a": [2.0**-40] * 3, "b": [8.0]}), f"No static loss scale is usable at every step, from {TWO}"),
        (look(1, {"a": [70000.0]}), "Gradients overflow FP16 even without a loss scale"),
        (look(1, {"a": [0.0]}), "All gradients are zero"),
        (look(1, {"a": [1.5 * 2.0**-30] * 3, "b": [1024.0]}), f"Recommended static loss scale: 2^5 (32), from {TWO}"),
        (look(1, {"a": [float("inf")]}, overflow=True), "Every sampled step overflowed"),
        (look(1, {"a": [1.0]}, scale=0.0), "No scale can be recommended"),
    ],
)  # fmt: skip
def test_what_cannot_be_recommended_is_said_in_words(tmp_path, record, sentence):
    found = recommend(make_looked_at(tmp_path / "run", [record, replace(record, step=2)], scale=1.0))
    assert found.sentences()[0].startswith(sentence)
    assert write_forecast(found).html.exists()


@pytest.mark.parametrize(
    ("count", "steps", "said"),
    [
        (1, 300, "1 sampled step of a run of 300 steps (1 epoch): one sampled step does not show how much the largest "
        "gradient varies from step to step. Train again with diagnostics=histograms diagnostics.every=10."),
        (3, 60, "3 sampled steps of a run of 60 steps (1 epoch): it takes 299 steps to show that less than 1 % of them "
        "are skipped (95 % confidence). Train for 299 steps or more with diagnostics=histograms diagnostics.every=9."),
    ],
)  # fmt: skip
def test_too_little_to_go_by_names_no_scale_and_the_page_says_so_as_the_terminal_does(tmp_path, count, steps, said):
    found = recommend(make_looked_at(tmp_path / "run", sampled_steps(count), scale=1.0, steps=steps))
    (sentence,) = found.sentences()
    assert sentence == f"No loss scale can be recommended yet, from {said}"
    page = forecast_page(found)
    assert page.lead == sentence
    assert {row[1].text for row in found.table("main").rows} == {"underflow", "unsure", "overflow"}
    assert "ecommended:" not in page.plots()[0].caption


def test_learners_have_sections_of_their_own(tmp_path):
    records = [one for name in ("critic", "artist") for one in sampled_steps(2, learner=name)]
    path = make_looked_at(tmp_path / "gan", records, learners=("critic", "artist"), scale=1.0)
    page = forecast_page(recommend(path))
    assert [section.title for section in page.sections[:2]] == ["Static scales for critic", "Static scales for artist"]
    assert [plot.name for plot in page.plots()] == ["forecast-critic", "forecast-artist"]


def test_the_recommendation_rests_on_the_norms_between_the_looks(tmp_path):
    calm = recommend(make_looked_at(tmp_path / "calm", sampled_steps(1), scale=1.0))
    assert "300 steps in all" in " ".join(calm.reasons("main"))
    assert calm.forecasts["main"].steps == 300


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["precision=fp32"], "precision=fp16_static scaler.scale="),
        (["precision=bf16"], "precision=fp16_static scaler.scale="),
        (["precision=fp16_dynamic"], "scaler=static scaler.scale="),
        (["precision=amp_dynamic", "scaler.init_scale=8"], "scaler=static scaler.scale="),
        (["precision=fp16_static"], "scaler.scale="),
        (["precision=amp_static", "scaler.scale=8"], "scaler.scale="),
        (["precision=fp16_dynamic", "scaler=static"], "scaler.scale="),
    ],
)
@pytest.mark.parametrize("learners", [("main",), ("discriminator", "generator")])
def test_the_words_of_a_recommendation_give_that_run_that_scale(tmp_path, words, expected, learners):
    gan = ["task=gan", "model=dcgan", "dataset=digits", "dataset.image_size=16"] if len(learners) > 1 else []
    config = compose([*gan, *words])
    seen = [one for name in learners for one in sampled_steps(2, learner=name)]
    path = make_looked_at(tmp_path / "run", seen, config=config.yaml, learners=learners)
    found = recommend(path)
    for name, sentence in zip(learners, found.sentences(), strict=True):
        own = expected.replace("scaler.scale", f"learners.{name}.scaler.scale") if gan else expected
        scale = 2 ** found.forecasts[name].recommended
        assert f" {own}{scale}." in sentence
        if "precision" in own:
            again = compose([*gan, *f"{own}{scale}".split()])
        else:
            again = reload(config.yaml, f"{own}{scale}".split())
        assert again.precision.compute == "float16"
        scaler = again.for_learner(name).scaler.build()
        assert scaler.describe().startswith("static")
        assert scaler.scale == scale


def test_looks_without_a_usable_scale_are_said_to_be_left_out(tmp_path):
    none = recommend(make_looked_at(tmp_path / "none", [look(1, {"a": [1.0]}, scale=0.0)]))
    assert none.reasons("main") == [
        "1 sampled step left out: the loss scale is 0 or not finite, or there is no gradient."
    ]
    assert none.table("main") is None
    some = recommend(make_looked_at(tmp_path / "some", [*sampled_steps(2), look(50, {"a": [1.0]}, scale=0.0)]))
    assert any(reason.startswith("1 sampled step left out") for reason in some.reasons("main"))
    assert not any("left out" in reason for reason in recommend(make_looked_at(tmp_path / "all")).reasons("main"))


def test_means_of_several_runs_say_of_how_many(tmp_path):
    run = make_looked_at(tmp_path / "run")
    several = recommend(run, sweep_of(tmp_path / "several")).table("main")
    assert "top1 (test) and skipped: measured by the sweep, means of n runs." in several.note
    points = [([f"scaler.scale={scale}"], "done", {"metric": 0.75}) for scale in (8, 64)]
    single = recommend(run, make_sweep(tmp_path / "single", points)).table("main")
    assert single.note.endswith("measured by the sweep.")
    assert single.rows[3][-2].text == "0.7500"


def configured(folder, *words):
    """Write a sweep over two static scales with the given overrides."""
    points = []
    for scale in (8, 64):
        given = [*words, "precision=fp16_static", f"scaler.scale={scale}"]
        points.append((given, "done", {"config": compose(given).yaml}))
    return make_sweep(folder, points)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model=mlp", "seed=3", "threads=1"], []),
        (["model=mlp", "train.epochs=7"], ["train.epochs is 30 in the run, 7 in the sweep."]),
        (
            ["model=cnn", "optimizer.lr=0.5"],
            [
                "model._target_ is mptrain.workloads.classification.models.perceptron.mlp in the run, "
                "mptrain.workloads.classification.models.convnet.cnn in the sweep",
                "optimizer.lr is",
            ],
        ),
    ],
)
def test_a_sweep_of_another_configuration_is_warned_of_by_its_keys(tmp_path, words, named):
    run = make_looked_at(
        tmp_path / "run", scale=1.0, config=compose(["model=mlp", "train.epochs=30", "precision=fp32"]).yaml
    )
    found = recommend(run, configured(tmp_path / "sweep", "train.epochs=30", *words))
    assert bool(found.unlike) == bool(named)
    for one in named:
        assert one in found.unlike
    text = write_forecast(found).md.read_text()
    assert ("The sweep's configuration differs from this run" in text) == bool(named)


def test_a_recommendation_has_no_badge_of_how_the_run_ended(tmp_path):
    written = write_forecast(recommend(make_looked_at(tmp_path / "run")))
    assert 'class="status' not in written.html.read_text()
    assert "****" not in written.md.read_text()


def test_a_run_that_goes_on_is_said_to(tmp_path):
    path = make_looked_at(tmp_path / "run", status="running")
    assert any("the run has not ended" in note for note in recommend(path).notes)
    with RunDirectory(RunPaths(path)).lock():
        found = recommend(path)
        assert any("still running" in note for note in found.notes)
        assert "still running" in write_forecast(found).md.read_text()
    assert recommend(make_looked_at(tmp_path / "ended")).notes == ()


def test_where_a_scale_overflows_one_overflow_is_said_to_become_all(tmp_path):
    said = [
        reason
        for reason in recommend(make_looked_at(tmp_path / "run")).reasons("main")
        if "become an overflow" in reason
    ]
    assert said == [f"{ONE_BECOMES_ALL[0].upper()}{ONE_BECOMES_ALL[1:]}."]
    calm = recommend(make_looked_at(tmp_path / "calm", [look(1, {"a": [2.0**-12] * 3})], scale=1.0))
    assert not any("become an overflow" in reason for reason in calm.reasons("main"))


@pytest.mark.parametrize("failing", [False, True])
def test_the_axes_of_a_forecast_with_a_sweep_have_a_sensible_height(tmp_path, monkeypatch, failing):
    """Nothing drawn outside the axes may shrink them, with or without failed runs."""
    heights = []

    def measure(figure):
        figure.figure.canvas.draw()
        heights.extend(axes.get_position().height for axes in figure.figure.axes)
        finish(figure)

    finish = Drawing.finish
    monkeypatch.setattr(Drawing, "finish", measure)
    points = [([f"scaler.scale={scale}"], "done", {"metric": 0.9}) for scale in (8, 64)]
    points += [(["scaler.scale=1048576"], "failed", {"status": "failed"})] if failing else []
    found = recommend(make_looked_at(tmp_path / "run"), make_sweep(tmp_path / "sweep", points))
    forecast_page(found)
    assert len(heights) == 3
    assert heights[0] > 0.2
    assert min(heights[1:]) > 0.1
