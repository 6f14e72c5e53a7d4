import json
import math

import pytest
from report.folders import make_run, warning

from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Picture, Table
from mptrain.report.run_page import run_page
from mptrain.runlog import RunPaths
from mptrain.system.errors import StorageError
from mptrain.system.records import EventRecord

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 40


def page_of(path):
    return run_page(RunPaths(path))


def text_of(page):
    return html(page) + markdown_page(page, "figures")


def names_of(page):
    return [plot.name for plot in page.plots()]


def tables_of(page):
    return [block for section in page.sections for block in section.blocks if isinstance(block, Table)]


def test_phases_of_another_version_have_columns_of_their_own(tmp_path):
    page = page_of(make_run(tmp_path / "run", overflows={1: "calibrating", 40: "abnormal"}))
    table = next(table for table in tables_of(page) if table.head[0] == "learner")
    counts = dict(zip(table.head, (cell.text for cell in table.rows[0]), strict=True))
    assert {key: value for key, value in counts.items() if key.startswith("overflows")} == {
        "overflows: calibrating": "1",
        "overflows: growth probe": "0",
        "overflows: unexpected": "0",
        "overflows: abnormal": "1",
    }


def test_the_title_names_the_network_of_an_option_that_has_many(tmp_path):
    path = make_run(tmp_path / "run")
    words = path / "config.yaml"
    for option, name, title in (("timm", "resnet10t", "timm resnet10t"), ("resnet18", "resnet18", "resnet18")):
        chosen = f"chosen:\n  precision: fp32\n  model: {option}\n  dataset: digits\n"
        words.write_text(f"model:\n  name: {name}\n{chosen}")
        assert page_of(path).title == f"{title} on digits, fp32"


def test_a_finished_run_is_summed_up_in_one_sentence(tmp_path):
    page = page_of(make_run(tmp_path / "run", overflows={1: "calibrating", 40: "unexpected"}))
    assert page.title == "mlp on digits, fp16_dynamic"
    assert (page.status.text, page.status.tone) == ("done", "good")
    assert page.lead == "top1 0.9000 on test data, 58 updates in 60 steps, 2 updates skipped."
    assert names_of(page) == ["loss", "metric", "grad-norm", "lr", "loss-scale", "skipped"]
    text = text_of(page)
    for expected in (
        "2,345",
        "samples a second after warm-up; 0:12 of training",
        "8.0 MB",
        "12 %",
        "3.3 %",
        "mptrain model=mlp",
    ):
        assert expected in text


def test_all_metrics_of_the_end_have_a_row_with_what_is_known_of_their_reach(tmp_path):
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


def test_one_validation_is_no_curve(tmp_path):
    page = page_of(make_run(tmp_path / "run", steps=30))
    assert "metric" not in names_of(page)
    assert "No evaluation was recorded" not in text_of(page)


def test_overflows_are_listed_with_phase_scale_and_tensors(tmp_path):
    page = page_of(make_run(tmp_path / "run", overflows={1: "calibrating", 40: "unexpected"}))
    rows = [[cell.text for cell in row] for row in tables_of(page)[-1].rows]
    named = "0.weight (inf), 2.bias (nan) and 2 more"
    assert rows == [["1", "calibrating", "2^16", "finite", named], ["40", "unexpected", "2^15", "finite", named]]
    assert tables_of(page)[-1].rows[1][1].tone == "bad"


def test_an_unscaled_run_says_so_instead_of_drawing_a_line(tmp_path):
    page = page_of(make_run(tmp_path / "run", scale=1.0))
    assert "loss-scale" not in names_of(page)
    assert "Losses were not scaled" in text_of(page)


def test_several_learners_have_a_panel_and_a_row_each(tmp_path):
    page = page_of(make_run(tmp_path / "gan", learners=("discriminator", "generator"), overflows={5: "calibrating"}))
    assert [row[0].text for row in tables_of(page)[0].rows] == ["discriminator", "generator"]
    drawn = {plot.name: plot.svg for plot in page.plots()}
    for name in ("loss", "loss-scale", "skipped", "grad-norm", "lr"):
        assert "discriminator" in drawn[name]
        assert "generator" in drawn[name]
    assert page.lead == "top1 0.9000 on test data, 59 to 60 updates in 60 steps, 1 update skipped."


