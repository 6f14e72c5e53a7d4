"""Sentences, table and figure in a report that recommend a static FP16 loss scale, from a run's gradient histograms.

The figure has underflow on the left, overflow on the right, and the measurements of a sweep in the panels below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator

from mptrain.numerics.exponents import TINIEST
from mptrain.numerics.forecast import MARGIN, MOST_TAKEN, Forecast
from mptrain.numerics.overflow_limits import CONFIDENCE, EXPONENTS, FEWEST, MOST
from mptrain.report import plotting
from mptrain.report.page import Cell, Plot, Table, table
from mptrain.report.run_blocks import OpenedRun, fp32_run, histogram_words, is_watched, scale_words
from mptrain.system.words import counted, elided, listed, number, percent, share

#: Maximum characters of a module's name.
_NAME = 36

#: The confidence of a bound, in words.
_SURE: Final = f"{percent(CONFIDENCE)} confidence"

#: Maximum number of modules that are named.
_MODULES = 20

#: First scale of dynamic scalers by default, torch's too.
_FIRST: Final = 65536

#: Number of sampled steps that is usually enough to recommend a scale.
_ENOUGH: Final = 30

#: Lost share from which the table names the module.
_LITTLE = 1e-4

#: Warning shown wherever a static scale overflows at some steps.
ONE_BECOMES_ALL: Final = (
    "with a static scale, one overflow can become an overflow at every step: a skipped update leaves the weights "
    "unchanged, so later steps can compute the same gradients again"
)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Result of one run with a static loss scale, from a sweep over scales.

    Attributes:
        exponent: log2 of its loss scale.
        metric: Its final metric; None if it has none.
        skipped: The share of skipped steps, 0 to 1; None if no step is recorded.
        failed: Whether it ended without a metric.
    """

    exponent: float
    metric: float | None
    skipped: float | None
    failed: bool


@dataclass(frozen=True)
class MeasuredScales:
    """Results of a sweep over static loss scales, in FP16 or under autocast, which are compared with a forecast.

    Attributes:
        kinds: Runs by the other varied keys, except the seed. The name is empty if there are none.
        configs: The resolved configurations of the runs, YAML text.
    """

    metric: str
    kinds: dict[str, tuple[MeasuredRun, ...]]
    configs: tuple[str, ...] = ()

    def at(self, kind: str, exponent: int) -> list[MeasuredRun]:
        """Return the runs of one kind (one combination of the other keys) with the loss scale 2^exponent."""
        return [run for run in self.kinds[kind] if run.exponent == exponent]


def power(exponent: int) -> str:
    """Format a loss scale of 2^exponent as text: ``2^7 (128)``, or ``2^14`` without the digits if they are long."""
    return f"2^{exponent}" if exponent > 13 else f"2^{exponent} ({2**exponent:,})"


def recommendation(forecast: Forecast, opened: OpenedRun, learner: str = "") -> str:
    """Return the recommended static loss scale and the usable range, or the reason for none, as sentences for the user.

    ``learner`` is empty if the run has only one.
    """
    settings = opened.settings
    words = scale_words(settings, learner)
    if not forecast.sampled_steps:
        return (
            "No scale can be recommended: the sampled steps of this run have no gradients, or their loss scale is 0 or "
            "not finite."
        )
    seen = f"from {_seen(forecast)}"
    if forecast.largest is None:
        return "Every sampled step overflowed, so nothing is known about smaller scales."
    if forecast.unseen:
        return f"No loss scale can be recommended, {seen}: {_unseen(forecast, opened)}"
    if not forecast.scales:
        return f"All gradients are zero, {seen}: nothing limits a static loss scale."
    if forecast.highest is None:
        return f"Gradients overflow FP16 even without a loss scale, {seen}: no static scale of 1 or more is usable."
    if forecast.too_few:
        return f"No loss scale can be recommended yet, {seen}: {_too_few(forecast)} {_more_looks(forecast, settings)}"
    if not forecast.has_range:
        sentence = f"No static loss scale is usable at every step, {seen}: use dynamic loss scaling."
        if forecast.recommended is None:
            return sentence
        return (
            f"{sentence} The largest scale that skips less than {share(MOST)} of the steps ({_SURE}) is "
            f"{power(forecast.recommended)}: try {words}{2**forecast.recommended}."
        )
    assert forecast.recommended is not None
    low, top = forecast.lowest or 0, forecast.top or 0
    usable = f"{power(low)} to {power(top)}" if low < top else f"{power(top)} alone"
    return (
        f"Recommended static loss scale: {power(forecast.recommended)}, {seen}: {words}{2**forecast.recommended}. "
        f"Usable range: {usable}, where such a run skips less than {share(MOST)} of its steps ({_SURE})."
    )


