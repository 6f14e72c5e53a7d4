import json
import math
from dataclasses import replace

import pytest
from report.folders import interval, make_comparison, make_sweep

from mptrain.comparison.results import write_comparisons
from mptrain.report.html_and_markdown import html, markdown_page
from mptrain.report.report_files import page_of
from mptrain.runlog.sweeps import SweepPaths
from mptrain.system.errors import StorageError


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    comparison = make_comparison(folder)
    write_comparisons(SweepPaths(folder).comparison, {"": comparison})
    return folder, page_of(folder)


def test_the_table_has_difference_interval_ratio_and_power(compared):
    text = markdown_page(compared[1], "figures")
    row = next(line for line in text.splitlines() if line.startswith("| amp_dynamic | 4 | 0.8900"))
    for expected in (
        "0.8900 ± 0.0021",
        "\u22120.0100 \\[\u22120.0120, \u22120.0080\\]",
        "1,000",
        "2.00\u00d7 \\[1.90, 2.10\\]",
        "0.09 %",
    ):
        assert expected in row
    assert row.endswith("| equivalent (power 56 %) |")


def test_runs_without_a_metric_are_counted_beside_the_mean(compared):
    assert "| fp16_noscale | 3 of 4 | 0.8800 ± 0.0021 |" in markdown_page(compared[1], "figures")


def test_all_figures_are_there(compared):
    names = [plot.name for plot in compared[1].plots()]
    expected = ["differences", "seeds", "losses", "metrics", "loss-scales"]
    assert names == expected


def test_only_arms_whose_scale_moves_have_a_panel(compared):
    svg = {plot.name: plot.svg for plot in compared[1].plots()}["loss-scales"]
    assert ">amp_dynamic<" in svg
    assert ">fp32<" not in svg
    assert ">overflow, growth probe<" in svg


def test_what_is_unfair_and_what_was_checked_is_said(compared):
    folder, page = compared
    text = html(page)
    for expected in (
        "Not comparable: TF32 is on in one arm.",
        "all arms had the same data",
        "the test split has 400 samples",
    ):
        assert expected in text
    assert "not fair" in page.lead
    assert f"mptrain compare {folder / 'run-0-0'}" in text


def test_what_the_arms_share_is_told_in_words_also_of_existing_runs(compared):
    text = markdown_page(compared[1], "figures")
    assert "The same in all finished runs:" in text
    assert "parameters float16" in text


def test_keys_that_differ_stand_beside_each_other(compared):
    assert "| precision.name | fp32 | mode1 | mode2 |" in markdown_page(compared[1], "figures")


def test_a_folder_that_was_moved_still_has_its_curves(compared, tmp_path):
    moved = tmp_path / "moved"
    compared[0].rename(moved)
    try:
        assert "losses" in [plot.name for plot in page_of(moved).plots()]
    finally:
        moved.rename(compared[0])


def test_runs_that_are_gone_leave_a_sentence(tmp_path):
    comparison = make_comparison(tmp_path, seeds=1)
    write_comparisons(SweepPaths(tmp_path).comparison, {"": comparison})
    for run in tmp_path.glob("run-*"):
        run.rename(run.with_name(f"gone-{run.name}"))
    page = page_of(tmp_path)
    assert "there are no curves" in html(page)
    assert "no run directory" in html(page)


def test_a_comparison_of_one_pair_has_values_and_no_intervals(tmp_path):
    comparison = make_comparison(tmp_path, seeds=1)

    def alone(found):
        return found and replace(found, low=math.nan, high=math.nan, spread=math.nan, n=1)

    arms = tuple(
        replace(arm, metric=alone(arm.metric), difference=alone(arm.difference), equivalence=None)
        for arm in comparison.arms
    )
    write_comparisons(SweepPaths(tmp_path).comparison, {"": replace(comparison, arms=arms)})
    page = page_of(tmp_path)
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
    assert titles[:4] == ["mlp: comparison", "cnn: comparison", "mlp: details", "cnn: details"]
    assert page.lead.startswith("mlp: top1 on test data, against fp32: amp_dynamic equivalent, fp16_noscale worse.")


