"""Blocks of a run's report about the magnitudes of its tensors and the FP16 range, from a summary in bounded memory.

An exponent histogram counts a tensor's values x by floor(log2 |x|). A sampled step is a step with histograms.
The blocks show such histograms against the range of FP16, and underflow, headroom and lost updates over steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mptrain.numerics.exponents import (
    HIGHEST,
    NORMAL,
    TINIEST,
    ExponentTails,
    below_tiniest_share,
    headroom,
    is_half,
    lost_share,
    merged,
    nonzero,
    share_between,
    subnormal_share,
    total,
    unseen_magnitude,
    zero_share,
)
from mptrain.numerics.forecast import MOST_TAKEN, Forecast, GradientHistory
from mptrain.report import plotting
from mptrain.report.forecast_blocks import forecast_plot, reasons, recommendation
from mptrain.report.page import Block, Bullets, Cell, Fold, Plot, Table, Text, Tone, plots, table
from mptrain.report.run_blocks import OpenedRun
from mptrain.runlog.lost_updates import lost_shares
from mptrain.system.errors import StorageError
from mptrain.system.records import ExponentCounts, LostUpdates, TensorKind
from mptrain.system.words import MINUS, UNKNOWN, counted, elided, listed, number, share

if TYPE_CHECKING:
    from mptrain.runlog.run_reader import Run
    from mptrain.system.records import HistogramRecord, StepRecord


#: Name of each kind of tensor in the report.
KINDS: Final[dict[TensorKind, str]] = {
    "activation_gradients": "activation gradients",
    "weight_gradients": "weight gradients",
    "activations": "activations",
    "weights": "weights",
    "updates": "updates",
}

#: The kinds that are meaningless at a step that overflowed.
GRADIENTS: Final = ("activation_gradients", "weight_gradients")


@dataclass(frozen=True, slots=True)
class HistogramSummary:
    """Shares of zero and subnormal gradients at one step with exponent histograms, and its ineffective updates.

    Activation gradients are gradients at module outputs, scaled by the loss scale as in the run.

    Attributes:
        zeros: Share of the activation gradients, as scaled, that are zero or round to zero in FP16.
        subnormal: Share of the nonzero activation gradients that are subnormal in FP16.
        headroom: Doublings until the largest gradient overflows FP16; negative if it already overflows.
        updates: Number of weight elements with a nonzero update.
        unchanged: Number of those elements whose value the update would not change in FP16.
    """

    step: int
    zeros: float
    subnormal: float
    headroom: float
    updates: int
    unchanged: int


@dataclass
class LearnerHistograms:
    """Exponent histograms of one learner, merged over all sampled steps.

    Attributes:
        gradients: The gradient history that a forecast of loss scales needs.
        kinds: Counts by kind and tensor name over all sampled steps, as the device saw them. Gradients of steps that
            overflowed are left out.
        seen: Summaries of the sampled steps that did not overflow.
        overflowed: Numbers of the sampled steps that overflowed.
        unchanged: By parameter, the elements with a nonzero update and how many of them would not change in FP16.
        lost: By parameter, what rounding to the format of the weights loses, or to BF16, as in `HistogramRecord`.
        sampled: Number of elements looked at, of each parameter of which not all were, as in `HistogramRecord`.
    """

    gradients: GradientHistory = field(default_factory=GradientHistory)
    kinds: dict[TensorKind, dict[str, ExponentCounts]] = field(default_factory=dict)
    seen: list[HistogramSummary] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)
    unchanged: dict[str, tuple[int, int]] = field(default_factory=dict)
    lost: dict[str, LostUpdates] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)

    def add(self, record: HistogramRecord) -> None:
        """Add the histograms of one step."""
        self.gradients.add(record)
        for kind, named in record.tensors.items():
            if record.overflow and kind in GRADIENTS:
                continue
            known = self.kinds.setdefault(kind, {})
            for name, counts in named.items():
                known[name] = merged([known[name], counts]) if name in known else counts
        self.sampled |= record.sampled
        for name, (moved, same) in record.unchanged.items():
            before = self.unchanged.get(name, (0, 0))
            self.unchanged[name] = (before[0] + moved, before[1] + same)
        for name, sums in record.lost.items():
            earlier = self.lost.get(name, (0, 0, 0.0, 0.0, 0.0))
            self.lost[name] = cast("LostUpdates", tuple(map(sum, zip(earlier, sums, strict=True))))
        if record.overflow:
            self.overflowed.append(record.step)
        else:
            self.seen.append(_seen(record))

    def together(self, kind: TensorKind) -> ExponentCounts:
        """Return one histogram of all tensors of a kind, such as ``weights``, over all sampled steps."""
        return merged(self.kinds.get(kind, {}).values())

    def unscaled_gradients(self) -> ExponentCounts:
        """Return one histogram of all activation gradients, divided by the loss scale."""
        return self.gradients.together

    def lost_unscaled(self) -> float:
        """Return the share of nonzero activation gradients that FP16 rounds to zero without a loss scale, 0 to 1."""
        return lost_share(merged(self.gradients.activations.values()))


def _seen(record: HistogramRecord) -> HistogramSummary:
    together = merged(record.tensors.get("activation_gradients", {}).values())
    largest = max(
        (counts.largest for kind in GRADIENTS for counts in record.tensors.get(kind, {}).values()), default=0.0
    )
    return HistogramSummary(
        step=record.step,
        zeros=zero_share(together),
        subnormal=subnormal_share(together),
        headroom=headroom(largest),
        updates=sum(moved for moved, _ in record.unchanged.values()),
        unchanged=sum(same for _, same in record.unchanged.values()),
    )


def read_histograms(run: Run, notes: list[str]) -> dict[str, LearnerHistograms]:
    """Read the exponent histograms of a run, merged by learner; empty if the run has none.

    At a damaged record, reading stops and ``notes`` receives a sentence.
    """
    histograms: dict[str, LearnerHistograms] = {}
    try:
        for record in run.histograms():
            histograms.setdefault(record.learner, LearnerHistograms()).add(record)
    except StorageError as error:
        notes.append(f"{error}; later histograms are not in this report")
    return histograms


def forecasts(run: Run, histograms: dict[str, LearnerHistograms]) -> dict[str, Forecast]:
    """Return the forecast of static loss scales for each learner of a run, by name, up to a damaged step record."""
    return {
        name: learner_histograms.gradients.forecast(_steps_of(run, name))
        for name, learner_histograms in histograms.items()
    }


def _steps_of(run: Run, learner: str) -> Iterator[StepRecord]:
    try:
        yield from (step for step in run.steps() if step.learner == learner)
    except StorageError:  # reported where the report shows steps
        return


def unseen_share(counts: ExponentCounts) -> float:
    """Return the largest share of an FP16 gradient's magnitude that its zeros may have had; 0 for other dtypes."""
    return ExponentTails(counts, unseen_magnitude(counts)).unseen_share if is_half(counts) else 0.0


