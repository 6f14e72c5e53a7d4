"""Numbers and outside text as a reader of a report wants them. Knows nothing of HTML and Markdown."""

from __future__ import annotations

import math
from typing import Final

from mptrain.numerics.formats import scale_in_words

MINUS: Final = "\u2212"
TIMES: Final = "\u00d7"
#: Where there is no number.
UNKNOWN: Final = "\u2013"
#: What to mind wherever a static scale is said to overflow at some steps.
ONE_BECOMES_ALL: Final = (
    "under a static scale one overflow can become all: a skipped update leaves the weights where they are, and there they "
    "meet the same gradients again"
)


def plain(text: object, *, lines: bool = False) -> str:
    r"""Text from outside as something that can only be read: nothing in it controls what shows it.

    Control characters, marks of writing direction and lone surrogates become escapes such as ``\u202e``.

    Args:
        text: Anything; its ``str``.
        lines: Keep line ends and tabs; otherwise all white space becomes single blanks.
    """
    raw = str(text)
    raw = raw.replace("\r\n", "\n") if lines else " ".join(raw.split())
    kept = "\n\t" if lines else ""
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode() for letter in raw
    )


def elided(text: object, most: int) -> str:
    """One line of at most ``most`` characters; what is left out in its middle is shown by an ellipsis."""
    whole = plain(text)
    if len(whole) <= most:
        return whole
    head = (most - 1) * 2 // 3
    return f"{whole[:head]}…{whole[len(whole) - (most - 1 - head) :]}"


def number(value: float | None, error: float | None = None) -> str:
    """A measured number.

    Args:
        value: The number; None where there is none.
        error: Its uncertainty, which then decides on the decimals; otherwise four significant digits.
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
    """A difference: as `number`, always with its sign."""
    text = number(value, error)
    return text if text.startswith(MINUS) or text == UNKNOWN or float(value) == 0 else f"+{text}"


def share(value: float | None) -> str:
    """A share as per cent, with enough digits for a small one: ``12 %``, ``0.4 %``, ``0``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    percent = 100 * value
    if percent == 0:
        return "0"
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def rate(value: float | None) -> str:
    """So many a second: three significant digits below a hundred, whole numbers above."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """``0:42``, ``12:05``, ``3:00:10``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def scale(value: float | None) -> str:
    """A loss scale: ``128``, ``1000``, and from 1,024 on powers of two as ``2^16``."""
    return UNKNOWN if value is None else scale_in_words(value)


def scale_path(path: dict[str, float]) -> str:
    """Return how a loss scale went, from ``first``, ``min``, ``max`` and ``last``; empty where that is not known."""
    if not {"first", "min", "max", "last"} <= path.keys():
        return ""
    if path["min"] == path["max"]:
        return scale(path["last"])
    said = f"{scale(path['first'])} to {scale(path['last'])}"
    if {path["first"], path["last"]} == {path["min"], path["max"]}:
        return said
    return f"{said}, between {scale(path['min'])} and {scale(path['max'])}"


def counted(count: int, one: str, many: str = "") -> str:
    """``1 run``, ``12 runs``, ``no runs``."""
    many = many or f"{one}s"
    return f"no {many}" if count == 0 else f"{count:,} {one if count == 1 else many}"


def moment(iso: str) -> str:
    """A UTC time of ``run.json`` to the second; anything else as it is."""
    date, separator, rest = iso.partition("T")
    return f"{date} {rest[:8]} UTC" if separator and iso.endswith("+00:00") else iso
