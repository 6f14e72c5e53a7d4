"""Terminal output of a comparison: a table with a row for each arm (all runs of one configuration), then remarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from mptrain import words
from mptrain.cli.messages import printable, say, wrapped
from mptrain.cli.tables import BREAK, Column, columns_of, render_table
from mptrain.comparison.configurations import ABSENT, config_differences, flat_settings
from mptrain.config.config_diff import IGNORED
from mptrain.config.value_checks import show
from mptrain.runlog import readable_bytes

if TYPE_CHECKING:
    from mptrain.comparison.results import ArmResult, Comparison, Interval, RunMeasures

#: Minimum number of pairs for which a ratio is shown with its interval. With two pairs the interval is useless: it
#: extends from almost zero to hundreds.

_COLOURS = {"reference": "dim", "better": "green", "equivalent": "green", "worse": "red", "undecided": "yellow"}


def print_comparison(comparison: Comparison, title: str = "") -> None:
    """Print the table of a comparison with a row per arm, the reason for each verdict, and the checks of fairness.

    An arm is all runs of one configuration, which differ in their seeds.

    Args:
        comparison: The judged comparison.
        title: Heading above the table; empty for none.

    Raises:
        StorageError: Standard output cannot be written.
    """
    lines = render_table(_columns(comparison), piped_width=160)
    lines += ["", *_paragraphs(comparison)]
    say("\n".join([*([title] if title else []), *lines]), styled=True)


def print_side_by_side(runs: Sequence[RunMeasures], reason: str) -> None:
    """Print single runs beside each other, with the settings in which they differ, and no verdict.

    Args:
        runs: Measures of two or more runs.
        reason: Why there is no verdict.

    Raises:
        StorageError: Standard output cannot be written.
    """
    first, *others = runs
    differing = dict.fromkeys(key for run in others for key in config_differences(first.config, run.config, IGNORED))
    metrics = dict.fromkeys(name for run in runs for name in words.metric_order(run.metrics))
    rows: list[tuple[str, list[str]]] = [("ended", [run.status for run in runs])]
    rows += [(key, [show(flat_settings(run.config).get(key, ABSENT)) for run in runs]) for key in differing]
    rows += [
        (f"{name} on {first.split}", [f"{run.metrics[name]:.4f}" if name in run.metrics else "-" for run in runs])
        for name in metrics
    ]
    rows += [
        ("steps", [f"{run.steps:,}" for run in runs]),
        ("skipped", [f"{run.skipped:,}" for run in runs]),
        (f"{first.term}/s", [words.rate(run.terms_per_second) if run.terms_per_second else "-" for run in runs]),
        ("peak memory", [readable_bytes(run.peak_memory) if run.peak_memory else "-" for run in runs]),
    ]
    cells = [[name, *values] for name, values in rows]
    titles = ["", *(run.path for run in runs)]
    table = columns_of(
        [escape(printable(title)) for title in titles], ([escape(printable(c)) for c in row] for row in cells)
    )
    seeds = (
        "single runs: what differs may be chance; to compare, train each arm with several seeds (mptrain help compare)"
    )
    say(
        "\n".join([*render_table(table, piped_width=160), "", *wrapped(reason, "no verdict: "), *wrapped(seeds)]),
        styled=True,
    )


def _columns(comparison: Comparison) -> list[Column]:
    better = "higher" if comparison.higher_is_better else "lower"
    reference = next(result for result in comparison.arms if result.arm.name == comparison.reference)
    term = reference.arm.runs[0].term
    energy = any(result.energy for result in comparison.arms)

    def column(
        title: str, cell: Callable[[ArmResult], str], importance: int | None = None, *, is_text: bool = False
    ) -> Column:
        return Column(title, tuple(cell(result) for result in comparison.arms), importance, is_text=is_text)

    found = [
        column("arm", lambda result: escape(printable(result.arm.name)), is_text=True),
        column("n", _counts),
        column(
            f"{escape(comparison.metric)} on {comparison.split}{BREAK}± 95 %\n({better} is{BREAK}better)",
            lambda result: _plus_minus(result.metric),
        ),
        column(f"Δ vs {escape(comparison.reference)}\n[95 % CI]", lambda result: _between(result.difference)),
        column(f"{term}/s", lambda result: words.rate(result.throughput.mean) if result.throughput else "", 0),
        column("speed", lambda result: _ratio(result.speed, is_reference=result is reference), 3),
        column("peak\nmemory", lambda result: readable_bytes(round(result.peak.mean)) if result.peak else "", 2),
        column("energy", lambda result: _ratio(result.energy, is_reference=result is reference), 2),
        column("skipped", lambda result: words.share(result.skip_rate), 1),
        column("verdict", _verdict, is_text=True),
    ]
    return [one for one in found if energy or one.title != "energy"]


def _counts(result: ArmResult) -> str:
    lost = result.failed + result.missing
    runs = len(result.arm.runs)
    return f"{runs - lost} of {runs}" if lost else str(runs)


def _verdict(result: ArmResult) -> str:
    word = result.verdict.word
    colour, margin = _COLOURS[word], ""
    if word == "equivalent" and result.equivalence:
        margin = f"{BREAK}(margin ±{result.equivalence.margin:g})"
    elif word == "undecided" and result.equivalence:
        margin = f"{BREAK}(power {100 * result.equivalence.power:.0f} %)"
    return f"[{colour}]{word}[/]{margin}"


def _plus_minus(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    half = (interval.high - interval.low) / 2
    return f"{interval.mean:.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")


def _between(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if math.isnan(interval.low):
        return f"{interval.mean:+.4f}"
    return f"{interval.mean:+.4f}{BREAK}[{interval.low:+.4f}, {interval.high:+.4f}]"


def _ratio(interval: Interval | None, *, is_reference: bool) -> str:
    if is_reference:
        return "1.00x"
    if interval is None:
        return "-"
    shown = f"{interval.mean:.2f}x"
    return shown if math.isnan(interval.low) else f"{shown}{BREAK}[{interval.low:.2f}, {interval.high:.2f}]"


def _paragraphs(comparison: Comparison) -> list[str]:
    """Return the lines below the table: the reason for each verdict, and the checks of fairness."""
    said = [
        (f"{result.arm.name} {result.verdict.word}: ", result.verdict.why)
        for result in comparison.arms
        if result.verdict.word != "reference"
    ]
    remarks: dict[str, list[str]] = {}  # many are about the machine and apply to several arms
    for result in comparison.arms:
        for remark in result.remarks:
            remarks.setdefault(remark, []).append(result.arm.name)
    said += [(f"{', '.join(names)}: ", remark) for remark, names in remarks.items()]
    said += [("unfair: " if objection.fatal else "caveat: ", objection.what) for objection in comparison.objections]
    checks = comparison.checks
    if len(checks) > 1:
        checks = (f"{len(checks)} conditions of a fair comparison hold; the report lists them",)
    said += [("checked: ", check) for check in checks] + [("note: ", note) for note in comparison.notes]
    return [line for head, text in said for line in wrapped(text, head)]
