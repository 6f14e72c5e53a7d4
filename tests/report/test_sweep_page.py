import pytest

from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Text, facts
from mptrain.report.run_blocks import open_or_reason
from mptrain.runlog.sweeps import read_sweep
from mptrain.study.pages.sweep_page import sweep_page
from mptrain.study.pages.sweep_points import kinds, numeric_axis, read_points
from tests.report.folders import make_sweep

pytestmark = pytest.mark.usefixtures("undrawn")


def point(job="done", words=(), **run):
    return (("model=mlp", *words), job, run if job != "waiting" else None)


def scales(*values, **run):
    return [point(words=(f"scaler.scale={value}",), **run) for value in values]


def page_of(folder):
    return sweep_page(read_sweep(folder))


def points_of(folder):
    return read_points(read_sweep(folder), lambda path: open_or_reason(path, 50))


def axis_of(tmp_path, *words):
    return numeric_axis(
        points_of(make_sweep(tmp_path / "-".join(words)[:40], [point(words=(word,)) for word in words]))
    )


def test_every_point_has_a_row_with_how_it_ended(tmp_path):
    points = [*scales(1, 128), point("failed", ("scaler.scale=1048576",)), point("waiting", ("scaler.scale=8",))]
    page = page_of(make_sweep(tmp_path / "sweep", points))
    assert page.status.text == "2 of 4 done, 1 failed"
    text = html(page) + markdown_page(page, "figures")
    assert "failed (-9)" in text
    assert "killed by SIGKILL" in text
    assert "waiting" in text
    assert "mptrain -m model=mlp scaler.scale=1,8,128" in text
    assert page.title == "scaler.scale=1,8,128"


def test_an_axis_is_spread_over_powers_or_a_line(tmp_path):
    axis = axis_of(tmp_path, "scaler.scale=1", "scaler.scale=131072", "scaler.scale=1024")
    assert (axis.key, axis.values, axis.logarithm) == ("scaler.scale", (1.0, 1024.0, 131072.0), 2)
    assert axis_of(tmp_path, "optimizer.lr=0.001", "optimizer.lr=0.03", "optimizer.lr=0.3").logarithm == 10
    assert axis_of(tmp_path, "train.epochs=1", "train.epochs=3").logarithm is None
    assert axis_of(tmp_path, "optimizer.weight_decay=0", "optimizer.weight_decay=5").logarithm is None


def test_neither_seeds_nor_options_nor_what_follows_are_an_axis(tmp_path):
    assert axis_of(tmp_path, "seed=1", "seed=2") is None
    assert axis_of(tmp_path, "precision=fp32", "precision=bf16") is None
    points = [point(words=("model=mlp", "train.epochs=10")), point(words=("model=cnn", "train.epochs=5"))]
    assert numeric_axis(points_of(make_sweep(tmp_path / "sweep", points))) is None


def test_both_cliffs_are_in_one_figure_with_failed_runs_and_fp32(tmp_path, drawn):
    overflows = dict.fromkeys(range(1, 61), "unexpected")
    points = [
        *scales(1, metric=0.4),
        *scales(128, 1024, metric=0.95),
        point("failed", ("scaler.scale=16777216",), status="failed", overflows=overflows),
        point(words=("precision=fp32",), metric=0.96),
    ]
    page = page_of(make_sweep(tmp_path / "sweep", points))
    svg = {plot.name: plot.svg for plot in page.plots()}["cliffs"]
    axes = ("2⁰", "2²⁴", "scaler.scale, logarithmic", "skipped (%)", "top1 (test)")
    assert all(f">{expected}<" in svg for expected in (*axes, "failed or diverged", "fp32"))
    assert page.lead.startswith("top1 (test): best 0.9600 at fp32, worst 0.4000 at scaler.scale=1;")
    diverged = page_of(make_sweep(tmp_path / "diverged", [*scales(1, 8), *scales(16, metric=None)]))
    assert "failed or diverged" in {plot.name: plot.svg for plot in diverged.plots()}["cliffs"]


def test_settings_at_chance_level_are_called_noise(tmp_path):
    points = [*scales(1, metric=0.1008, interval=(0.073, 0.131)), *scales(128, metric=0.1108, interval=(0.081, 0.144))]
    page = page_of(make_sweep(tmp_path / "sweep", points))
    assert "0.1008 at scaler.scale=1 to 0.1108 at scaler.scale=128, within noise of each other" in page.lead
    text = markdown_page(page, "figures")
    assert "95 % CI" in text
    assert "0.08100 to 0.1440" in text


def test_runs_that_differ_in_options_have_no_figure_over_a_key(tmp_path):
    points = [point(words=(f"precision={name}", f"seed={seed}")) for name in ("fp32", "bf16") for seed in (0, 1)]
    folder = make_sweep(tmp_path / "sweep", points)
    assert {name: len(some) for name, some in kinds(points_of(folder)).items()} == {"fp32": 2, "bf16": 2}
    page = page_of(folder)
    assert [plot.name for plot in page.plots()] == ["losses", "scales"]
    assert "Results over the varied keys" not in html(page)


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path):
    folder = make_sweep(tmp_path / "sweep", scales(1, 8))
    (folder / "000-point" / "run.json").write_text("{")
    page = page_of(folder)
    assert "run.json is damaged" in html(page)
    assert "losses" in [plot.name for plot in page.plots()]


def test_what_all_finished_runs_share_is_told_in_words(tmp_path):
    def parts(model, rate):
        return {"model": model, "optimizer": f"SGD(lr={rate})", "groups": ""}

    points = [
        point(words=("optimizer.lr=0.1",), parts=parts("mlp, 5 parameters", 0.1)),
        point(words=("optimizer.lr=0.2",), parts=parts("mlp, 5 parameters", 0.2)),
        point("failed", ("optimizer.lr=9",), status="failed", parts=parts("another", 9)),
    ]
    page = page_of(make_sweep(tmp_path / "sweep", points))
    (environment,) = [one for one in page.sections if one.title == "Environment"]
    shared = (("precision", "parameters float16"), ("model", "mlp, 5 parameters"))
    assert environment.blocks[-2:] == (Text("The same in all finished runs:"), facts(*shared))


def test_a_sweep_that_has_not_begun_has_a_report(tmp_path):
    points = [point("waiting", (f"scaler.scale={scale}",)) for scale in (1, 2)]
    page = page_of(make_sweep(tmp_path / "sweep", points))
    assert page.lead == "No point has a final metric yet."
    assert not page.plots()


def test_a_sweep_of_many_runs_stays_small(tmp_path):
    points = [point(words=(f"scaler.scale={2**at}", f"seed={seed}"), steps=20) for at in range(12) for seed in range(3)]
    assert len(html(page_of(make_sweep(tmp_path / "sweep", points)))) < 1_000_000
