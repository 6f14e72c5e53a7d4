"""Statistics of a comparison: confidence intervals, equivalence tests and power, of pairs and independent samples.

The numbers are usually differences of a metric between runs with the same seed. ``margin`` is the equivalence margin,
positive and in the metric's unit, ``level`` a confidence level and ``alpha`` the level of each one-sided test.
``rounding`` is the standard deviation of the rounding error of a value (`rounding_spread`); 0 for values that are exact
to floating-point precision.

The samples are one value for each run. Their spreads may differ. The degrees of freedom are those of the smaller
sample, n - 1: with Welch's, 12 % of the 95 % intervals of equal spreads exclude the true difference where one sample
has 2 values and the other 20, and never more than 5 % with these. So all tests are a little cautious.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy import special

from mptrain.study.comparison.results import Equivalence, Interval

#: Largest number of pairs that `pairs_for_power` considers.
MOST_PAIRS = 1_000

#: Tail probability of the distribution of an estimated standard error that is neglected.
_TAIL = 1e-13


def rounding_spread(*steps: float) -> float:
    """Return the standard deviation of the rounding error of a metric's value, or of a difference of two values.

    The error of rounding to multiples of a step is uniform over one step, so its variance is step^2 / 12. The
    variances of the two sides of a difference add up. A share of N samples has the step 1 / N, so a difference of two
    shares has the standard deviation 1 / (N sqrt(6)). There is one step for each value involved; 0 for a value that
    is not rounded.
    """
    return math.hypot(*steps) / math.sqrt(12)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values up to 1e300 and their standard deviation over n - 1, which is NaN for a single value.

    Deviations are first taken from one of the values. So equal values have exactly their mean and no spread, and no
    digits are lost where the spread is small; and no square overflows.
    """
    from_first = [value - values[0] for value in values]
    shift = sum(from_first) / len(values)
    spread = math.hypot(*(x - shift for x in from_first))
    return values[0] + shift, spread / math.sqrt(len(values) - 1) if len(values) > 1 else math.nan


def mean_interval(values: Sequence[float], level: float = 0.95, rounding: float = 0.0) -> Interval:
    """Return the mean of a normal sample with its confidence interval mean ± t(level, n - 1) s / sqrt(n).

    The interval is Student's (1908). A few rounded values are often equal, or nearly equal, by chance. Their observed
    standard deviation s is then far too small, and so is an interval from s alone: with two differences of an accuracy
    over 397 samples, 12 % of the 95 % intervals exclude a true difference of zero. So the variance of the rounding
    error is added to s^2. With many values s already contains the rounding error, and the interval is then slightly too
    wide, never too narrow: ``level`` is the lower bound of the coverage.

    For a single value, ends and spread are NaN. If all values are equal and not rounded, the interval is a point. The
    result's ``spread`` is the observed one, without the variance added for rounding. Raise ValueError if there is no
    value, or one is not finite.
    """
    _require_finite(values)
    mean, spread = mean_and_spread(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1, level)
    half = _student((1 + level) / 2, len(values) - 1) * math.hypot(spread, rounding) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, spread, len(values), level)


