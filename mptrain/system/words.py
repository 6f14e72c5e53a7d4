"""Numbers, counts, durations, lists and untrusted text in words, for reports, messages and the terminal alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

MINUS: Final = "\u2212"
TIMES: Final = "\u00d7"
#: Shown in place of a missing number.
UNKNOWN: Final = "\u2013"

#: Signs that a keyboard lacks, for `str.translate` of text that is searched and copied.
KEYBOARD: Final = str.maketrans({MINUS: "-", TIMES: "x", UNKNOWN: "-"})


def plain(text: object, *, lines: bool = False) -> str:
    r"""Return untrusted text (``str`` of any object) without characters that could control a terminal or a page.

    Control characters, text direction marks and lone surrogates are replaced with escapes such as ``\u202e``. ``lines``
    keeps line ends and tabs. Otherwise each run of whitespace becomes one space.
    """
    raw = str(text)
    raw = raw.replace("\r\n", "\n") if lines else " ".join(raw.split())
    kept = "\n\t" if lines else ""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode() for letter in raw
    )


def elided(text: object, most: int) -> str:
    """Return `plain` text as one line of at most ``most`` characters, with an ellipsis for an omitted middle."""
    whole = plain(text)
    if len(whole) <= most:
        return whole
    head = (most - 1) * 2 // 3
    return f"{whole[:head]}…{whole[len(whole) - (most - 1 - head) :]}"


def number(value: float | None, error: float | None = None) -> str:
    """Format a measured number for a report: ``0.9184``, ``12,345``, ``∞``; a dash if there is none.

    The uncertainty ``error`` sets the number of decimals. Without it, four significant digits are shown.
    """
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return f"{MINUS}∞" if value < 0 else "∞"
    if error is not None and math.isfinite(error) and error > 0:
        decimals = min(max(1 - math.floor(math.log10(error)), 0), 8)
        text = f"{value:,.{decimals}f}"
    elif value == 0:
        text = "0"
    elif 1e-4 <= abs(value) < 1e6:
        decimals = max(3 - math.floor(math.log10(abs(value))), 0)
        text = f"{value:,.{decimals}f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", MINUS)


def signed(value: float, error: float | None = None) -> str:
    """Format a difference like `number`, with its sign, also if it is positive; zero has none."""
    text = number(value, error)
    return text if text.startswith(MINUS) or text == UNKNOWN or float(value) == 0 else f"+{text}"


def share(value: float | None) -> str:
    """Format a fraction from 0 to 1 as a percentage: ``12 %``, ``0.4 %``, ``0``; a dash if None or not finite."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def percent(value: float, decimals: int = 0) -> str:
    """Format a fraction from 0 to 1 in per cent, whole or with as many decimals as are given: ``95 %``, ``94.97 %``."""
    return f"{100 * value:.{decimals}f} %"


def confidence(level: float) -> str:
    """Format the level of a confidence interval or of a test with its digits: ``95 %``, ``97.5 %``, ``98.3333 %``."""
    return f"{100 * level:.6g} %"


def rate(value: float | None) -> str:
    """Format a rate per second without its unit: three significant digits below 100, whole numbers from there on."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Format a duration in seconds as minutes and seconds, or with hours: ``0:42``, ``12:05``, ``3:00:10``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def scale(value: float | None) -> str:
    """Format a loss scale: ``128``, ``1000``, and powers of two from 1,024 on as ``2^16``; a dash for None."""
    return UNKNOWN if value is None else scale_in_words(value)


def scale_path(path: dict[str, float]) -> str:
    """Describe the course of a run's loss scale in words: ``2^24 to 2^15, between 2^14 and 2^24``.

    The result is empty if ``first``, ``min``, ``max`` or ``last`` is missing.
    """
    if not {"first", "min", "max", "last"} <= path.keys():
        return ""
    if path["min"] == path["max"]:
        return scale(path["last"])
    course = f"{scale(path['first'])} to {scale(path['last'])}"
    if {path["first"], path["last"]} == {path["min"], path["max"]}:
        return course
    return f"{course}, between {scale(path['min'])} and {scale(path['max'])}"


def digits(scale: float) -> str:
    """Format a loss scale with all digits: ``65536``, ``0.5``; whole numbers have no fraction."""
    return f"{scale:.0f}" if math.isfinite(scale) and scale == int(scale) and scale < 1e15 else f"{scale:.6g}"


def metrics(values: Mapping[str, float]) -> str:
    """Format the values of metrics by name on one line, the loss last: ``top1 0.9673  loss 0.1042``."""
    return "  ".join(f"{name} {values[name]:.4f}" for name in metric_order(values))


def metric_order(values: Mapping[str, float]) -> list[str]:
    """Return the names of metrics in display order: the loss last, all others as they are."""
    return sorted(values, key=lambda name: name == "loss")


def listed(names: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Join texts; of more than ``most``, the first ones, and the number of the others: ``a, b, c and 4 more``."""
    shown, left = separator.join(names[:most]), len(names) - most
    return f"{shown}{' and' if separator == ', ' else f'{separator}and'} {left:,} more" if left > 0 else shown


def counted(count: int, singular: str, many: str = "") -> str:
    """Format a count with its noun: ``1 run``, ``12 runs``, ``no runs``."""
    many = many or f"{singular}s"
    return f"no {many}" if count == 0 else f"{count:,} {singular if count == 1 else many}"


def of_seeds(numbers: Iterable[int]) -> str:
    """Return the numbers of seeds in ascending order with the noun: ``seed 3``, ``seeds 1, 2``."""
    shown = [str(number) for number in sorted(numbers)]
    return f"seed{'s' * (len(shown) > 1)} {', '.join(shown)}"


def moment(iso: str) -> str:
    """Format a UTC time in ISO 8601 to the second: ``2025-01-31 12:05:42 UTC``. Other text is returned unchanged."""
    date, separator, rest = iso.partition("T")
    return f"{date} {rest[:8]} UTC" if separator and iso.endswith("+00:00") else iso


def scale_in_words(scale: float) -> str:
    """Format a loss scale as text: ``8``, ``1000``, and powers of two from 1024 on as ``2^16``."""
    if scale >= 1024 and is_power_of_two(scale):
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:g}"


def is_power_of_two(value: float) -> bool:
    """Return whether a value is a power of two, so that scaling by it only changes exponents and is exact."""
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5
