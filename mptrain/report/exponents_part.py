"""The part of a run's report about what FP16 holds of its tensors; only runs with histograms have one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mptrain.numerics.exponents import headroom, lost_share, nonzero, subnormal_share, zero_share
from mptrain.report.exponent_figures import exponents_figure, looks_figure
from mptrain.report.forecast_part import forecast_plot, reasons, recommendation, scale_words
from mptrain.report.histogram_summary import KINDS, LearnerHistograms, forecasts, read_histograms, worst_first
from mptrain.report.page import Block, Bullets, Cell, Fold, Plot, Table, Text, Tone, plots, table
from mptrain.report.run_parts import OpenedRun
from mptrain.report.wording import MINUS, UNKNOWN, counted, elided, number, share

if TYPE_CHECKING:
    from mptrain.numerics.forecast import Forecast
    from mptrain.records import ExponentCounts, TensorKind

#: Rows of a table of tensors; the worst come first.
MOST_TENSORS = 20

#: Letters of a tensor's name.
_NAME = 60

#: A tensor with less room than this many doublings is near the end of FP16's range.
_NEAR = 2.0

#: The kinds of the second figure.
_OTHERS: tuple[TensorKind, ...] = ("activations", "weights", "weight_gradients", "updates")


def exponent_blocks(opened: OpenedRun) -> list[Block | None]:
    """Figures against the range of FP16, what is lost of which module, and the right static scales."""
    notes: list[str] = []
    found = read_histograms(opened.run, notes)
    several = len(found) > 1
    blocks: list[Block | None] = [Bullets(tuple(notes), "warn") if notes else None]
    foretold = forecasts(opened.run, found)
    for name, histograms in found.items():
        blocks += _learner(opened, name if several else "", histograms, foretold[name])
    return blocks


def _learner(opened: OpenedRun, name: str, found: LearnerHistograms, forecast: Forecast) -> list[Block | None]:
    tail, whose = (f"-{_ids(name)}", f", {name}") if name else ("", "")
    return [
        Text(f"{f'{name}: ' if name else ''}{recommendation(forecast, scale_words(opened.settings, name))}"),
        Text(_looked(found)),
        Bullets(tuple(reasons(forecast))),
        plots(
            _gradients_plot(f"exponents-gradients{tail}", found, whose),
            _others_plot(f"exponents{tail}", found, whose),
            forecast_plot(f"forecast{tail}", forecast, whose),
            _looks_plot(f"looks{tail}", found, opened.history.steps, whose),
        ),
        _tensor_table("activation_gradients", found.kinds.get("activation_gradients", {})),
        _unchanged(found),
        *(
            Fold(f"{KINDS[kind].capitalize()}{whose}", (shown,))
            for kind in _OTHERS
            if (shown := _tensor_table(kind, found.kinds.get(kind, {}))) is not None
        ),
    ]


def _ids(name: str) -> str:
    """Letters and digits of a learner's name, for the names of figures."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)


def _looked(found: LearnerHistograms) -> str:
    steps = sorted([*(each.step for each in found.seen), *found.overflowed])
    shown = ", ".join(f"{step:,}" for step in steps[:6]) + (f", … {steps[-1]:,}" if len(steps) > 6 else "")
    overflowed = f"; gradients of {counted(len(found.overflowed), 'step')} that overflowed are left out" if found.overflowed else ""  # fmt: skip
    return f"{counted(len(steps), 'step')} looked at: {shown}{overflowed}."


def _gradients_plot(name: str, found: LearnerHistograms, whose: str) -> Plot | None:
    scaled, plain = found.together("activation_gradients"), found.unscaled_gradients()
    if not nonzero(scaled):
        return None
    apart = scaled.lowest != plain.lowest
    histograms = {"as the run scaled them": scaled, "unscaled": plain} if apart else {"unscaled": plain}
    lost = f"FP16 rounds {share(found.lost_unscaled())} of the nonzero ones to zero where the loss is not scaled"
    kept = f", {share(lost_share(scaled))} as this run scaled it" if apart else ""
    zeros = "" if scaled.dtype == "float32" else "; those that were zero already are not drawn"
    caption = (
        f"Activation gradients{whose} by magnitude, all modules and looks together, against what FP16 can hold: "
        f"{lost}{kept}{zeros}."
    )
    return Plot(name, caption, exponents_figure(name, histograms))