def improved(gains: Sequence[float], alpha: float = 0.05) -> bool:
    """Return whether runs have gained since their start, beyond chance (one-sided t test); True if that is unknown."""
    known = [gain for gain in gains if not math.isnan(gain)]
    if len(known) < 2 or not all(map(math.isfinite, known)):
        return not known or max(known) > 0
    return mean_interval(known, 1 - 2 * alpha).low > 0


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95) -> Interval:
    """Return the geometric mean of paired ratios, such as speed-ups, with its confidence interval.

    The interval is that of `mean_interval` for the logarithms, and so is its ``spread``. So a ratio and its inverse
    give the same result, and a pair that is slow in both arms has the same weight as others. Raise ValueError if the
    lengths differ, or a number is not positive.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    if any(not (above > 0 and below > 0) for above, below in pairs):
        raise ValueError("a ratio needs positive numbers")
    logs = mean_interval([math.log(above) - math.log(below) for above, below in pairs], level)
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.spread, logs.n, level)


def equivalence(differences: Sequence[float], margin: float, alpha: float = 0.05, rounding: float = 0.0) -> Equivalence:
    """Test whether the mean of paired differences is zero up to a margin, by two one-sided tests (Schuirmann 1987).

    Arms are equivalent if "below -margin" and "above +margin" are both rejected at ``alpha``, which is also the
    probability of a false "equivalent". This holds exactly if the 1 - 2 alpha confidence interval of the mean
    difference is within the margin. Tests, power and the number of pairs take rounding into account. All
    statistics are NaN for a single difference. Raise ValueError if there is no difference, one is not finite, or
    the margin is not positive.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"a margin must be positive, not {margin}")
    interval = mean_interval(differences, 1 - 2 * alpha, rounding)
    if interval.n == 1:
        return Equivalence(margin, math.nan, math.nan, math.nan, math.nan, None, alpha)
    spread = math.hypot(interval.spread, rounding)
    standard_error = spread / math.sqrt(interval.n)
    p_bootstrap = bootstrap_p(differences, margin, rounding) if looks_skewed(differences) else None
    return Equivalence(
        margin=margin,
        low=interval.low,
        high=interval.high,
        p=tost_p(interval.mean, standard_error, interval.n - 1, margin),
        power=tost_power(margin, standard_error, interval.n - 1, alpha),
        pairs_for_80=pairs_for_power(margin, spread, 0.8, alpha),
        alpha=alpha,
        p_bootstrap=p_bootstrap,
        unseen=unseen_share(interval.n),
    )


def unseen_share(n: int, level: float = 0.95) -> float:
    """Return the largest share of runs, 0 to 1, in which something may happen that none of n runs has shown.

    It is 1 - (1 - level)^(1/n), the exact one-sided bound of Clopper and Pearson (1934) for 0 of n: 0.78 for 2 runs,
    0.63 for 3, 0.45 for 5, 0.31 for 8. As the tolerance limit of Wilks (1941) it also bounds the share of pairs whose
    difference is larger than the largest of n. It holds for any distribution. The runs are independent.
    """
    return 1.0 - float((1 - level) ** (1 / n))


def looks_skewed(values: Sequence[float]) -> bool:
    """Return whether the skewness of values is beyond 1 in either direction, for which fewer than four never are.

    Skewness is the third standardized moment. A t test of a normal shape holds for any spread, but not for a long tail.
    """
    if (n := len(values)) < 4:
        return False
    mean, spread = mean_and_spread(values)
    if spread <= sys.float_info.epsilon * abs(mean):  # equal, but for rounding errors
        return False
    # The spread divides by n - 1, and the moments of a skewness by n.
    skewness = math.fsum(((value - mean) / spread) ** 3 for value in values) / n * math.sqrt(n / (n - 1)) ** 3
    return abs(skewness) > 1


def bootstrap_p(
    values: Sequence[float],
    margin: float,
    rounding: float = 0.0,
    side: int = 0,
    reference: Sequence[float] = (),
    rounding_of_reference: float = 0.0,
) -> float:
    """Return the p value of two one-sided bootstrap-t tests of a mean difference: the larger of both p values.

    ``values`` are differences of pairs, or with ``reference`` those of one of two independent samples. With ``side`` it
    is that of one test: 1 against "above margin", -1 against "below -margin". As `tost_p`, but the distribution of t is
    that of 9,999 resamples of each sample (Efron 1979), so it follows their skew. They are drawn from a fixed seed;
    those without spread are left out. Each sample has at least two finite values, not all of them equal in both.
    """
    draws = np.random.default_rng(0)
    samples = [(values, rounding), *([(reference, rounding_of_reference)] if reference else [])]
    centres, spreads = zip(*(mean_and_spread(some) for some, _ in samples), strict=True)
    # In units of a power of two near the spread, squares of values up to 1e300 do not overflow, and nothing is rounded.
    unit = math.ldexp(1.0, math.frexp(max(spreads))[1])
    shift, squares, error, sign = np.zeros(9_999), np.zeros(9_999), 0.0, 1
    for (some, rounded), centre in zip(samples, centres, strict=True):
        n, own = len(some), np.asarray([x - centre for x in some], np.float64) / unit
        drawn = draws.choice(own, (9_999, n))
        shift += sign * (drawn.mean(1) - own.mean())
        squares += (drawn.var(1, ddof=1) + (rounded / unit) ** 2) / n
        error, sign = error + (own.var(ddof=1) + (rounded / unit) ** 2) / n, -1
    t = shift[squares > 0] / np.sqrt(squares[squares > 0])
    mean = (centres[0] - (centres[1] if reference else 0.0)) / unit
    above, below = ((mean + by) / math.sqrt(error) for by in (margin / unit, -margin / unit))
    low, high = np.count_nonzero(t >= above), np.count_nonzero(t <= below)
    return float(1 + {0: max(low, high), 1: high, -1: low}[side]) / (1 + len(t))


