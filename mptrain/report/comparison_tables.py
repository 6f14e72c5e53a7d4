"""The tables of a comparison: the one that everybody reads first, verdicts, equal work, objections."""

from __future__ import annotations

import math
from typing import Final

from mptrain.comparison.results import ArmResult, Comparison, Interval
from mptrain.report.formatting import TIMES, UNKNOWN, number, rate, share, signed
from mptrain.report.page import Bullets, Cell, Table, Tone, table
from mptrain.runlog.storage import readable_bytes

#: Pairs from which a ratio is shown with its interval: that of two pairs goes from next to nothing to hundreds.
_LEAST_FOR_RATIO: Final = 3

_TONES: Final[dict[str, Tone]] = {"better": "good", "equivalent": "good", "worse": "bad", "undecided": "warn"}


def comparison_table(comparison: Comparison) -> Table:
    """A row for each arm: metric, difference, speed, memory, skipped share, verdict."""
    term = next((run.term for result in comparison.arms for run in result.arm.runs), "samples")
    energy = any(result.energy for result in comparison.arms)
    head = (
        "arm",
        "runs",
        f"{comparison.metric} ± 95 % CI",
        f"Δ vs {comparison.reference} [95 % CI]",
        f"{term}/s",
        "speed",
        "peak",
        *(["energy"] if energy else []),
        "skipped",
        "verdict",
    )
    rows = [_row(comparison, result, energy) for result in comparison.arms]
    direction = "higher" if comparison.higher_is_better else "lower"
    note = (
        f"{comparison.metric} on {comparison.split} data, {direction} is better; a difference counts as none within "
        f"±{comparison.margin:g}. Ratios are geometric means of pairs, with their 95 % intervals."
    )
    return table(head, rows, numeric=tuple(range(1, len(head) - 1)), note=note)


def _row(comparison: Comparison, result: ArmResult, energy: bool) -> list[Cell | str]:
    peak = result.peak
    return [
        result.arm.name,
        _runs(result),
        value_and_error(result.metric),
        difference_and_interval(result.difference),
        rate(result.throughput.mean) if result.throughput else UNKNOWN,
        _ratio(result, result.speed),
        readable_bytes(round(peak.mean)) if peak and math.isfinite(peak.mean) else UNKNOWN,
        *([_ratio(result, result.energy)] if energy else []),
        share(result.skip_rate),
        Cell(_verdict(comparison, result), _TONES.get(result.verdict.word, "")),
    ]


def ratios_table(comparison: Comparison) -> Table | None:
    """What each arm takes, as ratios to the reference."""
    if len(comparison.arms) < 2:
        return None
    energy = any(result.energy for result in comparison.arms)
    rows: list[list[Cell | str]] = [
        [
            result.arm.name,
            _ratio(result, result.speed),
            _ratio(result, result.time),
            _ratio(result, result.memory),
            *([_ratio(result, result.energy)] if energy else []),
        ]
        for result in comparison.arms
    ]
    head = (
        "arm",
        "speed after warm-up",
        "training time, warm-up included",
        "peak memory",
        *(["energy"] if energy else []),
    )
    note = f"Against {comparison.reference}, with 95 % intervals from {_LEAST_FOR_RATIO} pairs on."
    return table(head, rows, numeric=tuple(range(1, len(head))), note=note)


def _runs(result: ArmResult) -> str:
    """How many runs have a metric, so that a mean over some of them is not taken for one over all."""
    total, lost = len(result.arm.runs), result.failed + result.missing
    return f"{total - lost} of {total}" if lost else f"{total}"


def _ratio(result: ArmResult, ratio: Interval | None) -> str:
    if result.verdict.word == "reference":
        return f"1.00{TIMES}"
    if ratio is None or not math.isfinite(ratio.mean):
        return UNKNOWN
    spread = "" if ratio.n < _LEAST_FOR_RATIO else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.mean:.2f}{TIMES}{spread}"


def _verdict(comparison: Comparison, result: ArmResult) -> str:
    equal = result.equivalence
    power = f", power {share(equal.power)}" if equal is not None and math.isfinite(equal.power) else ""
    if result.verdict.word in ("equivalent", "undecided"):
        return f"{result.verdict.word} (margin ±{comparison.margin:g}{power})"
    return result.verdict.word


def value_and_error(interval: Interval | None) -> str:
    """``0.9184 ± 0.0021``; the value alone where there is one run."""
    if interval is None:
        return UNKNOWN
    error = (interval.high - interval.low) / 2
    if not math.isfinite(error):
        return number(interval.mean)
    return f"{number(interval.mean, error)} ± {number(error, error)}"


def difference_and_interval(interval: Interval | None) -> str:
    """``+0.0005 [+0.0001, +0.0009]``; the value alone where there is one pair."""
    if interval is None:
        return UNKNOWN
    error = (interval.high - interval.low) / 2
    if not math.isfinite(error):
        return signed(interval.mean)
    return f"{signed(interval.mean, error)} [{signed(interval.low, error)}, {signed(interval.high, error)}]"


def verdict_list(comparison: Comparison) -> Bullets | None:
    """Why each arm has its verdict."""
    items = tuple(
        f"{result.arm.name} is {result.verdict.word}: {result.verdict.why.rstrip('.')}."
        for result in comparison.arms
        if result.verdict.word != "reference"
    )
    return Bullets(items) if items else None


def remarks_table(comparison: Comparison) -> Table | None:
    """Why arms are not faster or smaller, and what else deserves a sentence."""
    rows: list[list[Cell | str]] = [
        [result.arm.name if at == 0 else "", remark]
        for result in comparison.arms
        for at, remark in enumerate(result.remarks)
    ]
    return table(("arm", "remark"), rows) if rows else None


def aligned_table(comparison: Comparison) -> Table | None:
    """Every arm and the reference after the same number of updates, and of samples."""
    rows: list[list[Cell | str]] = [
        [
            result.arm.name,
            f"{aligned.at:,} {aligned.by}",
            aligned.quantity,
            value_and_error(aligned.value),
            difference_and_interval(aligned.difference),
        ]
        for result in comparison.arms
        for aligned in result.aligned
    ]
    if not rows:
        return None
    note = "So that skipped updates can neither hide nor count twice."
    head = ("arm", "after", "quantity", "value ± 95 % CI", f"Δ vs {comparison.reference} [95 % CI]")
    return table(head, rows, numeric=(3, 4), note=note)


def objections_list(comparison: Comparison) -> Bullets | None:
    """What makes the comparison less than fair."""
    items = [
        f"{'Not comparable: ' if objection.fatal else ''}{objection.what.rstrip('.')}."
        + (f" To mend it: {objection.hint.rstrip('.')}." if objection.hint else "")
        for objection in comparison.objections
    ]
    return Bullets(tuple(items), "warn") if items else None