def _others_plot(name: str, found: LearnerHistograms, whose: str) -> Plot | None:
    histograms: dict[str, ExponentCounts] = {KINDS[kind]: found.together(kind) for kind in _OTHERS}
    if not any(nonzero(counts) for counts in histograms.values()):
        return None
    caption = (
        f"Activations, weights, weight gradients as they were scaled, and updates{whose} by magnitude. From 2^{MINUS}25 to "
        f"2^{MINUS}24, the narrow strip, FP16 rounds up; below it there is nothing. The outermost bars hold what lies beyond."
    )
    return Plot(name, caption, exponents_figure(name, histograms))


def _looks_plot(name: str, found: LearnerHistograms, steps: int, whose: str) -> Plot | None:
    if len(found.seen) < 2:
        return None
    caption = (
        f"Over the steps that were looked at{whose}: activation gradients, as they were scaled, that are zero in FP16 or "
        "held with fewer bits; doublings until the largest gradient leaves FP16; updates that leave an FP16 weight as it was."
    )
    return Plot(name, caption, looks_figure(name, found.seen, steps))


def _tensor_table(kind: TensorKind, named: dict[str, ExponentCounts]) -> Table | None:
    """Tensors of one kind as the device saw them, the worst first."""
    ordered = worst_first(named)
    if not ordered:
        return None
    first = "parameter" if kind in ("weights", "weight_gradients", "updates") else "module"
    rows: list[list[Cell | str]] = []
    broken = any(counts.inf + counts.nan for _, counts in ordered)
    for name, counts in ordered[:MOST_TENSORS]:
        room, lost = headroom(counts.largest), lost_share(counts)
        rows.append(
            [
                elided(name, _NAME) or "(the whole model)",
                counts.dtype,
                Cell(share(lost), "warn" if lost > 0.5 else ""),
                share(subnormal_share(counts)),
                share(zero_share(counts)),
                number(counts.largest),
                Cell(f"{room:.1f}".replace("-", MINUS) if math.isfinite(room) else UNKNOWN, _room_tone(room)),
                *([f"{counts.inf + counts.nan:,}"] if broken else []),
            ]
        )
    left = len(ordered) - len(rows)
    note = (
        f"{KINDS[kind].capitalize()} as the device saw them: shares lost and subnormal are of the values that are not "
    )
    note += "zero; headroom is how many doublings the largest is from FP16's largest number."
    note += f" {counted(left, 'tensor')} that lose less left out." if left else ""
    head = [first, "kept in", "lost in FP16", "subnormal", "zero in FP16", "largest", "headroom"]
    head += ["inf or NaN"] * broken
    return table(tuple(head), rows, numeric=(2, 3, 4, 5, 6, 7), note=note)


def _room_tone(room: float) -> Tone:
    return "bad" if room < 0 else "warn" if room < _NEAR else ""


def _unchanged(found: LearnerHistograms) -> Text | None:
    """How many updates an FP16 weight without a master copy would not notice."""
    moved, same = (sum(pair[at] for pair in found.unchanged.values()) for at in (0, 1))
    if not moved:
        return None
    worst = max(found.unchanged.items(), key=lambda item: (item[1][1] / item[1][0] if item[1][0] else 0, item[1][0]))
    name, (of, lost) = worst
    where = f"; most in {elided(name, _NAME)}, {share(lost / of)}" if lost else ""
    return Text(
        f"Of the updates, {share(same / moved)} would leave a weight kept in FP16 as it was{where}. That is what a master copy "
        "in FP32 is for."
    )