def tost_p(difference: float, standard_error: float, df: int, margin: float) -> float:
    """Return the p value of two one-sided t tests (TOST) of a mean difference: the larger of both p values.

    The tests are against -margin and +margin. ``df`` are the degrees of freedom of the estimated standard error: number
    of pairs less one. Without spread, the result is 0 inside the margin and 1 outside.
    """
    if standard_error == 0:
        return 0.0 if abs(difference) < margin else 1.0
    return float(special.stdtr(df, (abs(difference) - margin) / standard_error))


def tost_power(margin: float, standard_error: float, df: int, alpha: float = 0.05, difference: float = 0.0) -> float:
    """Return the power of two one-sided tests (TOST): the probability that they find equivalence.

    Exact (Phillips 1990, who uses Owen's Q). Given the estimated standard error, the estimated difference is
    normal, and passes if it is inside the margin by at least t(1 - alpha, df) estimated standard errors. This
    probability is averaged over the chi distribution of the estimate. ``standard_error`` (0 or more) and
    ``difference`` are the true ones.
    """
    if standard_error == 0:
        return float(abs(difference) < margin)
    t, bound, shift = _student(1 - alpha, df), margin / standard_error, difference / standard_error
    from scipy import integrate, stats  # takes half a second to import, and sweeps do not need it

    ratio = stats.chi(df, scale=1 / math.sqrt(df))  # distribution of estimated over true standard error
    # From bound / t on, the estimated spread leaves no room inside the margin.
    low, high = float(ratio.ppf(_TAIL)), min(bound / t, float(ratio.isf(_TAIL)))
    if high <= low:
        return 0.0

    def passes(estimated: float) -> float:
        room = bound - t * estimated
        return float((special.ndtr(room - shift) - special.ndtr(-room - shift)) * ratio.pdf(estimated))

    power, _ = integrate.quad(passes, low, high, limit=200)
    return min(1.0, max(0.0, float(power)))


def pairs_for_power(
    margin: float, spread: float, power: float = 0.8, alpha: float = 0.05, most: int = MOST_PAIRS
) -> int | None:
    """Return the fewest pairs of runs, at least 2, with which an equivalence test of equal arms has a power.

    ``spread`` is the true standard deviation of the paired differences, 0 or more. None if ``most`` pairs
    do not suffice.
    """
    return fewest(lambda pairs: tost_power(margin, spread / math.sqrt(pairs), pairs - 1, alpha) >= power, most)


def fewest(enough: Callable[[int], bool], most: int = MOST_PAIRS) -> int | None:
    """Return the smallest number, at least 2, that is enough, as all above it are; None if ``most`` is not."""
    low, high = 1, 2  # double high until it suffices, then bisect (low, high]
    while not enough(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=1024)
def _student(quantile: float, df: int) -> float:
    return float(special.stdtrit(df, quantile))


def _require_finite(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("there is no value")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"not all of {list(values)} are finite")


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
    errors = (math.hypot(*both) / math.sqrt(len(x)) for x, *both in zip(samples, spreads, rounding, strict=False))
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
