"""The setting of a sweep that is called the best."""

import math
import random
from dataclasses import replace

import pytest

from mptrain.cli.sweep_display import print_outcome
from mptrain.comparison.ranking import RankedSetting, rank, ranking, sweep_lead
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.summary_file import write_summary
from mptrain.runlog.sweeps import Sweep, SweepJob

A, NEAR, FAR = (
    RankedSetting("a", 0.9, 0.88, 0.92),
    RankedSetting("b", 0.89, 0.87, 0.91),
    RankedSetting("c", 0.5, 0.45, 0.55),
)


def said(*ranked, higher=True):
    return ranking(ranked, higher_is_better=higher, number="{:.2f}".format)


def summary(metric, interval=None, name="top1", higher=True):
    return {
        "metric": metric, "metric_name": name, "metric_split": "test", "higher_is_better": higher,
        "intervals": {name: interval} if interval else {},
    }  # fmt: skip


def job(number, *words, status="done"):
    return SweepJob(number, f"{number:03d}", ("model=mlp", *words), words, "", status, 0, "", 1.0)


def lead(jobs, *summaries):
    return sweep_lead(jobs, dict(enumerate(summaries)), "{:.3f}".format)


def test_a_best_apart_from_all_others_is_the_best():
    assert said(A, FAR) == "best 0.90 at a, worst 0.50 at c"
    assert said(A, FAR, higher=False) == "best 0.50 at c, worst 0.90 at a"


def test_what_cannot_be_told_from_the_best_is_named_with_it():
    over = "(95 % CIs over test samples overlap)"
    assert said(A, NEAR, FAR) == f"best 0.90 at a, within noise of b {over}, worst 0.50 at c"
    many = [RankedSetting(f"n{at}", 0.89 - at / 1000, 0.87, 0.91) for at in range(5)]
    over = over.replace("overlap", "(widened x1.06 for 7 settings) overlap")
    assert f"within noise of n0, n1, n2 and 2 more {over}" in said(A, *many, FAR)


def test_of_settings_that_all_overlap_none_is_best():
    assert (
        said(A, NEAR) == "0.89 at b to 0.90 at a, within noise of each other: their 95 % CIs over test samples overlap"
    )


def test_without_intervals_or_direction_nothing_more_is_claimed():
    bare = [RankedSetting(name, value, math.nan, math.nan) for name, value in (("a", 0.9), ("b", 0.5))]
    assert said(*bare) == "best 0.90 at a, worst 0.50 at b; without 95 % CIs, this may be noise"
    assert said(A, FAR, higher=None) == "from 0.50 at c to 0.90 at a"


def test_settings_with_equal_values_are_all_named():
    first, second = (RankedSetting(name, 0.9, 0.88, 0.92) for name in ("a", "b"))
    worst = RankedSetting("c", 0.5, 0.48, 0.52)
    assert said(first, second, worst) == (
        "best 0.90 at a, within noise of b (95 % CIs over test samples overlap), worst 0.50 at c"
    )
    assert said(worst, replace(worst, name="d"), first) == "best 0.90 at a, worst 0.50 at c, d"


def test_the_interval_of_several_seeds_is_over_seeds():
    found = rank("a", [summary(0.90, (0.5, 0.99)), summary(0.92), summary(0.94)])
    assert (found.value, found.seeds) == (pytest.approx(0.92), 3)
    assert (found.low, found.high) == (
        pytest.approx(0.92 - 4.3027 * 0.02 / 3**0.5, abs=1e-4),
        pytest.approx(0.9697, abs=1e-4),
    )


def test_seeds_that_agree_to_the_digit_have_the_interval_over_test_samples():
    found = rank("a", [summary(0.9, (0.88, 0.92)), summary(0.9, (0.86, 0.94))])
    assert (found.low, found.high) == (pytest.approx(0.87), pytest.approx(0.93))


def test_seeds_repeat_a_setting_and_are_none():
    jobs = [
        job(at, f"optimizer.lr={lr}", f"seed={seed}") for at, (lr, seed) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)])
    ]
    text = lead(jobs, summary(0.90), summary(0.91), summary(0.10), summary(0.11))
    assert text == "top1 (test): best 0.905 at optimizer.lr=1, worst 0.105 at optimizer.lr=2."
    alone = lead([job(0, "seed=0"), job(1, "seed=1")], summary(0.90), summary(0.92))
    assert alone == "top1 (test): mean 0.910 over 2 seeds, 95 % CI 0.783 to 1.037; from 0.900 to 0.920."


def test_what_did_not_end_in_order_counts_for_nothing():
    jobs = [job(0, "seed=0"), job(1, "seed=1", status="failed")]
    assert lead(jobs, summary(0.9), summary(0.1)) == "top1 (test): 0.900 at the 1 finished point."
    assert lead([jobs[1]], summary(0.1)) == "No point has a final metric yet."
    assert lead([jobs[0]], summary(math.nan)) == "No point has a final metric yet."


def test_a_terminal_says_what_the_report_says(tmp_path, capsys):
    jobs = [job(at, f"optimizer.lr={at}") for at in (0, 1)]
    for one, found in zip(jobs, (summary(0.1008, (0.07, 0.13)), summary(0.1108, (0.08, 0.14))), strict=True):
        (tmp_path / one.name).mkdir()
        write_summary(RunPaths(tmp_path / one.name).summary, {"learners": {}, **found})
    print_outcome(Sweep(tmp_path, "sweep", ("optimizer.lr=0,1",), (), "train", 1, tuple(jobs)))
    assert (
        "top1 (test): 0.1008 at optimizer.lr=0 to 0.1108 at optimizer.lr=1, within noise of each other"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("count", [2, 5, 10, 30])
def test_equal_settings_have_a_best_in_no_more_than_one_sweep_of_twenty(count):
    draw, named = random.Random(count), 0
    for _ in range(400):
        values = [draw.gauss(0, 1) for _ in range(count)]
        named += said(
            *(RankedSetting(str(at), one, one - 1.96, one + 1.96) for at, one in enumerate(values))
        ).startswith("best")
    assert named / 400 <= 0.08  # 5 %, and what chance adds


def test_a_choice_among_many_is_said_to_have_wider_intervals():
    many = [RankedSetting(str(at), 0.5 + at / 1000, 0.4, 0.6) for at in range(8)]
    assert "their 95 % CIs over test samples (widened x1.09 for 8 settings) overlap" in said(*many)


def test_a_point_whose_metric_is_not_finite_is_counted():
    sentence = lead([job(0, "a=1"), job(1, "a=2"), job(2, "a=3")], summary(0.9), summary(0.8), summary(math.nan))
    assert sentence.endswith(" 1 more point ended with a non-finite metric.")


def test_seeds_that_agree_to_the_digit_have_intervals_over_test_samples():
    runs = [summary(0.9, [0.8, 0.97])] * 2
    assert "over test samples" in said(rank("a", runs), rank("b", [summary(0.905, [0.82, 0.98])] * 2))