def test_the_forest_is_drawn_for_what_is_near_the_margin(tmp_path):
    comparison = make_comparison(tmp_path, seeds=1)
    far = replace(comparison.arms[2], difference=interval(-0.8, 0.05))
    write_comparisons(SweepPaths(tmp_path).comparison, {"": replace(comparison, arms=(*comparison.arms[:2], far))})
    svg = page_of(tmp_path).plots()[0].svg
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


def recipe(tmp_path, verdict):
    points = [((f"scaler.scale={value}",), "done", {}) for value in (1, 128, 1024)]
    plan = {"recipe": "two_cliffs", "smoke": True}
    folder = make_sweep(tmp_path / "recipe", points, kind="recipe", plan=plan)
    write_comparisons(SweepPaths(folder).comparison, {"": make_comparison(folder, seeds=1)})
    (folder / "verdict.json").write_text(verdict if isinstance(verdict, str) else json.dumps(verdict))
    return page_of(folder)


def test_a_recipe_shows_claim_expectations_and_verdict(tmp_path):
    page = recipe(
        tmp_path,
        {
            "schema": 2,
            "recipe": "two_cliffs",
            "title": "Loss scales between two cliffs",
            "claim": "Between the two the scale does not matter.",
            "source": "Micikevicius et al. 2018",
            "verdict": "NOT REPRODUCED",
            "expectations": [
                {"text": "s1 < fp32", "outcome": "not met", "numbers": "0.95 against 0.96"},
                {"text": "half"},
                7,
            ],
        },
    )
    assert page.title == "Loss scales between two cliffs"
    assert (page.status.text, page.status.tone) == ("NOT REPRODUCED", "bad")
    text = html(page)
    for expected in (
        "Micikevicius et al. 2018",
        "0.95 against 0.96",
        "not met",
        "mptrain reproduce two_cliffs --smoke",
    ):
        assert expected in text
    assert "cliffs" in [plot.name for plot in page.plots()]


def test_a_recipe_without_a_readable_verdict_has_a_report(tmp_path):
    folder = make_sweep(tmp_path / "recipe", [], kind="recipe", plan={"recipe": "reductions"})
    for verdict in (
        "{",
        "[]",
        "{}",
        '{"schema": 2, "expectations": 3, "verdict": null, "nonfinite": {"a.b": "inf"}}',
    ):
        (folder / "verdict.json").write_text(verdict)
        page = page_of(folder)
        assert page.title == "reductions"
        assert "mptrain reproduce reductions" in html(page)


def test_a_recipe_without_runs_has_its_verdict(tmp_path):
    folder = make_sweep(tmp_path / "recipe", [], kind="recipe", plan={"recipe": "scales"})
    fields = {
        "schema": 2,
        "verdict": "REPRODUCED",
        "words": ["device=cpu"],
        "expectations": [{"text": "s128 skip_rate below 0.01", "outcome": "met", "numbers": "s128 0"}],
    }
    (folder / "verdict.json").write_text(json.dumps(fields))
    page = page_of(folder)
    assert page.lead == "1 of 1 expectation met."
    assert (page.status.text, page.status.tone) == ("REPRODUCED", "good")
    assert "mptrain reproduce scales device=cpu" in markdown_page(page, "figures")


def test_what_an_arm_takes_stands_in_ratios_that_say_what_they_are_of(compared):
    text = markdown_page(compared[1], "figures")
    assert "| speed after warm-up | training time with warm-up | peak memory | energy |" in text
    assert "| amp_dynamic | 2.00\u00d7 \\[1.90, 2.10\\] | 2.00\u00d7 \\[1.90, 2.10\\] | 2.00" in text
