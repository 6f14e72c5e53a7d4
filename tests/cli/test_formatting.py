import math

import pytest
from loops import each

from mptrain.cli import formatting


@each(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (10810, "3:00:10"), (math.inf, "-"), (-1, "-")],
)
def test_durations(seconds, text):
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "plain", "power"),
    [
        (65536.0, "65536", "65536 (2^16)"),
        (1000.0, "1000", "1000"),
        (0.5, "0.5", "0.5 (2^-1)"),
        (1.0, "1", "1 (2^0)"),
    ],
)
def test_scales(value, plain, power):
    assert formatting.scale(value) == plain
    assert formatting.scale_with_power(value) == power


@pytest.mark.parametrize(("value", "text"), [(0, "0 %"), (0.0009, "0.09 %"), (0.004, "0.4 %"), (0.5, "50 %")])
def test_shares(value, text):
    assert formatting.share(value) == text


def test_rates_and_metrics():
    assert formatting.rate(4215.2) == "4,215"
    assert formatting.rate(3.14159) == "3.14"
    assert formatting.metrics({"loss": 0.1, "top1": 0.9}) == "top1 0.9000  loss 0.1000"


def test_a_sparkline_shows_the_whole_history_on_a_logarithmic_axis():
    assert formatting.scale_sparkline([1, 2, 4, 8], 10) == "▁▃▆█"
    assert formatting.scale_sparkline([4.0] * 100, 8) == "▁" * 8
    assert formatting.scale_sparkline([1.0] * 50 + [1024.0] * 50, 4) == "▁▁██"
    assert formatting.scale_sparkline([], 8) == ""
    assert formatting.scale_sparkline([math.nan, 0.0], 8) == ""


def test_a_sparkline_of_losses_is_linear_and_leaves_out_what_is_not_finite():
    assert formatting.sparkline([0.8, math.nan, 0.4, math.inf, 0.0, -0.8], 10) == "█▇▅▁"
    assert formatting.sparkline([2.3], 8) == "▁"
    assert formatting.sparkline([], 8) == ""