def worst_first(named: dict[str, ExponentCounts], half: bool = False) -> list[tuple[str, ExponentCounts]]:
    """Sort tensors by the share of their magnitude that they lose in FP16, then by lost precision, worst first.

    If they are gradients of an FP16 run (``half``), what zeros may have been is lost too, so those with zeros alone
    come first. Other tensors without a nonzero value are left out.
    """

    def badness(item: tuple[str, ExponentCounts]) -> tuple[float, float, float]:
        tails = ExponentTails(item[1])
        lost = max(unseen_share(item[1]) if half else 0.0, tails.magnitude_below(-25))
        return -lost, -tails.share_below(-25), -tails.share_below(-14)

    shown = ((name, counts) for name, counts in named.items() if nonzero(counts) or (half and counts.zeros))
    return sorted(shown, key=badness)


#: Maximum rows of a table of tensors. The worst come first.
MOST_TENSORS = 20

#: Maximum characters of a tensor's name.
_NAME = 60

#: Headroom in doublings below which a tensor counts as close to overflow in FP16.
_NEAR = 2.0

#: The kinds of the second figure.
_OTHERS: tuple[TensorKind, ...] = ("activations", "weights", "weight_gradients", "updates")


def gradient_histogram_blocks(opened: OpenedRun) -> list[Block | None]:
    """Return the blocks of a run's report on its tensors and its best static loss scale; empty without histograms."""
    notes: list[str] = []
    by_learner = read_histograms(opened.run, notes)
    several = len(by_learner) > 1
    blocks: list[Block | None] = [Bullets(tuple(notes), "warn")]
    foretold = forecasts(opened.run, by_learner)
    for name, histograms in by_learner.items():
        blocks += _learner(opened, name if several else "", histograms, foretold[name])
    return blocks


