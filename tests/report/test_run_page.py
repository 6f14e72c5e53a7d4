import json
import math

import pytest

from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Picture, Table
from mptrain.report.run_page import run_page
from mptrain.runlog import RunPaths, open_run
from mptrain.system.records import EventRecord
from tests.report.folders import make_run

pytestmark = pytest.mark.usefixtures("undrawn")

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 40


def page_of(path):
    return run_page(RunPaths(path))


def text_of(page):
    return html(page) + markdown_page(page, "figures")


def names_of(page):
    return [plot.name for plot in page.plots()]


def tables_of(page):
    return [block for section in page.sections for block in section.blocks if isinstance(block, Table)]


@pytest.mark.parametrize(("option", "name", "title"), [("timm", "resnet10t", "timm resnet10t"), ("resnet18",) * 3])
def test_the_title_names_the_network_of_an_option_that_has_many(tmp_path, option, name, title):
    chosen = f"chosen:\n  precision: fp32\n  model: {option}\n  dataset: digits\n"
    path = make_run(tmp_path / "run", steps=5, config=f"model:\n  name: {name}\n{chosen}")
    assert page_of(path).title == f"{title} on digits, fp32"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return page_of(make_run(tmp_path_factory.mktemp("finished") / "run", overflows={1: "calibrating", 40: "abnormal"}))


def test_a_finished_run_is_summed_up_in_one_sentence(finished):
    assert finished.title == "mlp on digits, fp16_dynamic"
    assert (finished.status.text, finished.status.tone) == ("done", "good")
    assert finished.lead == "top1 0.9000 on test data, 58 updates in 60 steps, 2 updates skipped."
    assert names_of(finished) == ["loss", "metric", "grad-norm", "lr", "loss-scale", "skipped"]
    text = text_of(finished)
    for expected in ("2,345", "0:12 of training", "8.0 MB", "12 %", "3.3 %", "mptrain model=mlp"):
        assert expected in text


def test_the_memory_of_a_step_is_shown_by_use(tmp_path):
    path = make_run(tmp_path / "run", steps=5)
    summary = json.loads((path / "summary.json").read_text())
    uses = {"weights": 2_000_000, "master_weights": 0, "gradients": 4_000_000, "activations": 1_500_000}
    (path / "summary.json").write_text(json.dumps({**summary, "memory_by_use": uses}))
    text = html(page_of(path))
    assert "7.5 MB" in text
    assert "2.0 MB weights, 4.0 MB gradients, 1.5 MB activations; without the optimizer" in text


def test_overflows_are_counted_by_phase_and_listed_by_step(finished):
    table = next(table for table in tables_of(finished) if table.head[0] == "learner")
    counts = dict(zip(table.head, (cell.text for cell in table.rows[0]), strict=True))
    phases = ("calibrating", "growth probe", "unexpected", "abnormal")  # the last as of another version
    assert [counts[f"overflows: {phase}"] for phase in phases] == ["1", "0", "0", "1"]
    rows = [[cell.text for cell in row] for row in tables_of(finished)[-1].rows]
    named = "0.weight (inf), 2.bias (nan) and 2 more"
    assert rows == [["1", "calibrating", "2^16", "finite", named], ["40", "abnormal", "2^15", "finite", named]]


def test_parameters_that_overflowed_are_counted_the_worst_first(finished):
    rows = [[cell.text for cell in row] for row in tables_of(finished)[-2].rows]
    assert rows == [
        ["0.weight", "2", "2", "0", "calibrating 1, abnormal 1", "1", "40"],
        ["2.bias", "2", "0", "2", "calibrating 1, abnormal 1", "1", "40"],
    ]
    timeline = next(plot for plot in finished.plots() if plot.name == "loss-scale")
    assert "0.weight (2), 2.bias (2)." in timeline.caption
    assert all(f">{name}<" in timeline.svg for name in ("0.weight", "2.bias"))


def test_all_metrics_of_the_end_have_a_row_with_their_interval(tmp_path):
    path = make_run(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text())
    summary |= {
        "val": {"loss": 0.3, "top1": 0.91},
        "test": {"loss": 0.2, "top1": 0.9},
        "intervals": {"top1": [0.85, 0.94]},
    }
    (path / "summary.json").write_text(json.dumps(summary))
    (found,) = [one for one in tables_of(page_of(path)) if one.head[0] == "metric"]
    assert found.head == ("metric", "validation data", "test data", "95 % CI over test samples")
    cells = [[cell.text for cell in row] for row in found.rows]
    assert cells == [["top1", "0.9100", "0.9000", "0.8500 to 0.9400"], ["loss", "0.3000", "0.2000", ""]]


