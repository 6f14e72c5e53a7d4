"""Numbers as a reader at a terminal wants them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:00:10``; ``-`` for what is not known yet."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, seconds_left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def scale(value: float) -> str:
    """A loss scale: whole numbers without a fraction."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and value < 1e15 else f"{value:.6g}"


def scale_with_power(value: float) -> str:
    """``65536 (2^16)`` where the scale is a power of two."""
    mantissa, exponent = math.frexp(value)
    return f"{scale(value)} (2^{exponent - 1})" if mantissa == 0.5 else scale(value)


def rate(value: float) -> str:
    """Samples a second: three significant figures below a thousand, thousands with a comma above."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """A share as per cent, with enough digits for a small one: ``12 %``, ``0.4 %``."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.2g} %"


def metrics(values: Mapping[str, float]) -> str:
    """Metrics side by side, the loss last: ``top1 0.9673  loss 0.1042``."""
    return "  ".join(f"{name} {values[name]:.4f}" for name in metric_order(values))


def metric_order(values: Mapping[str, float]) -> list[str]:
    """Return the names of metrics as they are shown: the loss last."""
    return sorted(values, key=lambda name: name == "loss")


def scale_sparkline(scales: Sequence[float], width: int) -> str:
    """Return a line of at most ``width`` small bars: loss scales from first to last, on a logarithmic axis."""
    return sparkline(
        [math.log2(value) for value in scales if value > 0 and math.isfinite(value)], width, least_span=1.0
    )


def sparkline(values: Sequence[float], width: int, least_span: float = 0.0) -> str:
    """Return a line of at most ``width`` small bars: the finite values from first to last.

    Args:
        values: From first to last.
        width: Bars at most.
        least_span: Values that differ by less do not fill the height.
    """
    shown = [value for value in values if math.isfinite(value)]
    if not shown:
        return ""
    if len(shown) > width:
        shown = [shown[index * (len(shown) - 1) // (width - 1)] for index in range(width)]
    low = min(shown)
    span = max(max(shown) - low, least_span) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in shown)
