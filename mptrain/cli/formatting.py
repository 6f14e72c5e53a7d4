"""Formatting of durations, loss scales, rates and metrics for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format a number of seconds as a duration: ``0:42``, ``12:05``, ``3:00:10``; ``-`` if negative or not finite."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, seconds_left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def scale(value: float) -> str:
    """Format a loss scale: ``65536``, ``0.5``; whole numbers have no fraction."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and value < 1e15 else f"{value:.6g}"


def scale_with_power(value: float) -> str:
    """Format a loss scale, with its exponent if it is a power of two: ``65536 (2^16)``."""
    mantissa, exponent = math.frexp(value)
    return f"{scale(value)} (2^{exponent - 1})" if mantissa == 0.5 else scale(value)


def rate(value: float) -> str:
    """Format a rate such as samples per second: three significant digits below 100, else ``12,345``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """Format a share from 0 to 1 as a percentage, with two significant digits below 10 %: ``12 %``, ``0.4 %``."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.2g} %"


def metrics(values: Mapping[str, float]) -> str:
    """Format the values of metrics by name on one line, the loss last: ``top1 0.9673  loss 0.1042``."""
    return "  ".join(f"{name} {values[name]:.4f}" for name in metric_order(values))


def metric_order(values: Mapping[str, float]) -> list[str]:
    """Return the names of metrics in display order: the loss last, all others as they are."""
    return sorted(values, key=lambda name: name == "loss")


def scale_sparkline(scales: Sequence[float], width: int) -> str:
    """Draw a series of loss scales as a sparkline (``▁▂▄█``) on a logarithmic axis.

    Args:
        scales: Loss scales in order; only positive, finite ones are drawn.
        width: Maximum number of characters.
    """
    return sparkline(
        [math.log2(value) for value in scales if value > 0 and math.isfinite(value)], width, least_span=1.0
    )


def sparkline(values: Sequence[float], width: int, least_span: float = 0.0) -> str:
    """Draw a series of values as a sparkline (``▁▂▄█``); values that are not finite are left out.

    Args:
        values: Values in order.
        width: Maximum number of characters; longer series are sampled evenly.
        least_span: Minimum range of the vertical axis.
    """
    shown = [value for value in values if math.isfinite(value)]
    if not shown:
        return ""
    if len(shown) > width:
        shown = [shown[index * (len(shown) - 1) // (width - 1)] for index in range(width)]
    low = min(shown)
    span = max(max(shown) - low, least_span) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in shown)