def _learner(opened: OpenedRun, name: str, histograms: LearnerHistograms, forecast: Forecast) -> list[Block | None]:
    tail, whose = (f"-{_ids(name)}", f", {name}") if name else ("", "")
    return [
        Text(f"{f'{name}: ' if name else ''}{recommendation(forecast, opened, name)}"),
        Text(_looked(histograms)),
        Bullets(tuple(reasons(forecast))),
        plots(
            _gradients_plot(f"exponents-gradients{tail}", histograms, whose, forecast),
            _others_plot(f"exponents{tail}", histograms, whose),
            forecast_plot(f"forecast{tail}", forecast, whose),
            _looks_plot(f"looks{tail}", histograms, opened.history.steps, whose),
        ),
        _tensor_table("activation_gradients", histograms.kinds.get("activation_gradients", {}), forecast),
        _unchanged(histograms, str(opened.settings.get("precision.rounding"))),
        *(
            Fold(f"{KINDS[kind].capitalize()}{whose}", (shown,))
            for kind in _OTHERS
            if (shown := _tensor_table(kind, histograms.kinds.get(kind, {}), forecast)) is not None
        ),
    ]


def _ids(name: str) -> str:
    """Return a learner's name with every character but ASCII letters and digits replaced by a hyphen."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)


def _looked(histograms: LearnerHistograms) -> str:
    steps = sorted([*(each.step for each in histograms.seen), *histograms.overflowed])
    shown = ", ".join(f"{step:,}" for step in steps[:6]) + (f", … {steps[-1]:,}" if len(steps) > 6 else "")
    left = counted(len(histograms.overflowed), "step")
    overflowed = f"; gradients of {left} that overflowed are left out" if histograms.overflowed else ""
    sentence = f"{counted(len(steps), 'sampled step')}: {shown}{overflowed}."
    parts = [count for count in histograms.sampled.values() if count]
    if parts:
        sentence += (
            f" Updates of {counted(len(parts), 'parameter')} are those of samples, {min(parts):,} elements or more."
        )
    none = [elided(name, _NAME) or "the model" for name, count in histograms.sampled.items() if not count]
    return sentence + (f" Not counted, because torch's operators do not apply: {listed(none)}." if none else "")


def _gradients_plot(name: str, learner_histograms: LearnerHistograms, whose: str, forecast: Forecast) -> Plot | None:
    scaled, plain = learner_histograms.together("activation_gradients"), learner_histograms.unscaled_gradients()
    if not nonzero(scaled):
        return None
    apart = scaled.lowest != plain.lowest
    histograms = {"scaled as in the run": scaled, "unscaled": plain} if apart else {"unscaled": plain}
    half = forecast.smallest_seen > 0
    of = "gradients that FP16 kept in the run" if half else "nonzero gradients"
    lost = f"FP16 rounds {share(learner_histograms.lost_unscaled())} of the {of} to zero without loss scaling"
    kept = f" and {share(lost_share(scaled))} with the loss scale of the run" if apart and not half else ""
    zeros = f". {share(scaled.zeros / total(scaled))} of all gradients were zero already" if half else ""
    if forecast.unseen:
        tensors = counted(len(forecast.unseen), "tensor")
        lost, kept = f"What FP16 rounded to zero in the run is not seen, and may be much in {tensors}", ""
    below, between = below_tiniest_share(plain), share_between(plain, TINIEST - 3, TINIEST)
    small = (
        f"Unscaled, {share(below)} of the {of} are below 2^{MINUS}24, FP16's smallest number, {share(between)} of "
        f"all from 2^{MINUS}27 to 2^{MINUS}24; FP16 rounds those above 2^{MINUS}25 up to it. "
    )
    caption = (
        f"Magnitudes of activation gradients{whose}, over all modules and sampled steps, and the range of FP16. "
        f"{'' if forecast.unseen else small}{lost}{kept}{zeros}.{_zeros_drawn(histograms)}"
    )
    return _exponents_plot(name, caption, histograms)


def _others_plot(name: str, learner_histograms: LearnerHistograms, whose: str) -> Plot | None:
    histograms: dict[str, ExponentCounts] = {KINDS[kind]: learner_histograms.together(kind) for kind in _OTHERS}
    if not any(nonzero(counts) for counts in histograms.values()):
        return None
    caption = (
        f"Magnitudes of activations, weights, weight gradients (scaled as in the run) and updates{whose}. In the "
        f"narrow strip from 2^{MINUS}25 to 2^{MINUS}24, FP16 rounds up to its smallest value; below it, FP16 rounds "
        f"to zero. The outermost bars include all values beyond them.{_zeros_drawn(histograms)}"
    )
    return _exponents_plot(name, caption, histograms)


def _zeros_drawn(histograms: Mapping[str, ExponentCounts]) -> str:
    """Return the sentence of a caption on the bar of zeros, which may be cut off at the top of the figure."""
    shares = {label: share(counts.zeros / total(counts)) for label, counts in histograms.items() if nonzero(counts)}
    same = len(set(shares.values())) == 1
    text = next(iter(shares.values())) if same else ", ".join(f"{label} {value}" for label, value in shares.items())
    return f" Bars are shares of all values; that of zeros, on the left, may be cut off: {text}."


def _tensor_table(kind: TensorKind, named: dict[str, ExponentCounts], forecast: Forecast) -> Table | None:
    """Return a table of the tensors of one kind as the device saw them, worst first; None if there are none."""
    half = kind in GRADIENTS and forecast.smallest_seen > 0
    ordered = worst_first(named, half)
    if not ordered:
        return None
    rows: list[list[Cell | str]] = []
    for name, counts in ordered[:MOST_TENSORS]:
        room, lost = headroom(counts.largest), lost_share(counts)
        unseen = half and unseen_share(counts) > MOST_TAKEN
        rows.append(
            [
                elided(name, _NAME) or "(the whole model)",
                counts.dtype,
                Cell("not seen" if unseen else share(lost), "bad" if unseen else "warn" if lost > 0.5 else ""),
                share(subnormal_share(counts)),
                share(zero_share(counts)),
                number(counts.largest),
                Cell(f"{room:.1f}".replace("-", MINUS) if math.isfinite(room) else UNKNOWN, _room_tone(room)),
                f"{counts.inf + counts.nan:,}",
            ]
        )
    left = len(ordered) - len(rows)
    note = (
        f"{KINDS[kind].capitalize()} as the device saw them, in FP16. Lost and subnormal are shares of the values that "
        "are not zero; zero is the share of all that are zero, or that FP16 rounds to it. "
        "Headroom is the number of doublings from the largest value to the largest FP16 number."
    )
    if any(half and unseen_share(counts) > MOST_TAKEN for _, counts in ordered):
        note += f" Not seen: zeros of FP16 may have been more than {share(MOST_TAKEN)} of the gradient."
    note += f" {counted(left, 'tensor')} with smaller losses left out." if left else ""
    first = "parameter" if kind in ("weights", "weight_gradients", "updates") else "module"
    broken = "inf or NaN" if any(counts.inf + counts.nan for _, counts in ordered) else None
    head = (first, "dtype", "lost, of nonzero", "subnormal, of nonzero", "zero, of all", "largest", "headroom", broken)
    return table(head, rows, numeric=range(2, 8), note=note)


def _room_tone(room: float) -> Tone:
    return "bad" if room < 0 else "warn" if room < _NEAR else ""


def _unchanged(histograms: LearnerHistograms, rounding: str) -> Text | None:
    """Return the share of updates that round away: in half-precision weights as seen, in others as if kept in half."""
    if rounding in ("stochastic", "compensated"):
        count, _ = lost_shares(histograms.lost.values())
        if math.isnan(count):
            return None
        if rounding == "compensated":
            return Text(
                f"Rounded to nearest, {share(count)} of the updates would change nothing. Compensation keeps what "
                "rounding takes from the weights, and adds it to their next update: nothing is lost."
            )
        by = _moved(histograms.lost.values())
        return Text(
            f"{share(count)} of the updates changed no weight. Weights are rounded at random, so that others moved "
            f"further: all together they moved by {by} of the updates, and nothing is lost on average."
        )
    weights = histograms.kinds.get("weights", {})
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for name, pair in histograms.unchanged.items():
        dtype = weights[name].dtype if name in weights else "float32"
        groups.setdefault(dtype if dtype in ("float16", "bfloat16") else "", {})[name] = pair
    sentences = []
    for dtype, pairs in groups.items():
        moved, same = (sum(pair[at] for pair in pairs.values()) for at in (0, 1))
        if not moved:
            continue
        verb = f"rounded away, because the weights are stored in {dtype}" if dtype else _WOULD
        sentences.append(f"{share(same / moved)} of the updates {verb}{_most_in(pairs)}.")
        sentences += _of_magnitude([histograms.lost[name] for name in pairs if name in histograms.lost], dtype)
    return Text(f"{' '.join(sentences)} FP32 master weights keep these updates.") if sentences else None


_WOULD = "would not change a weight stored in FP16"


def _of_magnitude(lost: Sequence[LostUpdates], dtype: str) -> list[str]:
    """Return what of the magnitude of updates is lost, of weights of a half-precision dtype, or else if in BF16."""
    count, size = lost_shares(lost)
    if math.isnan(size):
        return ["Their share of the magnitude of all is not known: only the optimizer knows its updates."] * bool(dtype)
    of_all = f"{share(size)} of the magnitude of all"
    if not dtype:
        return [f"If these weights were BF16, {share(count)} would change nothing, which is {of_all}."]
    return [f"That is {of_all}; the weights moved by {_moved(lost)} of it, because others were rounded up."]


def _moved(lost: Iterable[LostUpdates]) -> str:
    sums = [sum(column) for column in zip(*lost, strict=True)]
    return share(sums[4] / sums[2] if sums[2] else math.nan)


def _most_in(pairs: Mapping[str, tuple[int, int]]) -> str:
    name, (of, lost) = max(pairs.items(), key=lambda item: (item[1][1] / item[1][0] if item[1][0] else 0, item[1][0]))
    return f"; most in {elided(name, _NAME)}, {share(lost / of)}" if lost else ""


#: Colours of the histograms of one figure, in order.
COLOURS: Final = (plotting.BLUE, plotting.VERMILLION, plotting.GREEN, plotting.PURPLE, plotting.ORANGE)

#: Zones of FP16: label, first and last power of two, and shade.
ZONES: Final = (
    ("lost", -math.inf, TINIEST - 1, "#f7d9d2"),
    ("", TINIEST - 1, TINIEST, "#fbeae6"),
    ("subnormal", TINIEST, NORMAL, "#fdf3d8"),
    ("normal", NORMAL, HIGHEST + 1, "#e6f4ee"),
    ("inf", HIGHEST + 1, math.inf, "#f7d9d2"),
)

#: Narrowest and widest range of powers of two in a figure.
_LEAST: Final = (-30, 19)
_MOST: Final = (-60, 40)

#: Share of a histogram below which a bar is too small to see.
_SEEN: Final = 0.002


def _exponents_plot(name: str, caption: str, histograms: Mapping[str, ExponentCounts]) -> Plot:
    shown = {label: counts for label, counts in histograms.items() if nonzero(counts)}
    low, high = _span(list(shown.values()))
    several, tallest = len(shown) > 1, 0.0
    zero = low - 2  # the bar of zeros, apart from the others
    with plotting.drawing(name, 2.5) as figure:
        (axes,) = figure.panels()
        for (label, counts), colour in zip(shown.items(), COLOURS, strict=False):
            edges, percent = _bars(counts, low, high)
            axes.stairs(percent, edges, fill=True, color=colour, alpha=0.22 if several else 0.55, linewidth=0)
            axes.stairs(percent, edges, color=colour, linewidth=1.5)
            if several:
                figure.label(label, Patch(facecolor=colour, alpha=0.6))
            axes.stairs([100 * counts.zeros / total(counts)], [zero - 1, zero], fill=True, color=colour, alpha=0.4)
            tallest = max(tallest, *percent)
        axes.set_xlim(zero - 2, high)
        axes.set_ylim(0, 1.24 * max(tallest, 1e-9))
        _fp16_zones(axes, low, zero - 0.5)
        plotting.numeric_y_axis(axes)
        axes.set_ylabel("values (%)")
        axes.set_xlabel("magnitude")
    return Plot(name, caption, figure.svg)


def _fp16_zones(axes: Axes, low: float, zero: float) -> None:
    high = axes.get_xlim()[1]
    style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 9, "color": "#4b5563"}
    for label, start, end, shade in ZONES:
        left, right = max(start, low), min(end, high)
        if right > left:
            axes.axvspan(left, right, color=shade, linewidth=0, zorder=0)
            if label:
                axes.text((left + right) / 2, 0.97, label, transform=axes.get_xaxis_transform(), **style)
    axes.grid(visible=False)
    ticks = [tick for tick in _ticks(low, high) if low <= tick <= high]
    label_of = {zero: "0"}
    plotting.ticks_at(axes.xaxis, [zero, *ticks], lambda value: label_of.get(value) or plotting.power_of_two(value))


def _ticks(low: float, high: float) -> list[int]:
    """Return the borders of the FP16 zones, and every twelfth power of two beyond them."""
    below = range(TINIEST - 12, math.floor(low) - 1, -12)
    above = range(HIGHEST + 1 + 12, math.ceil(high) + 1, 12)
    return [*below, TINIEST, NORMAL, 0, HIGHEST + 1, *above]


def _span(shown: Sequence[ExponentCounts]) -> tuple[int, int]:
    """Return the range of powers of two to draw, without outer bars that are too small to see."""
    tall = [
        counts.lowest + at
        for counts in shown
        for at, count in enumerate(counts.counts)
        if count > _SEEN * nonzero(counts)
    ]
    first, last = min(tall, default=0), max(tall, default=0) + 1
    return max(min(first, _LEAST[0]), _MOST[0]), min(max(last, _LEAST[1]), _MOST[1])


def _bars(counts: ExponentCounts, low: int, high: int) -> tuple[list[int], list[float]]:
    """Return bar edges and percentages. The first and the last bar include all values beyond them."""
    whole, bars = total(counts), [0.0] * (high - low)
    for exponent, count in enumerate(counts.counts, counts.lowest):
        bars[min(max(exponent - low, 0), len(bars) - 1)] += 100 * count / whole
    return list(range(low, high + 1)), bars


def _looks_plot(name: str, histograms: LearnerHistograms, steps: int, whose: str) -> Plot | None:
    """Plot underflow, headroom and lost updates over the sampled steps, one axis for each that has data."""
    seen = histograms.seen
    if len(seen) < 2:
        return None
    finite = [each for each in seen if math.isfinite(each.headroom)]
    changed = [each for each in seen if each.updates]
    rows = [(_shares, seen), (_headroom, finite), (_unchanged_shares, changed)]
    present = [(paint, samples) for paint, samples in rows if samples]
    with plotting.drawing(name, 0.5 + 1.35 * len(present)) as figure:
        grid = figure.panels(len(present))
        for axes, (paint, samples) in zip(grid, present, strict=True):
            paint(figure, axes, samples)
        plotting.step_axis(grid[-1], max(steps, seen[-1].step))
    caption = (
        f"Underflow, headroom and lost updates of the sampled steps{whose}. The panels show scaled activation "
        "gradients that are zero or subnormal in FP16, headroom of the largest gradient in doublings before overflow, "
        "and updates that would not change an FP16 weight."
    )
    return Plot(name, caption, figure.svg, figure.charts)


_LINE: Final[dict[str, Any]] = {"marker": "o", "markersize": 4}


def _shares(figure: plotting.Drawing, axes: Axes, seen: Sequence[HistogramSummary]) -> None:
    steps = [float(each.step) for each in seen]
    curves = [
        ("zero", plotting.BLUE, [each.zeros for each in seen]),
        ("subnormal", plotting.ORANGE, [each.subnormal for each in seen]),
    ]
    for label, colour, shares in curves:
        figure.line(axes, label, (steps, [100 * share for share in shares]), color=colour, label=label, **_LINE)
    axes.set_ylim(-4, 104)
    axes.set_title("activation gradients in FP16 (%)")
    axes.legend(loc="best", ncols=2)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2.5, 5, 10]))


def _headroom(figure: plotting.Drawing, axes: Axes, seen: Sequence[HistogramSummary]) -> None:
    axes.axhspan(-1e3, 0, color=ZONES[-1][3], linewidth=0)
    points = [float(each.step) for each in seen], [each.headroom for each in seen]
    figure.line(axes, "headroom", points, color=plotting.GREEN, **_LINE)
    axes.set_ylim(min(-0.5, min(each.headroom for each in seen) - 1), max(each.headroom for each in seen) + 1.5)
    axes.set_title("headroom of the largest gradient (doublings)")
    axes.axhline(0, color=plotting.GREY, linewidth=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _unchanged_shares(figure: plotting.Drawing, axes: Axes, seen: Sequence[HistogramSummary]) -> None:
    percent = [100 * each.unchanged / each.updates for each in seen]
    points = [float(each.step) for each in seen], percent
    figure.line(axes, "unchanged", points, color=plotting.PURPLE, **_LINE)
    axes.set_ylim(0, max(1.15 * max(percent), 1))
    axes.set_title("updates that do not change an FP16 weight (%)")
    plotting.numeric_y_axis(axes)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2.5, 5, 10]))