def _seen(forecast: Forecast) -> str:
    """Return the evidence of a forecast: ``30 sampled steps of a run of 300 steps (30 epochs)``."""
    samples = counted(len(forecast.sampled_steps), "sampled step")
    recorded = forecast.evidence.recorded
    if not recorded:
        return samples
    return f"{samples} of a run of {counted(recorded, 'step')} ({counted(forecast.epochs, 'epoch')})"


def _unseen(forecast: Forecast, opened: OpenedRun) -> str:
    """Return what FP16 may have rounded to zero unseen, and which run shows it."""
    names = [_name(each.name) for each in forecast.unseen]
    zeros = sum(each.all_zero > 0 for each in forecast.unseen)
    only = f" ({zeros:,} had zeros alone)" if zeros else ""
    lower = forecast.smallest_seen * _FIRST > 2.0**TINIEST  # else gradients are not seen at that scale either
    longer = f", for {FEWEST} steps or more" if forecast.steps < FEWEST else ""
    every = max(forecast.steps, FEWEST) // _ENOUGH
    return (
        f"gradients of {listed(names, 3)}{only} may have been rounded to zero in FP16, so neither smaller nor larger "
        f"scales can be judged. FP32 shows them{longer}: {fp32_run(opened, every)}; then recommend a scale from that "
        f"run.{_follow(opened.settings) if lower else ''}"
    )


def _follow(settings: Mapping[str, Any]) -> str:
    """Return how to train without a constant scale; nothing if the run does."""
    words = "scaler=dynamic"
    if is_watched(settings):
        words = "torch.amp.GradScaler with its default arguments"
    elif settings.get("scaler._target_") == "mptrain.scaler.DynamicScaler":
        if settings.get("scaler.init_scale", _FIRST) >= _FIRST:
            return ""
        words = f"scaler.init_scale={_FIRST}"
    return f" A dynamic loss scale that starts at 2^16 follows the gradients, without such a run: {words}."


def _too_few(forecast: Forecast) -> str:
    causes, evidence = [], forecast.evidence
    sound = sum(math.isfinite(sample.largest) for sample in forecast.sampled_steps)
    if sound < 2:
        causes.append("one sampled step does not show how much the largest gradient varies from step to step")
    if _is_short(forecast):
        causes.append(f"it takes {FEWEST} steps to show that less than {share(MOST)} of them are skipped ({_SURE})")
    if causes:
        return f"{', and '.join(causes)}."
    if 2 * sound < len(forecast.sampled_steps):
        return "most sampled steps overflowed, which does not show by how much."
    sure = "at no scale" if evidence.sure is None else f"only up to {power(evidence.sure)}"
    lowest = "at every scale" if forecast.lowest is None else f"below {power(forecast.lowest)}"
    return (
        f"the largest gradient varies by {evidence.spread:.1f} doublings (standard deviation), so less than "
        f"{share(MOST)} skipped steps can be guaranteed {sure} ({_SURE}), and {lowest} gradients underflow."
    )


def _is_short(forecast: Forecast) -> bool:
    """Return whether the run has too few steps to bound the share of skipped steps."""
    return 0 < forecast.evidence.recorded < FEWEST


