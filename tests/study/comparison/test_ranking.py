"""The setting of a sweep that is called the best."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from mptrain.runlog.sweeps import Sweep, SweepJob, interval_of
from mptrain.study.comparison.ranking import RankedSetting, rank, ranking, selected, sweep_lead

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


BARE = [RankedSetting(name, value, math.nan, math.nan) for name, value in (("a", 0.9), ("b", 0.5))]
FIRST, SECOND = (RankedSetting(name, 0.9, 0.88, 0.92) for name in ("a", "b"))
WORST = RankedSetting("c", 0.5, 0.48, 0.52)
NEARLY = [RankedSetting(f"n{at}", 0.89 - at / 1000, 0.87, 0.91) for at in range(5)]
MANY = [RankedSetting(str(at), 0.5 + at / 1000, 0.4, 0.6) for at in range(8)]
OVER = "95 % CIs over samples"


@pytest.mark.parametrize(
    ("ranked", "sentence"),
    [
        ([A, FAR], "best 0.90 at a, worst 0.50 at c"),
        ([A, NEAR, FAR], f"best 0.90 at a, within noise of b ({OVER} overlap), worst 0.50 at c"),
        ([A, *NEARLY, FAR], f"n0, n1, n2 and 2 more ({OVER} (widened x1.06 for 7 settings) overlap)"),
        ([A, NEAR], f"0.89 at b to 0.90 at a, within noise of each other: their {OVER} overlap"),
        (MANY, f"within noise of each other: their {OVER} (widened x1.09 for 8 settings) overlap"),
        (BARE, "best 0.90 at a, worst 0.50 at b; without 95 % CIs, this may be noise"),
        ([FIRST, SECOND, WORST], f"best 0.90 at a, within noise of b ({OVER} overlap), worst 0.50 at c"),
        ([WORST, replace(WORST, name="d"), FIRST], "best 0.90 at a, worst 0.50 at c, d"),
    ],
)
def test_a_best_is_named_with_what_cannot_be_told_from_it(ranked, sentence):
    assert sentence in said(*ranked)


def test_the_direction_tells_the_best_from_the_worst():
    assert said(A, FAR, higher=False) == "best 0.50 at c, worst 0.90 at a"
    assert said(A, FAR, higher=None) == "from 0.50 at c to 0.90 at a"


def test_the_interval_of_several_seeds_is_over_seeds():
    found = rank("a", [summary(0.90, (0.5, 0.99)), summary(0.92), summary(0.94)])
    assert (found.value, found.seeds) == (pytest.approx(0.92), 3)
    assert (found.low, found.high) == (
        pytest.approx(0.92 - 4.3027 * 0.02 / 3**0.5, abs=1e-4),
        pytest.approx(0.9697, abs=1e-4),
    )


def test_seeds_that_agree_to_the_digit_have_intervals_over_samples():
    found = rank("a", [summary(0.9, (0.88, 0.92)), summary(0.9, (0.86, 0.94))])
    assert (found.low, found.high) == (pytest.approx(0.87), pytest.approx(0.93))
    assert OVER in said(found, rank("b", [summary(0.905, [0.82, 0.98])] * 2))


def test_seeds_repeat_a_setting_and_are_none():
    jobs = [
        job(at, f"optimizer.lr={lr}", f"seed={seed}") for at, (lr, seed) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)])
    ]
    text = lead(jobs, summary(0.90), summary(0.91), summary(0.10), summary(0.11))
    assert text == (
        "top1 (test): best 0.905 at optimizer.lr=1, worst 0.105 at optimizer.lr=2. "
        "There is no validation data: what is best here was chosen by test data, and looks better than it is."
    )
    alone = lead([job(0, "seed=0"), job(1, "seed=1")], summary(0.90), summary(0.92))
    assert alone == "top1 (test): mean 0.910 over 2 seeds, 95 % CI 0.783 to 1.037; from 0.900 to 0.920."


def test_what_did_not_end_in_order_counts_for_nothing():
    jobs = [job(0, "seed=0"), job(1, "seed=1", status="failed")]
    assert lead(jobs, summary(0.9), summary(0.1)) == "top1 (test): 0.900 at the 1 finished point."
    assert lead([jobs[1]], summary(0.1)) == lead([jobs[0]], summary(math.nan)) == "No point has a final metric yet."
    sentence = lead([job(0, "a=1"), job(1, "a=2"), job(2, "a=3")], summary(0.9), summary(0.8), summary(math.nan))
    assert sentence.endswith(" 1 more point ended with a non-finite metric.")


def trained(val, test, **more):
    """Return the summary of a run with these metrics, as it is saved: its own metric is that on test data."""
    return {
        "metric": test["iou"], "metric_name": "iou", "metric_split": "test", "higher_is_better": True,
        "intervals": {"iou": (0.1, 0.9)}, "val": val, "test": test, "val_intervals": {"iou": (0.69, 0.71)}, **more,
    }  # fmt: skip


def sweep_of(kind="sweep", **plan):
    return Sweep(Path("s"), kind, (), (), "train", 1, (), plan=plan)


LEFT = trained({"iou": 0.7, "loss": 3.0}, {"iou": 0.5})
RIGHT = trained({"iou": 0.4, "loss": 1.0}, {"iou": 0.8}, val_intervals={"iou": (0.39, 0.41)})


def test_a_setting_is_chosen_by_validation_data_and_its_test_figure_stands_beside_it():
    found = [selected(sweep_of(), one) for one in (LEFT, RIGHT)]
    text = lead([job(0, "a=1"), job(1, "a=2")], *found)
    assert text.startswith("iou (val): best 0.700 at a=1, worst 0.400 at a=2")
    assert text.endswith(". On test data, a=1 has 0.500.")
    assert [one["metric"] for one in found] == [0.7, 0.4]
    assert interval_of(found[0]) == (0.69, 0.71)
    assert selected(sweep_of("comparison"), LEFT) == LEFT


def test_an_objective_names_another_metric_of_validation_whose_direction_is_that_of_its_name():
    text = lead([job(0, "a=1"), job(1, "a=2")], *(selected(sweep_of(objective="loss"), one) for one in (LEFT, RIGHT)))
    assert text.startswith("loss (val): best 1.000 at a=2, worst 3.000 at a=1")
    assert "test" not in text  # no loss is recorded there
    text = lead([job(0, "a=1"), job(1, "a=2")], *(selected(sweep_of(objective="los"), one) for one in (LEFT, RIGHT)))
    assert text == "No point has los on validation data; recorded: iou, loss."


def test_without_validation_data_the_choice_by_test_data_is_said_and_mixtures_are_not_ranked():
    bare = [selected(sweep_of(), {**one, "val": None}) for one in (LEFT, RIGHT)]
    jobs = [job(0, "a=1"), job(1, "a=2")]
    assert "iou (test)" in lead(jobs, *bare)
    assert lead(jobs, *bare).count("There is no validation data") == 1
    assert lead(jobs, selected(sweep_of(), LEFT), bare[1]) == (
        "Points have iou (val), iou (test): figures of different metrics or data are not ranked."
    )


@pytest.mark.parametrize("count", [2, 10])
def test_equal_settings_rarely_have_a_best(count):
    draw, named = random.Random(count), 0
    for _ in range(400):
        values = [draw.gauss(0, 1) for _ in range(count)]
        settings = (RankedSetting(str(at), one, one - 1.96, one + 1.96) for at, one in enumerate(values))
        named += said(*settings).startswith("best")
    assert named / 400 <= 0.08  # 5 %, and what chance adds
