import json
import math
from dataclasses import replace
from html import escape

import pytest

from mptrain.report.html_and_markdown import html, markdown_page, page_of
from mptrain.runlog.sweeps import SweepPaths
from mptrain.study.comparison.results import Objection, write_comparisons
from mptrain.study.pages.comparison_blocks import objections_list
from mptrain.system.errors import StorageError
from tests.report.folders import interval, make_comparison, make_sweep

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    comparison = make_comparison(folder)
    write_comparisons(SweepPaths(folder).comparison, {"": comparison})
    return folder, page_of(folder)


def test_the_tables_have_what_arms_take_and_differ_in(compared):
    text = markdown_page(compared[1], "figures")
    row = next(line for line in text.splitlines() if line.startswith("| amp_dynamic | 4 | 0.8900"))
    difference, ratio = "\u22120.0100 \\[\u22120.0120, \u22120.0080\\]", "2.00\u00d7 \\[1.90, 2.10\\]"
    for expected in ("0.8900 ± 0.0021", difference, "1,000", ratio, "0.09 %"):
        assert expected in row
    assert row.endswith("| equivalent (power 56 %) |")
    for expected in (
        "| fp16_noscale | 3 of 4 | 0.8800 ± 0.0021 |",  # runs without a metric are counted
        "| speed after warm-up | training time with warm-up | peak memory | energy |",
        f"| amp_dynamic | {ratio} | {ratio} | 2.00",
        "| precision.name | fp32 | mode1 | mode2 |",
        "The same in all finished runs:",
        "parameters float16",
    ):
        assert expected in text


def test_all_figures_are_there_with_panels_of_arms_that_move(compared):
    drawn = {plot.name: plot.svg for plot in compared[1].plots()}
    assert list(drawn) == ["differences", "seeds", "losses", "metrics", "loss-scales"]
    assert ">amp_dynamic<" in drawn["loss-scales"]
    assert ">fp32<" not in drawn["loss-scales"]
    assert ">overflow, growth probe<" in drawn["loss-scales"]


def test_what_is_unfair_and_what_was_checked_is_said(compared):
    folder, page = compared
    text = html(page)
    for expected in ("TF32 is on in one arm", "all arms had the same data", "the test split has 400 samples"):
        assert expected in text
    assert "not fair" in page.lead
    assert f"mptrain compare {folder / 'run-0-0'}" in text


def test_a_folder_that_was_moved_still_has_its_curves(compared, tmp_path):
    moved = tmp_path / "moved"
    compared[0].rename(moved)
    try:
        assert "losses" in [plot.name for plot in page_of(moved).plots()]
    finally:
        moved.rename(compared[0])


def write(folder, comparison):
    write_comparisons(SweepPaths(folder).comparison, {"": comparison})
    return page_of(folder)


def test_runs_that_are_gone_leave_a_sentence(tmp_path):
    comparison = make_comparison(tmp_path, seeds=1)
    for run in tmp_path.glob("run-*"):
        run.rename(run.with_name(f"gone-{run.name}"))
    text = html(write(tmp_path, comparison))
    assert "there are no curves" in text
    assert "no run directory" in text


def test_a_comparison_of_one_pair_has_values_and_no_intervals(tmp_path):
    def alone(found):
        return found and replace(found, low=math.nan, high=math.nan, spread=math.nan, n=1)

    comparison = make_comparison(tmp_path, seeds=1)
    arms = [
        replace(one, metric=alone(one.metric), difference=alone(one.difference), equivalence=None)
        for one in comparison.arms
    ]
    page = write(tmp_path, replace(comparison, arms=tuple(arms)))
    assert "nan" not in html(page)
    assert "| 0.8900 | \u22120.01000 |" in markdown_page(page, "figures")


def test_groups_have_a_table_and_figures_each(tmp_path):
    def below(name, arm):
        runs = tuple(replace(run, path=f"{name}/{run.path}") for run in arm.arm.runs)
        return replace(arm, arm=replace(arm.arm, runs=runs))

    groups = {}
    for name in ("mlp", "cnn"):
        comparison = make_comparison(tmp_path / name, seeds=1)
        groups[name] = replace(comparison, arms=tuple(below(name, arm) for arm in comparison.arms))
    write_comparisons(SweepPaths(tmp_path).comparison, groups)
    page = page_of(tmp_path)
    names = [plot.name for plot in page.plots()]
    assert len(names) == len(set(names)) == 10
    assert {"g1-differences", "g2-loss-scales"} <= set(names)
    titles = [section.title for section in page.sections if section.blocks]
    assert titles[:5] == ["All groups", "mlp: comparison", "cnn: comparison", "mlp: details", "cnn: details"]
    over_all = page.sections[[section.title for section in page.sections].index("All groups")].blocks[0]
    assert over_all.head == ("group", "arm", "value", "Δ", "verdict")
    assert [row[0].text for row in over_all.rows] == ["mlp, top1", "", "", "cnn, top1", "", ""]
    assert [row[1].text for row in over_all.rows[:3]] == ["fp32", "amp_dynamic", "fp16_noscale"]
    assert [row[4].text for row in over_all.rows[3:]] == ["reference", "equivalent", "worse"]
    assert page.lead.startswith("mlp: top1 on test data, against fp32: amp_dynamic equivalent, fp16_noscale worse.")