def _more_looks(forecast: Forecast, settings: Mapping[str, Any]) -> str:
    steps, samples = max(forecast.evidence.recorded or forecast.steps, FEWEST), len(forecast.sampled_steps)
    every = max(steps // max(_ENOUGH, 2 * samples), 1)
    train = f"Train for {FEWEST} steps or more" if _is_short(forecast) else "Train again"
    if not _is_short(forecast) and steps // every <= samples:
        train = "Train for more steps"
    return f"{train} with {histogram_words(settings, every)}."


def reasons(forecast: Forecast) -> list[str]:
    """Return the reasons for both ends of the usable range of loss scales, and caveats, as sentences for the user."""
    sentences = []
    if forecast.scales:
        sentences += [*_below(forecast), *_above(forecast)]
    if forecast.unusable:
        sentences.append(
            f"{counted(forecast.unusable, 'sampled step')} left out: the loss scale is 0 or not finite, or there is no "
            "gradient."
        )
    if not forecast.sampled_steps:
        return sentences
    if forecast.unseen:
        return [*sentences, *_not_seen(forecast)]
    overflowed = sum(math.isinf(sample.largest) for sample in forecast.sampled_steps)
    # One sentence speaks of the 1 %: that of the recommendation, if it says that there are too few steps.
    sentences += [] if _is_short(forecast) else _sure(forecast)
    looked = counted(len(forecast.sampled_steps), "sampled step")
    between = (
        f" and the gradient norms of the other steps, {forecast.steps:,} steps in all"
        if _knows_between(forecast)
        else ""
    )
    sentences.append(f"The forecast is based on {looked}{between}. The largest gradient of a longer run may differ.")
    if overflowed:
        sentences.append(
            f"{counted(overflowed, 'sampled step')} overflowed at the run's own loss scale. The effect of smaller "
            "scales there is not known."
        )
    if forecast.smallest_seen:
        sentences.append(_cut_off(forecast))
    return sentences


def _below(forecast: Forecast) -> list[str]:
    if not forecast.lowest:
        least = f"more than {share(MOST_TAKEN)} of its gradient's magnitude."
        if forecast.lowest == 0:
            return [f"Even without a loss scale, no module loses {least}"]
        return [f"At every scale up to 2^{EXPONENTS[-1]}, {_module(forecast.scales[-1].taken.name)} loses {least}"]
    worse = forecast.scales[forecast.lowest - 1]
    return [
        f"Below {power(forecast.lowest)}, gradients underflow: at {power(forecast.lowest - 1)}, "
        f"{_module(worse.taken.name)} loses {share(worse.taken.share)} of its gradient's magnitude at step "
        f"{worse.taken.step:,}. The limit is {share(MOST_TAKEN)}."
    ]


def _above(forecast: Forecast) -> list[str]:
    largest, highest = forecast.largest, forecast.highest
    if largest is None or highest is None:
        return []
    what = f"the largest gradient seen is {number(largest.largest)} ({_name(largest.where)}, step {largest.step:,})"
    if highest == EXPONENTS[-1]:
        return [f"Nothing overflows up to {power(highest)}: {what}."]
    over = forecast.scales[highest + 1]
    sentences = [
        f"Above {power(highest)}, gradients overflow: {what}, and at {power(highest + 1)}, "
        f"{share(over.overflow_share)} of the steps are expected to overflow."
    ]
    sentences.append(f"{ONE_BECOMES_ALL[0].upper()}{ONE_BECOMES_ALL[1:]}.")
    if forecast.recommended is not None and highest - forecast.recommended < MARGIN:
        sentences.append(
            f"The recommended scale has less than {2**MARGIN}x headroom below the upper limit because smaller scales "
            "underflow, so some updates may be skipped."
        )
    return sentences


def _sure(forecast: Forecast) -> list[str]:
    evidence, sentences = forecast.evidence, []
    if evidence.spread and evidence.by_samples is not None:
        sentences.append(
            f"Evidence from sampled steps: less than {share(MOST)} of the steps overflow up to "
            f"{power(evidence.by_samples)} ({_SURE}). The largest gradient varies by {evidence.spread:.1f} doublings "
            f"(standard deviation), and {counted(len(forecast.sampled_steps), 'sampled step')} bound 99 % of the steps "
            "by a normal tolerance limit."
        )
    if evidence.by_record is not None:
        sentences.append(
            f"Evidence from recorded overflows: less than {share(MOST)} of the steps overflow up to "
            f"{power(evidence.by_record)} ({_SURE}). {evidence.held:,} of {counted(evidence.recorded, 'step')} did not "
            "overflow in FP16 there."
        )
    return sentences


def _knows_between(forecast: Forecast) -> bool:
    return forecast.steps > len(forecast.sampled_steps)


def _cut_off(forecast: Forecast) -> str:
    return (
        f"Gradients were recorded in FP16 only, so values below {number(forecast.smallest_seen)} could not be counted. "
        "What may have been rounded to zero counts as lost at every scale."
    )


def _not_seen(forecast: Forecast) -> list[str]:
    sound = counted(sum(math.isfinite(sample.largest) for sample in forecast.sampled_steps), "sampled step")
    named = [f"{_name(each.name)} ({each.all_zero:,} of {each.steps:,})" for each in forecast.unseen]
    return [
        f"FP16 kept no gradient below {number(forecast.smallest_seen)}, 2^-24 divided by the loss scale: a zero may be "
        f"a smaller one. Of {sound} without overflow, those with zeros alone, and those whose zeros may have been more "
        f"than {share(MOST_TAKEN)} of the gradient: {listed(named, _MODULES)}."
    ]


def forecast_table(forecast: Forecast, measured: MeasuredScales | None = None) -> Table:
    """Return the table of forecast underflow and overflow, with a row for each static loss scale of the forecast.

    Measurements of a sweep at some of the scales are further columns.
    """
    kinds = list(measured.kinds) if measured else []
    head = ["scale", "", "lost", "worst", "magnitude", "in module", "weights", "subnormal", "overflow"]
    for kind in kinds:
        of = f", {elided(kind, _NAME)}" if kind else ""
        head += [f"{measured.metric if measured else ''}{of}", f"skipped{of}"]
    rows = [
        [
            f"2^{each.exponent}",
            _usability(forecast, each.exponent),
            _rounded(each.lost),
            _rounded(each.worst_lost.share),
            Cell(_rounded(each.taken.share), "bad" if each.taken.share > MOST_TAKEN else ""),
            _name(each.taken.name) if each.taken.share >= _LITTLE else "",
            _rounded(each.weights_lost),
            _rounded(each.subnormal),
            _rounded(each.overflow_share),
            *(cell for kind in kinds if measured for cell in _found(measured.at(kind, each.exponent))),
        ]
        for each in forecast.scales
    ]
    optional = ("subnormal", "weights", "in module", "worst")
    return table(head, rows, (2, 3, 4, 6, 7, *range(8, len(head))), _legend(measured), optional)


def _legend(measured: MeasuredScales | None) -> str:
    legend = (
        "Lost: share of the nonzero activation gradients of all modules that FP16 rounds to zero. Worst: the same "
        "for the module that loses most. Magnitude: the largest share of the sum of |x| that one module loses at "
        f"one step; the limit is {share(MOST_TAKEN)}. Weights: lost weight gradients. Subnormal: gradients that are "
        "subnormal in FP16. Overflow: share of the steps that overflow. Unsure: no sampled step overflows, but the "
        "evidence is not sufficient."
    )
    if measured is None:
        return legend
    legend += f" {measured.metric} and skipped: measured by the sweep"
    several = any(len({run.exponent for run in runs}) < len(runs) for runs in measured.kinds.values())
    return f"{legend}, means of n runs." if several else f"{legend}."


def _usability(forecast: Forecast, exponent: int) -> Cell:
    if exponent == forecast.recommended:
        return Cell("recommended", "good")
    low, high = forecast.lowest, forecast.highest
    if low is not None and high is not None and low <= exponent <= high:
        sure = forecast.has_range and forecast.top is not None and exponent <= forecast.top
        return Cell("usable", "good") if sure else Cell("unsure", "warn")
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
    metric = number(fmean(values)) if values else ""
    metric += f" (n={len(values)})" if len(values) > 1 else ""
    lost = f"{failed} of {len(runs)} failed" if failed else ""
    return [
        Cell(", ".join(filter(None, (metric, lost))), "bad" if failed else ""),
        share(fmean(skipped)) if skipped else "",
    ]


_RANGE: Final = "#d9efe6"
_LOST: Final[dict[str, Any]] = {"color": plotting.BLUE, "marker": "o", "markersize": 3.5}
_WORST: Final[dict[str, Any]] = {"color": plotting.SKY, "linestyle": "--"}
_OVERFLOWING: Final[dict[str, Any]] = {"color": plotting.VERMILLION, "marker": "s", "markersize": 3.5}


def forecast_plot(
    name: str, forecast: Forecast, whose: str = "", measured: MeasuredScales | None = None
) -> Plot | None:
    """Plot the forecast underflow and overflow over the loss scale with the usable range, and a sweep's results below.

    ``whose`` names the learner in the caption, such as ``, generator``; empty if there is only one.
    None without scales.
    """
    if not forecast.scales:
        return None
    curves = (
        ("gradients lost", [each.lost for each in forecast.scales], _LOST),
        ("lost, worst module", [each.taken.share for each in forecast.scales], _WORST),
        ("steps overflowing", [each.overflow_share for each in forecast.scales], _OVERFLOWING),
    )
    scales = [each.exponent for each in forecast.scales]
    with plotting.drawing(name, 2.6 if measured is None else 4.9) as figure:
        grid = figure.panels(3, (5, 3, 3)) if measured else figure.panels()
        for label, shares, style in curves:
            figure.label(label, *grid[0].plot(scales, [100 * share for share in shares], **style))
        grid[0].set_ylim(-4, 104)
        grid[0].set_ylabel("forecast (%)")
        handles = _measured(grid[1], grid[2], measured) if measured else []
        for axes in grid:
            _range_on(axes, forecast)
        if forecast.has_range:
            figure.label("usable range", Patch(facecolor=_RANGE))
        if forecast.recommended is not None:
            figure.label("recommended", color=plotting.GREEN, linewidth=2)
        if measured and len(measured.kinds) > 1:
            for kind, handle in zip(measured.kinds, handles, strict=True):
                figure.label(f"measured: {elided(kind, plotting.NAME)}", handle)
        _scales_across(grid[-1])
    return Plot(name, _caption(forecast, whose, measured), figure.svg)


def _caption(forecast: Forecast, whose: str, measured: MeasuredScales | None) -> str:
    caption = (
        f"Forecast for each static loss scale{whose}, from {counted(len(forecast.sampled_steps), 'sampled step')}. The "
        "curves are the share of activation gradients that FP16 rounds to zero, the share of its magnitude that the "
        "worst module loses, and the share of steps that overflow."
    )
    if forecast.recommended is not None:
        caption += f" Recommended: {power(forecast.recommended)}."
    if measured:
        failed = any(run.failed for runs in measured.kinds.values() for run in runs)
        crosses = ", and a cross marks runs that failed" if failed else ""
        caption += f" Lower panels: {measured.metric} and skipped updates of a sweep. Each dot is a run{crosses}."
    return caption


def _range_on(axes: Axes, forecast: Forecast) -> None:
    if forecast.has_range and forecast.lowest is not None and forecast.top is not None:
        axes.axvspan(forecast.lowest - 0.25, forecast.top + 0.25, color=_RANGE, linewidth=0, zorder=0)
    if forecast.recommended is not None:
        axes.axvline(forecast.recommended, color=plotting.GREEN, linewidth=2, alpha=0.9, zorder=1)


def _measured(above: Axes, below: Axes, measured: MeasuredScales) -> list[Line2D]:
    """Draw the metric and the skipped share of every run of a sweep, with lines through the means of each scale."""
    handles = []
    styles = plotting.series(len(measured.kinds)) if len(measured.kinds) > 1 else [(plotting.BLACK, "-")]
    for runs, (colour, line) in zip(measured.kinds.values(), styles, strict=True):
        metrics = [(run.exponent, run.metric) for run in runs if run.metric is not None]
        skipped = [(run.exponent, 100 * run.skipped) for run in runs if run.skipped is not None]
        for axes, values in ((above, metrics), (below, skipped)):
            style: dict[str, Any] = {"means": {"linewidth": 1.3}, "markersize": 3.5, "alpha": 0.55}
            handle = plotting.dots_and_means(axes, values, colour, line, **style)
        handles.append(handle)
        failed = sorted({run.exponent for run in runs if run.failed})
        if failed:  # drawn only if there are any: an empty line would make the layout collapse
            plotting.failures_at(above, failed, 0.06)
    plotting.numeric_y_axis(above)
    above.yaxis.set_major_locator(MaxNLocator(4))
    above.set_ylabel(elided(measured.metric, 18))
    below.set_ylabel("skipped (%)")
    below.set_ylim(-6, 106)
    below.yaxis.set_major_locator(FixedLocator([0, 50, 100]))
    return handles


def _scales_across(axes: Axes) -> None:
    axes.set_xlim(EXPONENTS[0] - 0.6, EXPONENTS[-1] + 0.6)
    plotting.ticks_at(axes.xaxis, list(EXPONENTS[::4]), plotting.power_of_two)
    axes.xaxis.set_minor_locator(FixedLocator(list(EXPONENTS)))
    axes.set_xlabel("loss scale")
