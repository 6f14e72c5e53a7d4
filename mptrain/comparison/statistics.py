"""The statistics of a comparison: intervals, equivalence tests and their power. Pure functions of plain numbers.

Knows nothing of runs and arms. The distributions and the integration are scipy's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

from scipy import special

from mptrain.comparison.results import Equivalence, Interval

#: More pairs than anybody trains; `pairs_for_power` looks no further.
MOST_PAIRS = 1_000

#: Quantile beyond which the distribution of an estimated standard error counts as nothing.
_TAIL = 1e-13


def rounding_spread(*steps: float) -> float:
    """The standard deviation that rounding alone gives a value, or a difference of two.

    An error of rounding to multiples of a step is uniform over one step, so its variance is step^2 / 12; those of the two
    sides of a difference add up. A share of N samples has the step 1 / N: a difference of two has 1 / (N sqrt(6)).

    Args:
        steps: Of each value that enters; 0 for one that is not rounded.
    """
    return math.hypot(*steps) / math.sqrt(12)


def mean_interval(values: Sequence[float], level: float = 0.95, rounding: float = 0.0) -> Interval:
    """The mean of a normal sample with its confidence interval (Student 1908): mean ± t(level, n - 1) s / sqrt(n).

    Of rounded values, few are often equal, or nearly, by chance. Their observed spread s then says little of the true one,
    and an interval from it alone is too short by far: of two differences of an accuracy over 397 samples, 12 in 100
    exclude a true difference of zero. So the spread of the rounding is added to it, as variances add. It is part of s
    already where there are many values, which are then taken to vary by a little more than they do: never by less.

    Args:
        values: At least one; finite. Of one alone there is no interval, and ends and spread are NaN. If all are equal, and
            not rounded, the interval is a point.
        level: How often, 0 to 1, intervals made like this contain the true mean, at least.
        rounding: Standard deviation of the rounding of a value; see `rounding_spread`. 0 where values are as exact as
            floating point.

    Returns:
        Its spread is the observed one, without what is added for rounding.

    Raises:
        ValueError: There is no value, or one is not finite.
    """
    _require_finite(values)
    mean = float(statistics.mean(values))  # exact, as the spread: of equal values it is that value
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1, level)
    spread = float(statistics.stdev(values))
    half = _student((1 + level) / 2, len(values) - 1) * math.hypot(spread, rounding) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, spread, len(values), level)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95) -> Interval:
    """The geometric mean of paired ratios with its interval: `mean_interval` of their logarithms, taken back.

    So a ratio and its inverse say the same, and a pair that is slow in both counts as any other.

    Args:
        numerators: Positive, at least one.
        denominators: Positive, as many, in the same order.
        level: As for `mean_interval`.

    Returns:
        The spread is that of the logarithms.

    Raises:
        ValueError: The lengths differ, or a number is not positive.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    if any(not (above > 0 and below > 0) for above, below in pairs):
        raise ValueError("a ratio needs positive numbers")
    found = mean_interval([math.log(above) - math.log(below) for above, below in pairs], level)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.spread, found.n, level)


def equivalence(differences: Sequence[float], margin: float, alpha: float = 0.05, rounding: float = 0.0) -> Equivalence:
    """Two one-sided tests of paired differences (Schuirmann 1987).

    Arms are equivalent if "below -margin" and "above +margin" are both rejected at ``alpha``, which is so exactly if the
    1 - 2 alpha interval of the mean difference lies within the margin.

    Args:
        differences: Paired, at least one; finite.
        margin: Largest difference that counts as none; positive.
        alpha: Level of each of the two tests; also the probability of a false "equivalent".
        rounding: Of each difference; see `mean_interval`. Tests, power and the number of pairs take it into account.

    Raises:
        ValueError: There is no difference, one is not finite, or the margin is not positive.
    """
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"a margin must be positive, not {margin}")
    found = mean_interval(differences, 1 - 2 * alpha, rounding)
    if found.n == 1:
        return Equivalence(margin, math.nan, math.nan, math.nan, math.nan, None, alpha)
    spread = math.hypot(found.spread, rounding)
    standard_error = spread / math.sqrt(found.n)
    return Equivalence(
        margin=margin,
        low=found.low,
        high=found.high,
        p=tost_p(found.mean, standard_error, found.n - 1, margin),
        power=tost_power(margin, standard_error, found.n - 1, alpha),
        pairs_for_80=pairs_for_power(margin, spread, 0.8, alpha),
        alpha=alpha,
    )


def tost_p(difference: float, standard_error: float, df: int, margin: float) -> float:
    """The larger p value of the two one-sided t tests of a difference against -margin and +margin.

    Without any spread it is 0 inside the margin and 1 elsewhere.
    """
    if standard_error == 0:
        return 0.0 if abs(difference) < margin else 1.0
    return float(special.stdtr(df, (abs(difference) - margin) / standard_error))


def tost_power(margin: float, standard_error: float, df: int, alpha: float = 0.05, difference: float = 0.0) -> float:
    """The probability that two one-sided tests find equivalence.

    Exact (Phillips 1990, there by Owen's Q): given the estimated standard error, the estimated difference is normal and
    passes where it is at least t(1 - alpha, df) of them inside the margin; that probability is averaged over the chi
    distribution of the estimate.

    Args:
        margin: Of equivalence; positive.
        standard_error: The true one, of the mean difference; 0 or more.
        df: Degrees of freedom of its estimate.
        alpha: Level of each test.
        difference: The true one.
    """
    if standard_error == 0:
        return float(abs(difference) < margin)
    t, bound, shift = _student(1 - alpha, df), margin / standard_error, difference / standard_error
    from scipy import integrate, stats  # half a second to import, and the intervals of a sweep need neither

    ratio = stats.chi(df, scale=1 / math.sqrt(df))  # of the estimated standard error to the true one
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
    """The fewest pairs, at least 2, with which equivalence is found with a probability if there is no difference at all.

    Args:
        margin: Of equivalence; positive.
        spread: True standard deviation of the paired differences; 0 or more.
        power: The probability wanted.
        alpha: Level of each test.
        most: Look no further.

    Returns:
        None if ``most`` pairs do not reach it.
    """

    def enough(pairs: int) -> bool:
        return tost_power(margin, spread / math.sqrt(pairs), pairs - 1, alpha) >= power

    low, high = 1, 2  # power grows with the pairs: double, then halve the interval (low, high] in which it suffices
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
    """Quantile of Student's t distribution."""
    return float(special.stdtrit(df, quantile))


def _require_finite(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("there is no value")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"not all of {list(values)} are finite")
