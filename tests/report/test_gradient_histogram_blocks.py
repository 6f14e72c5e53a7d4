import math

import pytest

from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.page import Bullets, Fold, Table, Text
from mptrain.report.run_page import run_page
from mptrain.runlog import RunPaths
from tests.histograms_by_hand import counted, look
from tests.report.folders import make_run
from tests.report.microscope import make_looked_at, sampled_steps
from tests.report.policy import without_script

pytestmark = pytest.mark.usefixtures("undrawn")


class Part:
    """The part of a run's page on its histograms, and the names and SVGs of the page's figures."""

    def __init__(self, path):
        page = run_page(RunPaths(path))
        self.blocks = next(section.blocks for section in page.sections if section.title == "Tensors and the FP16 range")
        self.drawn = {plot.name: plot.svg for plot in page.plots()}
        self.tables = [block for block in self.blocks if isinstance(block, Table)]
        self.folds = {block.title: block.blocks[0] for block in self.blocks if isinstance(block, Fold)}
        texts = [block.text for block in self.blocks if isinstance(block, Text)]
        self.text = " ".join(
            [*texts, *(item for block in self.blocks if isinstance(block, Bullets) for item in block.items)]
        )


@pytest.mark.long
def test_histograms_are_shown_against_the_range_of_fp16(tmp_path, drawn):
    part = Part(make_looked_at(tmp_path / "run", scale=1.0, precision="fp32"))
    assert list(part.drawn)[-4:] == ["exponents-gradients", "exponents", "forecast", "looks"]
    for zone in ("lost", "subnormal", "normal", "inf"):
        assert f">{zone}<" in part.drawn["exponents-gradients"]
    for kind in ("activations", "weights", "weight gradients", "updates"):
        assert f">{kind}<" in part.drawn["exponents"]
    assert "Recommended static loss scale: 2^" in part.text
    assert "3 sampled steps: 1, 20, 40." in part.text
    assert "50 % of the updates would not change a weight stored in FP16; most in 2.conv.weight, 75 %." in part.text
    assert "Gradients were recorded in FP16 only" not in part.text


@pytest.mark.long
def test_gradients_are_drawn_twice_where_they_carry_a_scale(tmp_path, drawn):
    half = [look(1, {"a": counted([2.0**-24, 2.0**-20, 1.0], "float16")})]  # of a run without a scale
    for name, records, twice in (("scaled", sampled_steps(scale=4096.0, dtype="float16"), True), ("half", half, False)):
        part = Part(make_looked_at(tmp_path / name, records))
        assert ("scaled as in the run" in part.drawn["exponents-gradients"]) == twice
        assert "Gradients were recorded in FP16 only" in part.text
    assert Part(make_run(tmp_path / "without", steps=5)).blocks == ()


def test_zeros_and_what_is_below_the_smallest_number_are_said(tmp_path, drawn):
    values = [0.0] * 5 + [2.0**-28, 2.0**-27, 1.5 * 2.0**-25, 2.0**-24, 1.0]
    path = make_looked_at(tmp_path / "run", [look(1, {"a": counted(values)})], steps=20)
    [caption] = [plot.caption for plot in run_page(RunPaths(path)).plots() if plot.name == "exponents-gradients"]
    small = "Unscaled, 60 % of the nonzero gradients are below 2^\u221224, FP16's smallest number, 40 % of all from 2^\u221227 to 2^\u221224"
    assert small in caption
    assert "FP16 rounds 40 % of the nonzero gradients to zero" in caption
    assert "that of zeros, on the left, may be cut off: 50 %." in caption


def test_modules_stand_worst_first_and_long_lists_are_cut(tmp_path):
    part = Part(make_looked_at(tmp_path / "run", sampled_steps(1, modules=25)))
    found = part.tables[0]
    assert found.head[:3] == ("module", "dtype", "lost, of nonzero")
    assert len(found.rows) == 20
    assert found.rows[0][0].text == "0.conv"
    assert "5 tensors with smaller losses left out" in found.note
    assert list(part.folds) == ["Activations", "Weights", "Weight gradients", "Updates"]
    assert part.folds["Activations"].rows[0][1].text == "float32"


def test_a_value_beyond_fp16_is_marked(tmp_path):
    records = [look(1, {"small": [1.0], "near": [60000.0], "far": [70000.0]})]
    found = Part(make_looked_at(tmp_path / "run", records, steps=20)).tables[0]
    tones = {row[0].text: row[6].tone for row in found.rows}
    assert tones == {"small": "", "near": "warn", "far": "bad"}
    assert "inf or NaN" not in found.head


def test_gradients_of_a_step_that_overflowed_are_left_out(tmp_path):
    broken = look(20, {"a": [math.inf, 1e30]}, scale=8.0, overflow=True, activations={"a": [math.inf, 1.0]})
    records = [look(1, {"a": [1.0]}, scale=8.0, activations={"a": [2.0]}), broken]
    part = Part(make_looked_at(tmp_path / "run", records, steps=20))
    assert "gradients of 1 step that overflowed are left out" in part.text
    assert "1 sampled step overflowed at the run's own loss scale" in part.text
    assert part.tables[0].rows[0][5].text == "1.000"
    activations = part.folds["Activations"]
    assert activations.head[-1] == "inf or NaN"
    assert activations.rows[0][-1].text == "1"


def test_a_run_whose_looks_all_overflowed_says_so_and_draws_none(tmp_path):
    records = [look(1, {"a": [math.nan]}, scale=8.0, overflow=True)]
    part = Part(make_looked_at(tmp_path / "run", records, steps=20))
    assert "Every sampled step overflowed" in part.text
    assert not any(name.startswith(("exponents", "forecast", "looks")) for name in part.drawn)


def test_each_learner_has_its_own(tmp_path):
    learners = ("critic", "artist/1")
    records = [one for name in learners for one in sampled_steps(2, learner=name, modules=1)]
    path = make_looked_at(tmp_path / "gan", records, learners=learners, scale=1.0)
    part = Part(path)
    assert [name for name in part.drawn if name.startswith("forecast")] == ["forecast-critic", "forecast-artist-1"]
    assert all(f"{name}: Recommended" in part.text for name in learners)


def test_damaged_histograms_are_shown_as_far_as_they_go(tmp_path):
    path = make_looked_at(tmp_path / "run", sampled_steps(modules=1), steps=20)
    lines = (path / "histograms.jsonl").read_text().splitlines()
    (path / "histograms.jsonl").write_text("\n".join([lines[0], "{}", lines[2]]) + "\n")
    text = Part(path).text
    assert "histograms.jsonl, line 2 is damaged" in text
    assert "1 sampled step: 1." in text


def test_names_from_outside_are_only_shown(tmp_path):
    hostile = "<script>alert(1)</script>|`x`\n# no heading"
    records = [look(1, {hostile: [1.5 * 2.0**-30]}, {hostile: [2.0]})]
    page = run_page(RunPaths(make_looked_at(tmp_path / "run", records, steps=20)))
    assert hostile.split("|")[0] not in without_script(html(page))
    assert "\n# no heading" not in markdown_page(page, "figures")