def test_memory_by_use_stands_beside_the_reference(tmp_path):
    comparison = make_comparison(tmp_path, arms=("fp32", "half"), seeds=2)
    assert "activations" not in html(write(tmp_path, comparison))  # recorded by no run
    uses = ({"weights": 4000, "activations": 8000}, {"weights": 2000, "master_weights": 4000, "activations": 4000})
    arms = [
        replace(one, arm=replace(one.arm, runs=tuple(replace(run, memory_by_use=use) for run in one.arm.runs)))
        for one, use in zip(comparison.arms, uses, strict=True)
    ]
    text = markdown_page(write(tmp_path, replace(comparison, arms=tuple(arms))), "figures")
    assert "| arm | weights | activations | master weights | together | of fp32 |" in text
    assert "| half | 2.0 kB | 4.0 kB | 4.0 kB | 10.0 kB | 0.83\xd7 |" in text


def test_the_forest_is_drawn_for_what_is_near_the_margin(tmp_path, drawn):
    comparison = make_comparison(tmp_path, seeds=1)
    far = replace(comparison.arms[2], difference=interval(-0.8, 0.05))
    svg = write(tmp_path, replace(comparison, arms=(*comparison.arms[:2], far))).plots()[0].svg
    assert ">\u22120.800 [\u22120.850, \u22120.750]<" in svg
    assert ">\u22120.01<" in svg


def test_an_unfinished_comparison_shows_its_runs(tmp_path):
    points = [(("precision=fp32",), "done", {}), (("precision=bf16",), "waiting", None)]
    page = page_of(make_sweep(tmp_path / "comparison", points, kind="comparison", plan={"reference": "fp32"}))
    assert page.status.text == "1 of 2 done"
    assert "after all runs have ended" in html(page)
    assert page.lead == "There is no verdict yet."


def test_a_damaged_comparison_is_named(tmp_path):
    SweepPaths(tmp_path).comparison.write_text('{"schema": 2}')
    with pytest.raises(StorageError, match=r"comparison\.json is damaged"):
        page_of(tmp_path)


def recipe(tmp_path, verdict, points=(), smoke=True):
    plan = {"recipe": "two_cliffs", "smoke": smoke}
    folder = make_sweep(tmp_path / "recipe", points, kind="recipe", plan=plan)
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return folder


def test_a_recipe_shows_claim_expectations_and_verdict(tmp_path):
    unmet = {"text": "s1 < fp32", "outcome": "not met", "numbers": "0.95 against 0.96"}
    verdict = {
        "schema": 2, "recipe": "two_cliffs", "title": "Loss scales between two cliffs", "claim": "Between, none matters.",
        "source": "Micikevicius et al. 2018", "verdict": "NOT REPRODUCED", "expectations": [unmet, {"text": "half"}, 7],
    }  # fmt: skip
    folder = recipe(tmp_path, verdict, [((f"scaler.scale={value}",), "done", {}) for value in (1, 128, 1024)])
    page = write(folder, make_comparison(folder, seeds=1))
    assert page.title == "Loss scales between two cliffs"
    assert (page.status.text, page.status.tone) == ("NOT REPRODUCED", "bad")
    text = html(page)
    for expected in (*unmet.values(), verdict["claim"], verdict["source"], "mptrain reproduce two_cliffs --smoke"):
        assert escape(expected) in text
    assert "cliffs" in [plot.name for plot in page.plots()]


def test_a_recipe_without_a_readable_verdict_has_a_report(tmp_path):
    folder = recipe(tmp_path, {})
    for verdict in ("{", "[]", "{}", '{"schema": 2, "expectations": 3, "verdict": null, "nonfinite": {"a.b": "inf"}}'):
        (folder / "verdict.json").write_text(verdict)
        page = page_of(folder)
        assert page.title == "two_cliffs"
        assert "mptrain reproduce two_cliffs" in html(page)


def test_a_recipe_without_runs_has_its_verdict(tmp_path):
    met = {"text": "s128 skip_rate below 0.01", "outcome": "met", "numbers": "s128 0"}
    verdict = {"schema": 2, "verdict": "REPRODUCED", "words": ["device=cpu"], "expectations": [met]}
    page = page_of(recipe(tmp_path, verdict, smoke=False))
    assert page.lead == "1 of 1 expectation met."
    assert (page.status.text, page.status.tone) == ("REPRODUCED with device=cpu", "good")
    assert "mptrain reproduce two_cliffs device=cpu" in markdown_page(page, "figures")


def test_a_hint_of_several_caveats_is_said_once(tmp_path):
    hint, other = "see the values at equal updates", "train it"
    objections = [
        *(Objection(f"{arm} ran for 9 steps", False, hint) for arm in ("a", "b", "c")),
        *(Objection("d lacks seed 3", False, other), Objection("a differs from d", True, hint)),
    ]
    found = objections_list(replace(make_comparison(tmp_path), objections=tuple(objections)))
    assert found.items == (
        f"Caveat: a ran for 9 steps; b ran for 9 steps; c ran for 9 steps. To fix it: {hint}.",
        f"Caveat: d lacks seed 3. To fix it: {other}.",
        f"Not comparable: a differs from d. To fix it: {hint}.",
    )


def test_the_title_names_the_model_and_the_data_that_all_runs_share(tmp_path):
    comparison = make_comparison(tmp_path)

    def titled(data):
        arms = []
        for result in comparison.arms:
            runs = [replace(run, chosen={"model": "cnn", "dataset": data[run.seed % 2]}) for run in result.arm.runs]
            arms.append(replace(result, arm=replace(result.arm, runs=tuple(runs))))
        write_comparisons(SweepPaths(tmp_path).comparison, {"": replace(comparison, arms=tuple(arms))})
        return page_of(tmp_path).title

    assert titled(("digits", "digits")).endswith(": cnn on digits")
    assert titled(("digits", "shapes")).endswith(": cnn")