def test_one_validation_is_no_curve_and_no_scale_no_line(tmp_path):
    page = page_of(make_run(tmp_path / "run", steps=30, scale=1.0))
    assert {"metric", "loss-scale"}.isdisjoint(names_of(page))
    assert "No evaluation was recorded" not in text_of(page)
    assert "Losses were not scaled" in text_of(page)


def test_several_learners_have_a_panel_and_a_row_each(tmp_path, drawn):
    page = page_of(make_run(tmp_path / "gan", learners=("critic", "artist"), overflows={5: "unexpected"}))
    assert [row[0].text for row in tables_of(page)[0].rows] == ["critic", "artist"]
    assert [row[0].text for row in tables_of(page)[-2].rows] == ["critic: 0.weight", "critic: 2.bias"]
    assert tables_of(page)[-1].rows[0][2].tone == "bad"
    drawn = {plot.name: plot.svg for plot in page.plots()}
    for name in ("loss", "loss-scale", "skipped", "grad-norm", "lr"):
        assert "critic" in drawn[name]
        assert "artist" in drawn[name]
    assert page.lead == "top1 0.9000 on test data, 59 to 60 updates in 60 steps, 1 update skipped."


def test_a_failed_run_says_why_and_shows_what_there_is(tmp_path):
    overflows = dict.fromkeys(range(10, 40), "unexpected")
    page = page_of(
        make_run(tmp_path / "run", steps=39, status="failed", reason="30 steps in a row", overflows=overflows)
    )
    assert (page.status.text, page.status.tone) == ("failed (exit code 4)", "bad")
    text = text_of(page)
    assert "30 steps in a row" in text
    assert "6 overflows in between left out" in text
    assert "loss-scale" in names_of(page)


def test_a_killed_run_is_told_from_a_running_one(tmp_path):
    path = make_run(tmp_path / "run", status="running")
    assert page_of(path).status.text == "killed, or the machine went down"
    with open_run(path).lock():
        assert page_of(path).status.text == "running"


def test_a_run_without_a_step_has_a_report(tmp_path):
    page = page_of(make_run(tmp_path / "run", steps=0, status="failed", reason="no data", config=""))
    assert page.lead == "No steps were recorded."
    text = text_of(page)
    assert "There is no config.yaml." in text
    assert not page.plots()


@pytest.mark.parametrize("name", ["steps.jsonl", "events.jsonl"])
def test_a_damaged_record_gives_a_sentence(tmp_path, name):
    path = make_run(tmp_path / "run", overflows={3: "calibrating"})
    (path / name).write_text("{}\n" + (path / name).read_text())
    assert f"{name}, line 1 is damaged" in text_of(page_of(path))


@pytest.mark.parametrize("config", ["]: {", "just words", "7"])
def test_a_damaged_configuration_is_shown_as_it_is(tmp_path, config):
    page = page_of(make_run(tmp_path / "run", config=config))
    assert page.title == "run"
    assert config in text_of(page)


def test_records_that_are_missing_are_told_and_no_error(tmp_path):
    path = make_run(tmp_path / "run")
    attempted = json.loads((path / "summary.json").read_text())["steps"]
    assert "lacks steps" not in text_of(page_of(path))
    (path / "steps.jsonl").unlink()
    assert f"it has 0 of the {attempted} attempted" in text_of(page_of(path))
    for name in ("events.jsonl", "summary.json", "config.yaml", "overrides.yaml"):
        (path / name).unlink()
    assert "no curves" in text_of(page_of(path))


def test_non_finite_losses_and_metrics_are_drawn_as_such(tmp_path, drawn):
    page = page_of(make_run(tmp_path / "run", metric=None, loss=lambda step: math.inf if step > 3 else 1.0))
    drawn = {plot.name: plot.svg for plot in page.plots()}
    assert "loss not finite" in drawn["loss"]
    assert "top1" not in page.lead
    never = page_of(make_run(tmp_path / "never", loss=lambda step: math.nan, scale=math.inf))
    assert "not finite" in text_of(never)


