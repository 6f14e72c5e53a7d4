"""A forecast in words and as a table: which static scales are right for a run, and why the others are not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from mptrain.numerics.forecast import EXPONENTS, MARGIN, MOST_TAKEN, Forecast
from mptrain.report.forecast_figure import forecast_figure
from mptrain.report.page import Cell, Plot, Table, table
from mptrain.report.wording import ONE_BECOMES_ALL, counted, elided, number, share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mptrain.report.measured import Measured, MeasuredRun

#: Letters of a module's name.
_NAME = 36

#: The rule of a constant scale.
_STATIC: Final = "mptrain.scaler.StaticScaler"

#: What is lost below this share is not worth a name.
_LITTLE = 1e-4


def power(exponent: int) -> str:
    """A scale, with its value in digits where those are short: ``2^7 (128)``."""
    return f"2^{exponent}" if exponent > 13 else f"2^{exponent} ({2**exponent:,})"


def scale_words(settings: Mapping[str, Any], learner: str = "") -> str:
    """What gives a run like this one a static scale, up to the number: ``precision=fp16_static scaler.scale=``.

    Args:
        settings: The configuration of the run, dotted key to value.
        learner: Whose scale it is; empty where the run has only one learner.
    """
    own = f"learners.{learner}.scaler" if learner else "scaler"
    if settings.get("precision.compute") != "float16":
        first = "precision=fp16_static "
    else:
        rule = settings.get(f"{own}._target_") or settings.get("scaler._target_")
        first = "" if rule == _STATIC else "scaler=static "
    return f"{first}{own}.scale="


def recommendation(forecast: Forecast, words: str) -> str:
    """The one sentence to read.

    Args:
        forecast: Of a learner.
        words: Those that choose its scale; see `scale_words`.
    """
    if not forecast.looks:
        return (
            "Nothing is known of any scale: the looks at this run have no gradients, or carry a loss scale that is 0 or not "
            "finite."
        )
    if forecast.largest is None:
        return "Every step that was looked at overflowed, so nothing is known of smaller scales."
    if not forecast.scales:
        return "No gradient was seen that is not zero, so any static scale is right."
    if forecast.recommended is None:
        return "Gradients overflow FP16 even without a loss scale: no static scale from 1 on is right."
    word = f"{words}{2**forecast.recommended}"
    if not forecast.has_range:
        return (
            f"No static scale is right at every step: dynamic scaling follows them. The largest that overflows nowhere "
            f"is 2^{forecast.highest}, and {word} the one to try."
        )
    if forecast.lowest == forecast.highest:
        return f"The one static scale that is right at every step is {power(forecast.recommended)}: {word}."
    return (
        f"Recommended static loss scale: {power(forecast.recommended)}, {word}. Right at every step are "
        f"{power(forecast.lowest or 0)} to {power(forecast.highest or 0)}."
    )


def reasons(forecast: Forecast) -> list[str]:
    """Why the edges are where they are, and what to mind, in sentences."""
    said = []
    if forecast.scales:
        said += [*_below(forecast), *_above(forecast)]
    if forecast.unusable:
        said.append(
            f"{counted(forecast.unusable, 'look')} left out: at a loss scale that is 0 or not finite, or without gradients."
        )
    if not forecast.looks:
        return said
    overflowed = sum(math.isinf(look.largest) for look in forecast.looks)
    looked = f"{counted(len(forecast.looks), 'step')} looked at"
    between = (
        f", the others by their gradient norms: {forecast.steps:,} steps in all" if _knows_between(forecast) else ""
    )
    said.append(f"This rests on {looked}{between}. Another seed or a longer run has another largest gradient.")
    if len([look for look in forecast.looks if look.taken]) < 2:
        said.append("One look says little: train with a smaller diagnostics.every.")
    if overflowed:
        said.append(
            f"{counted(overflowed, 'step')} looked at overflowed at the run's own scale; what smaller scales do there is "
            "not known."
        )
    if forecast.smallest_seen:
        said.append(_cut_off(forecast))
    return said


def _below(forecast: Forecast) -> list[str]:
    if not forecast.lowest:
        least = f"more than {share(MOST_TAKEN)} of its gradient's magnitude."
        if forecast.lowest == 0:
            return [f"Even without a scale no module loses {least}"]
        return [f"At every scale up to 2^{EXPONENTS[-1]} {_module(forecast.scales[-1].taken.name)} loses {least}"]
    worse = forecast.scales[forecast.lowest - 1]
    return [
        f"Below {power(forecast.lowest)} gradients underflow: at {power(forecast.lowest - 1)} {_module(worse.taken.name)} "
        f"loses {share(worse.taken.share)} of its gradient's magnitude at step {worse.taken.step:,}; more than "
        f"{share(MOST_TAKEN)} counts as too much."
    ]


def _above(forecast: Forecast) -> list[str]:
    largest, highest = forecast.largest, forecast.highest
    if largest is None or highest is None:
        return []
    what = f"the largest gradient seen is {number(largest.largest)} ({_name(largest.where)}, step {largest.step:,})"
    if highest == EXPONENTS[-1]:
        return [f"Nothing overflows up to {power(highest)}: {what}."]
    over = forecast.scales[highest + 1]
    said = [
        f"Above {power(highest)} gradients overflow: {what}, and at {power(highest + 1)}, "
        f"{share(over.overflow_share)} of the steps are expected to."
    ]
    said.append(f"{ONE_BECOMES_ALL[0].upper()}{ONE_BECOMES_ALL[1:]}.")
    if forecast.recommended is not None and highest - forecast.recommended < MARGIN:
        said.append(
            f"The recommended scale is less than {2**MARGIN} times below the upper edge, since smaller ones lose too "
            "much: some updates may be skipped."
        )
    return said


def _knows_between(forecast: Forecast) -> bool:
    return forecast.steps > len(forecast.looks)


def _cut_off(forecast: Forecast) -> str:
    seen = f"Gradients were seen in FP16 only: none below {number(forecast.smallest_seen)} could be"
    if forecast.at_smallest <= MOST_TAKEN:
        return f"{seen}, and hardly any were near it."
    return (
        f"{seen}, and in some module {share(forecast.at_smallest)} of them stand there, so smaller ones were lost before "
        "they could be counted: the lower edge may lie higher. Histograms of a run with precision=fp32 would tell."
    )


def forecast_table(forecast: Forecast, measured: Measured | None = None) -> Table:
    """A row for each scale.

    Args:
        forecast: With scales.
        measured: What a sweep found at some of them.
    """
    kinds = list(measured.kinds) if measured else []
    rows: list[list[Cell | str]] = []
    for each in forecast.scales:
        row: list[Cell | str] = [
            f"2^{each.exponent}",
            _mark(forecast, each.exponent),
            _rounded(each.lost),
            _rounded(each.worst_lost.share),
            Cell(_rounded(each.taken.share), "bad" if each.taken.share > MOST_TAKEN else ""),
            _name(each.taken.name) if each.taken.share >= _LITTLE else "",
            _rounded(each.weights_lost),
            _rounded(each.subnormal),
            _rounded(each.overflow_share),
        ]
        for kind in kinds:
            row += _found(measured.at(kind, each.exponent)) if measured else []
        rows.append(row)
    head = ["scale", "", "lost", "worst", "magnitude", "in module", "weights", "subnormal", "overflow"]
    for kind in kinds:
        of = f", {elided(kind, _NAME)}" if kind else ""
        head += [f"{measured.metric if measured else ''}{of}", f"skipped{of}"]
    numeric = (2, 3, 4, 6, 7, *range(8, len(head)))
    return table(tuple(head), rows, numeric=numeric, note=_legend(measured))


def _legend(measured: Measured | None) -> str:
    """What the columns are."""
    said = (
        "Lost: activation gradients, other than zero, that FP16 rounds to zero, of all modules together; worst: of the module "
        "that loses most of them. Magnitude: what that takes of the sum of |x| of one module at one step, where it is most; more "
        f"than {share(MOST_TAKEN)} is too much. Weights: parameters' gradients that are lost. Subnormal: gradients with fewer "
        "bits. Overflow: steps at which something does."
    )
    if measured is None:
        return said
    said += f" {measured.metric} and skipped: what the sweep measured"
    several = any(len({run.exponent for run in runs}) < len(runs) for runs in measured.kinds.values())
    return f"{said}, means of n runs." if several else f"{said}."


def _mark(forecast: Forecast, exponent: int) -> Cell:
    if exponent == forecast.recommended:
        return Cell("recommended", "good")
    low, high = forecast.lowest, forecast.highest
    if low is not None and high is not None and low <= exponent <= high:
        return Cell("right", "good")
    if low is None or exponent < low:
        return Cell("underflow" if high is None or exponent <= high else "both", "bad")
    return Cell("overflow", "bad")


def _rounded(value: float) -> str:
    return share(value) if value >= _LITTLE or value == 0 else "< 0.01 %"


def _name(name: str) -> str:
    return elided(name, _NAME) or "the whole model"


def _module(name: str) -> str:
    return f"module {elided(name, _NAME)}" if name else "the whole model"


def _found(runs: list[MeasuredRun]) -> list[Cell | str]:
    values = [run.metric for run in runs if run.metric is not None]
    skipped = [run.skipped for run in runs if run.skipped is not None]
    failed = sum(run.failed for run in runs)
    metric = number(math.fsum(values) / len(values)) if values else ""
    if len(values) > 1:
        metric += f" (n={len(values)})"
    lost = f"{failed} of {len(runs)} failed" if failed else ""
    return [
        Cell(", ".join(filter(None, (metric, lost))), "bad" if failed else ""),
        share(math.fsum(skipped) / len(skipped)) if skipped else "",
    ]


def forecast_plot(name: str, forecast: Forecast, whose: str = "", measured: Measured | None = None) -> Plot | None:
    """The figure of a forecast; None where there is nothing to draw."""
    if not forecast.scales:
        return None
    caption = (
        f"What every static loss scale would do{whose}, from {counted(len(forecast.looks), 'look')}: the share of the "
        "activation gradients that FP16 rounds to zero, what the worst module loses of its magnitude, and the share of "
        "steps that overflow."
    )
    if forecast.recommended is not None:
        caption += f" Recommended: {power(forecast.recommended)}."
    if measured:
        failed = any(run.failed for runs in measured.kinds.values() for run in runs)
        crosses = "; a cross marks runs that failed" if failed else ""
        caption += f" Below: {measured.metric} and skipped updates of a sweep, a dot for each run{crosses}."
    return Plot(name, caption, forecast_figure(name, forecast, measured))
