"""Bounds that a sample puts on the whole it was drawn from, with 95 % confidence. Nothing here imports torch.

The distributions are scipy's, imported when a bound is asked for: a run that only trains never is.
"""

from __future__ import annotations

import math
from typing import Final

#: The share of steps that may lie beyond a bound.
MOST: Final = 0.01

#: The confidence of a bound.
CONFIDENCE: Final = 0.95

#: The least number of steps, none of them beyond a bound, that shows with `CONFIDENCE` that fewer than `MOST` are: 299.
FEWEST: Final = math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - MOST))


def tolerance_factor(samples: int) -> float:
    """Return k of the one-sided normal tolerance limit: ``mean - k * deviation`` lies below 99 % of all values.

    Of normal values, with 95 % confidence (NIST/SEMATECH e-Handbook, 7.2.6.3; ISO 16269-6): 10.6 for 3 samples, 3.98 for
    10, 3.06 for 30, and 2.33 for all there are.

    Args:
        samples: How many values mean and standard deviation are of; at least 2.
    """
    from scipy import special

    root = math.sqrt(samples)
    return float(special.nctdtrit(samples - 1, root * special.ndtri(1 - MOST), CONFIDENCE)) / root


def limit_factor() -> float:
    """Return what `tolerance_factor` becomes for ever more samples."""
    from scipy import special

    return float(special.ndtri(1 - MOST))


def largest_share(found: int, samples: int) -> float:
    """Return the largest share that so many cases among so many samples are compatible with (Clopper and Pearson, 1934).

    Without a case it is 1 - 0.05^(1/samples), nearly 3/samples: the rule of three. So less than 1 % takes 299 samples
    without a case, 473 with one.
    """
    from scipy import special

    return 1.0 if found >= samples else float(special.betaincinv(found + 1, samples - found, CONFIDENCE))