def test_the_newest_picture_of_each_kind_is_shown(tmp_path):
    path = make_run(tmp_path / "gan")
    (path / "samples").mkdir()
    for name in ("samples-000019.png", "samples-000060.png", "real-000019.png"):
        (path / "samples" / name).write_bytes(PNG + name.encode())
    (path / "samples" / "evil-000060.png").write_bytes(b"<svg onload=alert(1)>")
    page = page_of(path)
    shown = [block for section in page.sections for block in section.blocks if isinstance(block, Picture)]
    assert [one.file for one in shown] == ["samples/real-000019.png", "samples/samples-000060.png"]
    text = text_of(page)
    assert 'src="data:image/png;base64,' in text
    assert "](samples/samples-000060.png)" in text


def test_the_page_of_a_run_draws_what_its_figures_show(tmp_path, drawn):
    path = make_run(tmp_path / "run", steps=300, overflows={3: "calibrating", 250: "unexpected"})
    charts = {plot.name: plot.charts for plot in page_of(path).plots()}
    (loss,) = charts["loss"]
    raw, smooth, validation = loss.series
    assert (raw.name, smooth.name) == ("training loss, every step", "training loss, moving mean")
    assert raw.x == smooth.x == tuple(range(1, 301))
    assert raw.y[99] == 2.0 * 0.97**100 + 0.1
    assert validation.x == tuple(range(20, 301, 20))
    assert loss.log == 0
    scale, *marks = charts["loss-scale"][0].series
    assert {(step, value) for mark in marks for step, value in zip(mark.x, mark.y, strict=True)} == {
        (3, 2**16),
        (250, 2**15),
    }
    assert scale.y[0] == 2**16
    assert scale.y[-1] == 2**14
    rows = charts["loss-scale"][1]
    assert rows.rows == ("0.weight", "2.bias")
    assert {(series.y, series.x) for series in rows.series} == {
        ((row,), (step,)) for row in (0, 1) for step in (3, 250)
    }
    assert [series.name for series in charts["metric"][0].series] == ["validation", "best", "test"]
    assert sum(charts["skipped"][0].series[0].y) > 0


def test_captions_say_what_a_long_run_leaves_out(tmp_path):
    path = make_run(
        tmp_path / "run", steps=1500, overflows=dict.fromkeys(range(1, 1500, 3), "unexpected"), scale=2.0**900
    )
    captions = {plot.name: plot.caption for plot in page_of(path).plots()}
    for name in ("loss", "lr"):
        assert "lowest and highest of every 2 steps, so that no spike is lost" in captions[name]
    assert "Lines join the lowest and the highest value of every 2 steps." in captions["loss-scale"]
    assert "A mark stands for all overflows of 8 steps." in captions["loss-scale"]


def test_a_page_does_not_vouch_for_passes_and_ranks_that_no_update_shows(tmp_path):
    def event(kind, step, **fields):
        return EventRecord(kind, step, {"learner": "main", **fields})

    nan = [["2.weight", "nan"], ["2.bias", "nan"]]
    events = [
        event("abandoned", 3, rank=0, tensors=nan, count=2, boundary=["2", "3"]),
        event("abandoned", 5, rank=0, tensors=[], count=0, boundary=["", ""]),
        event("rank_overflow", 7, rank=1, tensors=nan[:1], count=4),
    ]
    path = make_run(tmp_path / "run", steps=9, scale=1.0, events=events)
    page = page_of(path)
    assert page.lead.endswith("9 updates in 9 steps, 2 backward passes followed by no update.")
    text = text_of(page)
    assert "no gradient overflowed" not in text
    assert "none skipped" not in text
    assert "not finite in 1 backward pass without an update and on single ranks in 1 step" in text
    assert (
        "no update of the optimizer followed a backward pass for step 3: gradients of 2.weight, 2.bias not finite"
        in text
    )
    assert "no update of the optimizer followed a backward pass for step 5<" in text
    assert "on rank 1: gradients of 2.weight and 3 more not finite" in text
    sound = page_of(make_run(tmp_path / "sound", steps=9, scale=1.0))
    assert "no gradient overflowed" in text_of(sound)
    assert sound.lead.endswith("none skipped.")
