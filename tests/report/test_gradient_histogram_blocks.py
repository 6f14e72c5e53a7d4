import math

import pytest
from histograms_by_hand import counted, look
from report.browser import CHROMIUM, visit
from report.folders import make_run
from report.microscope import make_looked_at, sampled_steps
from report.test_in_a_browser import CUT_TEXT, PAGE_WIDTH, SMALLEST_TEXT

from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Bullets, Fold, Table, Text
from mptrain.report.report_files import write_report
from mptrain.report.run_page import run_page
from mptrain.runlog import RunPaths

TITLE = "Tensors and the FP16 range"


def part_of(path):
    return next(section.blocks for section in run_page(RunPaths(path)).sections if section.title == TITLE)


def tables_of(blocks):
    return [block for block in blocks if isinstance(block, Table)]


def text_of(blocks):
    found = [block.text for block in blocks if isinstance(block, Text)]
    return " ".join([*found, *(item for block in blocks if isinstance(block, Bullets) for item in block.items)])


def names_of(path):
    return [plot.name for plot in run_page(RunPaths(path)).plots()]


def test_a_run_without_histograms_has_no_such_part(tmp_path):
    assert part_of(make_run(tmp_path / "run")) == ()


def test_histograms_are_shown_against_the_range_of_fp16(tmp_path):
    path = make_looked_at(tmp_path / "run", scale=1.0, precision="fp32")
    assert names_of(path)[-4:] == ["exponents-gradients", "exponents", "forecast", "looks"]
    drawn = {plot.name: plot.svg for plot in run_page(RunPaths(path)).plots()}
    for zone in ("lost", "subnormal", "normal", "inf"):
        assert f">{zone}<" in drawn["exponents-gradients"]
    for kind in ("activations", "weights", "weight gradients", "updates"):
        assert f">{kind}<" in drawn["exponents"]
    text = text_of(part_of(path))
    assert "Recommended static loss scale: 2^" in text
    assert "3 sampled steps: 1, 20, 40." in text
    assert "50 % of the updates would not change a weight stored in FP16; most in 2.conv.weight, 75 %." in text


def test_gradients_are_drawn_with_and_without_the_scale_where_there_is_one(tmp_path):
    scaled = make_looked_at(tmp_path / "scaled", sampled_steps(scale=4096.0, dtype="float16"))
    plain = make_looked_at(tmp_path / "plain")
    for path, there in ((scaled, True), (plain, False)):
        svg = next(plot.svg for plot in run_page(RunPaths(path)).plots() if plot.name == "exponents-gradients")
        assert ("scaled as in the run" in svg) == there
    assert "Gradients were recorded in FP16 only" in text_of(part_of(scaled))
    assert "Gradients were recorded in FP16 only" not in text_of(part_of(plain))


def test_half_gradients_that_carry_no_scale_are_drawn_once(tmp_path):
    path = make_looked_at(tmp_path / "run", [look(1, {"a": counted([2.0**-24, 2.0**-20, 1.0], "float16")})])
    svg = next(plot.svg for plot in run_page(RunPaths(path)).plots() if plot.name == "exponents-gradients")
    assert "scaled as in the run" not in svg


def test_modules_stand_with_the_worst_first_and_long_lists_are_cut(tmp_path):
    path = make_looked_at(tmp_path / "run", sampled_steps(1, modules=25))
    found = tables_of(part_of(path))[0]
    assert found.head[:3] == ("module", "dtype", "lost in FP16")
    assert len(found.rows) == 20
    assert found.rows[0][0].text == "0.conv"
    assert "5 tensors with smaller losses left out" in found.note
    folds = [block for block in part_of(path) if isinstance(block, Fold)]
    assert [fold.title for fold in folds] == ["Activations", "Weights", "Weight gradients", "Updates"]
    assert folds[0].blocks[0].rows[0][1].text == "float32"


def test_a_value_beyond_fp16_is_marked(tmp_path):
    records = [look(1, {"small": [1.0], "near": [60000.0], "far": [70000.0]})]
    found = tables_of(part_of(make_looked_at(tmp_path / "run", records)))[0]
    tones = {row[0].text: row[6].tone for row in found.rows}
    assert tones == {"small": "", "near": "warn", "far": "bad"}
    assert "inf or NaN" not in found.head


def test_gradients_of_a_step_that_overflowed_are_left_out(tmp_path):
    broken = look(20, {"a": [math.inf, 1e30]}, scale=8.0, overflow=True, activations={"a": [math.inf, 1.0]})
    path = make_looked_at(tmp_path / "run", [look(1, {"a": [1.0]}, scale=8.0, activations={"a": [2.0]}), broken])
    blocks = part_of(path)
    assert "gradients of 1 step that overflowed are left out" in text_of(blocks)
    assert "1 sampled step overflowed at the run's own loss scale" in text_of(blocks)
    assert tables_of(blocks)[0].rows[0][5].text == "1.000"
    activations = next(block for block in blocks if isinstance(block, Fold) and block.title == "Activations").blocks[0]
    assert activations.head[-1] == "inf or NaN"
    assert activations.rows[0][-1].text == "1"


def test_a_run_whose_looks_all_overflowed_says_so_and_draws_nothing(tmp_path):
    path = make_looked_at(tmp_path / "run", [look(1, {"a": [math.nan]}, scale=8.0, overflow=True)])
    assert "Every sampled step overflowed" in text_of(part_of(path))
    assert not any(name.startswith(("exponents", "forecast", "looks")) for name in names_of(path))


def test_each_learner_has_its_own(tmp_path):
    learners = ("critic", "artist/1")
    records = [one for name in learners for one in sampled_steps(2, learner=name)]
    path = make_looked_at(tmp_path / "gan", records, learners=learners, scale=1.0)
    assert [name for name in names_of(path) if name.startswith("forecast")] == ["forecast-critic", "forecast-artist-1"]
    text = text_of(part_of(path))
    assert "critic: Recommended" in text
    assert "artist/1: Recommended" in text
    assert write_report(path).md.exists()


def test_damaged_histograms_are_shown_as_far_as_they_go(tmp_path):
    path = make_looked_at(tmp_path / "run")
    lines = (path / "histograms.jsonl").read_text().splitlines()
    (path / "histograms.jsonl").write_text("\n".join([lines[0], "{}", lines[2]]) + "\n")
    text = text_of(part_of(path))
    assert "histograms.jsonl, line 2 is damaged" in text
    assert "1 sampled step: 1." in text
    assert "one sampled step does not show how much the largest gradient varies" in text


def test_names_from_outside_are_only_shown(tmp_path):
    hostile = "<script>alert(1)</script>|`x`\n# no heading"
    path = make_looked_at(tmp_path / "run", [look(1, {hostile: [1.5 * 2.0**-30]}, {hostile: [2.0]})])
    page = run_page(RunPaths(path))
    assert "<script>" not in html(page)
    assert "\n# no heading" not in markdown_page(page, "figures")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_its_figures_are_legible(tmp_path, width):
    path = make_looked_at(tmp_path / "run", overflows={3: "calibrating", 30: "growth probe"})
    seen = visit(write_report(path).html, width, [PAGE_WIDTH, SMALLEST_TEXT, CUT_TEXT])
    page_width, smallest, cut = seen.answers
    assert page_width <= width
    assert smallest >= 9.5
    assert cut == 0
