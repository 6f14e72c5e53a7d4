"""Cases that others have published with the value of every run: our verdict beside theirs, as the docs tell them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from mptrain.study.comparison.logs.compare_logs import compare

PAGE = Path(__file__).parents[4] / "docs" / "compare-logs.md"

#: Losses of 20 runs at two steps: github.com/KellerJordan/modded-nanogpt/pull/321.
AT_2745 = [
    3.27930, 3.28004, 3.27972, 3.27911, 3.27991, 3.27715, 3.28010, 3.27908, 3.27883, 3.28055,
    3.27934, 3.27929, 3.28025, 3.27985, 3.27824, 3.28042, 3.27797, 3.27887, 3.27877, 3.27830,
]  # fmt: skip
AT_2750 = [
    3.27891, 3.27961, 3.27934, 3.27866, 3.27952, 3.27679, 3.27971, 3.27867, 3.27842, 3.28014,
    3.27892, 3.27891, 3.27988, 3.27946, 3.27783, 3.28001, 3.27760, 3.27848, 3.27839, 3.27788,
]  # fmt: skip

#: github.com/KellerJordan/modded-nanogpt/pull/45 and /pull/362.
FOUR = [3.2772, 3.2756, 3.2784, 3.2783]
EIGHT = [3.27676, 3.27770, 3.27869, 3.27831, 3.27789, 3.27830, 3.27757, 3.27857]


def written(folder, **arms):
    for name, values in arms.items():
        for run, value in enumerate(values):
            (folder / f"{name}-{run}.csv").write_text(f"step,loss\n1,{value}\n")
    return {name: str(folder / f"{name}-*.csv") for name in arms}


@pytest.mark.parametrize(
    ("values", "told", "verdict"),
    [
        (AT_2745, "step 2745, mean 3.27925 | .0033: not below", "beats target"),
        (AT_2750, "step 2750, mean 3.27886 | .0051: below", "beats target"),
        (EIGHT, "8 runs, mean 3.27797 | .0057: below", "beats target"),
        (FOUR, "4 runs, mean 3.27738 | .0052: below", "beats target"),
        (FOUR[:2], "", "undecided"),
    ],
)
def test_records_of_speed(values, told, verdict, tmp_path):
    mean = statistics.mean(values)
    rule = (3.28 - mean) * math.sqrt(len(values))
    below = "below" if rule >= 0.004 else "not below"
    assert not told or (
        told in PAGE.read_text() and f"mean {mean:.5f} | {rule:.4f}: {below}".replace(" 0.", " .") in told
    )
    found = compare(logs=written(tmp_path, record=values), metric="loss", target=3.28)
    assert found.arms[0].verdict == verdict


def test_one_pair_within_a_bar_is_no_evidence(tmp_path):
    """github.com/marin-community/marin/issues/7298: FP8 ends .0040 above BF16, with a bar of .01."""
    found = compare(logs=written(tmp_path, bf16=[2.0], fp8=[2.0040]), metric="loss", margin=0.01)
    assert found.arms[1].verdict == "undecided"
    assert found.arms[1].why.startswith("an arm has only one finite run, and a verdict needs at least two")


def test_two_runs_of_each_that_spread_by_more_than_the_difference(tmp_path):
    """github.com/verl-project/verl/pull/7519: accuracy of the same setting on two hosts."""
    arms = written(tmp_path, bf16=[0.8719, 0.8597], fp8=[0.8537, 0.8741])
    found = compare(logs=arms, metric="loss", better="higher", margin=0.01).arms[1]
    assert (found.verdict, found.runs_needed) == ("undecided", 26)
    assert "undecided, 26 runs of each" in PAGE.read_text()