def test_a_failed_run_says_why_and_shows_what_there_is(tmp_path):
    overflows = dict.fromkeys(range(10, 40), "unexpected")
    reason = "30 steps in a row overflowed"
    page = page_of(make_run(tmp_path / "run", steps=39, status="failed", reason=reason, overflows=overflows))
    assert page.status.text == "failed (exit code 4)"
    assert page.status.tone == "bad"
    text = text_of(page)
    assert reason in text
    assert "6 overflows in between left out" in text
    assert "loss-scale" in names_of(page)


def test_a_killed_run_is_told_from_a_running_one(tmp_path):
    path = make_run(tmp_path / "run", status="running")
    assert page_of(path).status.text == "killed, or the machine went down"


def test_a_run_being_written_is_running(tmp_path):
    from mptrain.runlog import open_run

    path = make_run(tmp_path / "run", status="running")
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


def test_missing_records_are_no_error(tmp_path):
    path = make_run(tmp_path / "run")
    for name in ("steps.jsonl", "events.jsonl", "summary.json", "config.yaml", "overrides.yaml"):
        (path / name).unlink()
    assert "no curves" in text_of(page_of(path))


def test_steps_that_are_missing_from_the_records_are_counted(tmp_path):
    path = make_run(tmp_path / "run")
    attempted = json.loads((path / "summary.json").read_text())["steps"]
    assert "lacks steps" not in text_of(page_of(path))
    (path / "steps.jsonl").unlink()
    assert f"steps.jsonl lacks steps: it has 0 of the {attempted} attempted" in text_of(page_of(path))


def test_a_run_that_is_none_is_refused(tmp_path):
    with pytest.raises(StorageError, match="no run directory"):
        page_of(tmp_path / "nothing")


def test_non_finite_losses_and_metrics_are_drawn_as_such(tmp_path):
    page = page_of(make_run(tmp_path / "run", metric=None, loss=lambda step: math.inf if step > 3 else 1.0))
    drawn = {plot.name: plot.svg for plot in page.plots()}
    assert "loss not finite" in drawn["loss"]
    assert "top1" not in page.lead


def test_losses_that_were_never_finite_are_no_error(tmp_path):
    page = page_of(make_run(tmp_path / "run", loss=lambda step: math.nan, scale=math.inf))
    assert "not finite" in text_of(page)


def test_the_newest_picture_of_each_kind_is_shown(tmp_path):
    path = make_run(tmp_path / "gan")
    (path / "samples").mkdir()
    for name in ("samples-000019.png", "samples-000060.png", "real-000019.png"):
        (path / "samples" / name).write_bytes(PNG + name.encode())
    (path / "samples" / "evil-000060.png").write_bytes(b"<svg onload=alert(1)>")
    page = page_of(path)
    shown = [block for section in page.sections for block in section.blocks if isinstance(block, Picture)]
    assert [(one.file, one.caption) for one in shown] == [
        ("samples/real-000019.png", "real after step 19"),
        ("samples/samples-000060.png", "samples after step 60"),
    ]
    text = text_of(page)
    assert 'src="data:image/png;base64,' in text
    assert "](samples/samples-000060.png)" in text


def test_warnings_and_resumes_are_listed(tmp_path):
    events = [
        warning("the scale is still coming down"),
        EventRecord("resume", 30, {"notes": ["scaler began anew"], "warnings": []}),
    ]
    text = text_of(page_of(make_run(tmp_path / "run", events=events)))
    assert "the scale is still coming down" in text
    assert "notes: scaler began anew" in text


def test_parameters_that_overflowed_are_named_and_counted_the_worst_first(tmp_path):
    page = page_of(make_run(tmp_path / "run", overflows={1: "calibrating", 40: "unexpected"}))
    rows = [[cell.text for cell in row] for row in tables_of(page)[-2].rows]
    assert rows == [
        ["0.weight", "2", "2", "0", "calibrating 1, unexpected 1", "1", "40"],
        ["2.bias", "2", "0", "2", "calibrating 1, unexpected 1", "1", "40"],
    ]
    timeline = next(plot for plot in page.plots() if plot.name == "loss-scale")
    assert "most often 0.weight (2), 2.bias (2)." in timeline.caption
    assert ">0.weight<" in timeline.svg
    assert ">2.bias<" in timeline.svg


def test_parameters_of_several_learners_carry_the_name_of_theirs(tmp_path):
    page = page_of(make_run(tmp_path / "gan", learners=("critic", "artist"), overflows={5: "calibrating"}))
    assert [row[0].text for row in tables_of(page)[-2].rows] == ["critic: 0.weight", "critic: 2.bias"]
