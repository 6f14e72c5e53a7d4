"""Tests of the means of two independent samples, or of one against a number: intervals, equivalence, power.

The samples are one value for each run. Their spreads may differ. The degrees of freedom are those of the smaller
sample, n - 1: with Welch's, 12 % of the 95 % intervals of equal spreads exclude the true difference where one sample
has 2 values and the other 20, and never more than 5 % with these. So all tests are a little cautious.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from mptrain.study.comparison.results import Interval
from mptrain.study.comparison.statistics import fewest, mean_and_spread

#: Draws of a simulation of power: its standard error is below half a point.
_DRAWS = 20_000


def difference_of_means(
    values: Sequence[float],
    reference: Sequence[float] | float,
    level: float,
    rounding: tuple[float, float] = (0.0, 0.0),
) -> Interval:
    """Return the mean of a sample less that of another, or less a number, with its confidence interval.

    Each sample has at least two finite values. ``rounding`` are standard deviations of the rounding error of a value of
    either sample.
    ``n`` of the result is the size of the smaller sample; its ``spread`` is NaN, as each sample has its own.
    """
    samples = [values] if isinstance(reference, int | float) else [values, reference]
    means, spreads = zip(*map(mean_and_spread, samples), strict=True)
    mean = means[0] - (means[1] if len(means) == 2 else reference)
    errors = (math.hypot(*both) / math.sqrt(len(one)) for one, *both in zip(samples, spreads, rounding, strict=False))
    n = min(map(len, samples))
    half = float(special.stdtrit(n - 1, (1 + level) / 2)) * math.hypot(*errors)
    return Interval(mean, mean - half, mean + half, math.nan, n, level)


def power_of_equivalence(
    spreads: Sequence[float], runs: Sequence[int], margin: float, alpha: float, *, one_sided: bool = False
) -> float:
    """Return the probability that two equal arms are found equivalent, or with ``one_sided`` one not inferior.

    ``spreads`` are the standard deviations over runs of both arms, or the one of paired differences, all taken to be
    normal, and ``runs`` their numbers, each at least 2. By simulation from a fixed seed.
    """
    draws = np.random.default_rng(0)
    difference, error = np.zeros(_DRAWS), np.zeros(_DRAWS)
    for spread, n in zip(spreads, runs, strict=True):
        difference += draws.standard_normal(_DRAWS) * spread / math.sqrt(n)
        error = np.hypot(error, spread * np.sqrt(draws.chisquare(n - 1, _DRAWS) / (n * (n - 1))))
    half = float(special.stdtrit(min(runs) - 1, 1 - alpha)) * error
    below, above = difference + half < margin, difference - half > -margin
    return float(np.mean(below if one_sided else below & above))


def runs_for_power(
    spreads: Sequence[float], margin: float, alpha: float, power: float = 0.8, *, one_sided: bool = False
) -> int | None:
    """Return the fewest runs of each arm, or pairs, at least 2, with which equal arms are found equivalent.

    They are found so with a probability of ``power``. None if 1,000 do not suffice.
    """

    def suffice(runs: int) -> bool:
        return power_of_equivalence(spreads, [runs] * len(spreads), margin, alpha, one_sided=one_sided) >= power

    return fewest(suffice)


def rounding_step(values: Sequence[float]) -> float:
    """Return the step, a power of ten, of which all values are multiples, as a log that rounds writes them; 0 if none.

    Only steps of 10^-8 and more count: values in FP32 or FP64 are no multiples of these.
    """
    finite = [value for value in values if math.isfinite(value)]
    for digits in range(9):
        if all(abs(value - round(value, digits)) <= 1e-12 * abs(value) for value in finite):
            return float(10.0**-digits)
    return 0.0
