"""``mptrain doctor KEY=VALUE ...``: does this model train rightly in this precision, and at which loss scales?"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.cli.doctor_data import data_lines
from mptrain.cli.messages import colourful, printable, say
from mptrain.cli.rows import width_of
from mptrain.errors import EXIT_DATA, EXIT_NUMERICS, EXIT_OK
from mptrain.inspection.data_check import check_data
from mptrain.inspection.findings import Finding
from mptrain.inspection.scale_check import ScalingReport, check_scaling
from mptrain.inspection.scale_check_findings import why_no_range
from mptrain.inspection.scale_check_ranges import LOST, ModuleScaling, Scales, scales_of
from mptrain.numerics.formats import scale_in_words
from mptrain.probe.module_trail import LOSS

if TYPE_CHECKING:
    from mptrain.config.schema import Config

#: Rows of the table at most: beyond, modules are shown by the module that holds them.
ROWS = 32

#: Names that are listed of a finding at most.
NAMED = 4

_FORMATS = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


def doctor_model(config: Config) -> int:
    """Print what is wrong with the files of the data set, and what the first step's gradients say about a configuration.

    Args:
        config: Checked.

    Returns:
        0, 4 where something is wrong with the model, or 6 where training stops at a file.

    Raises:
        MptrainError: The parts cannot be built, or do not get through their first batch.
    """
    with _Waiting() as waiting:
        data = check_data(config, waiting.tell)
    if lines := data_lines(config.chosen.get("dataset", config.dataset.path), data, width_of(sys.stdout)):
        say("\n".join(lines if data.stopping else [*lines, ""]))
    if data.stopping:
        return EXIT_DATA
    with _Waiting() as waiting:
        report = check_scaling(config, waiting.tell)
    name = f"{config.chosen.get('model', config.model.path)} in {config.precision.name}"
    width = width_of(sys.stdout)
    lines = textwrap.wrap(f"{name}: {verdict(report)}", width)
    if report.modules:
        lines += ["", *table(report.modules, width)]
        lines += ["", *_wrapped("compared: ", _compared(report), width)]
    for sentence in [*_about_scales(report), *report.notes]:
        lines += _wrapped("note: ", sentence, width)
    for finding in report.findings:
        lines += ["", *_wrapped("found: ", _said(finding), width), *_wrapped("hint: ", finding.hint, width)]
    say("\n".join(lines), styled=True)
    return EXIT_NUMERICS if report.findings else EXIT_OK


def verdict(report: ScalingReport) -> str:
    """One sentence: whether something is wrong, and which loss scales are right."""
    count = len(report.findings)
    wrong = "nothing is wrong" if not count else "something is wrong" if count == 1 else f"{count} things are wrong"
    if why := why_no_range(report.evidence, report.findings):
        return f"{wrong}; {why}"
    scales = scales_of(report.modules)
    if not scales.good:
        return f"{wrong}; no loss scale is right for all modules"
    return f"{wrong}; loss scales {_span(scales.good)} are right, 2^{scales.best} is in their middle"


def table(modules: Sequence[ModuleScaling], width: int) -> list[str]:
    """A row for each module, or, where they are many, for what holds them: errors as shares, scales as powers of two."""
    rows = [("module", "FP32", "forward", "backward", "scales", "note")]
    for name, members in _grouped(modules).items():
        worst = max(members, key=lambda one: one.best if one.judged else 0.0)
        good = sorted(set.intersection(*(set(one.good) for one in members)))
        shown = f"{name} ({len(members)})" if len(members) > 1 else name or "(model)"
        fp32 = max(one.fp32 for one in members)
        scales = _span(good) if worst.judged else "-"
        forward = max(one.expected for one in members)
        rows.append((shown, f"{fp32:.0e}", _share(forward), _share(worst.best), scales, _note(members)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    widths[0] = min(widths[0], max(16, width - sum(widths[1:]) - 10 - max(len(row[5]) for row in rows) - 2))
    lines = []
    for row in rows:
        first = row[0] if len(row[0]) <= widths[0] else "…" + row[0][1 - widths[0] :]
        cells = [first.ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(row[1:4], widths[1:4], strict=True))]
        lines.append("  ".join([*cells, row[4].ljust(widths[4]), row[5]]).rstrip())
    return lines


def _grouped(modules: Sequence[ModuleScaling]) -> dict[str, list[ModuleScaling]]:
    """Modules by name, cut to so many of its parts that there are few enough groups."""
    depth = max(module.name.count(".") + 1 for module in modules)
    while True:
        groups: dict[str, list[ModuleScaling]] = {}
        for module in modules:
            groups.setdefault(".".join(module.name.split(".")[:depth]), []).append(module)
        if len(groups) <= ROWS or depth == 1:
            return groups
        depth -= 1


def _note(members: Sequence[ModuleScaling]) -> str:
    """What is remarkable about modules, in few words."""
    for known, words in (
        (any(one.ill_conditioned for one in members), "wrong in FP32"),
        (any(not one.in_proportion for one in members), "not in proportion"),
        (any(one.judged and not one.finite for one in members), "never finite"),
        (any(one.wrong for one in members), "too far off"),
        (any(one.drifts for one in members), "drifts"),
        (all(one.nothing for one in members), "zero but for rounding"),
    ):
        if known:
            return words
    return ""


def _compared(report: ScalingReport) -> str:
    form, reference = _FORMATS[report.evidence.compute], _FORMATS[report.reference]
    return (
        f"one step of {report.samples} samples, the first, without an update. Errors of gradients, relative L2 norms: FP32 against "
        f"{reference}; forward: what {form} in the forward pass makes of them, against {reference}; backward: what the backward pass "
        f"adds at its best scale, right up to {_share(report.modules[0].tolerance)}. scales: where underflow takes no "
        f"more than {_share(LOST)} of a gradient, or twice the forward error up to half of it, and nothing overflows. Later gradients may be larger or "
        f"smaller"
    )


def _about_scales(report: ScalingReport) -> list[str]:
    """How the configured scales compare with the good ones."""
    if why_no_range(report.evidence, report.findings):
        return []
    scales = scales_of(report.modules)
    sentences = [_configured(scales, name, *scale) for name, scale in report.evidence.scales.items()]
    if scales.overflows is not None:
        sentences.insert(0, f"from 2^{scales.overflows} on gradients overflow")
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _configured(scales: Scales, learner: str, scale: float, constant: bool) -> str:
    whose = "" if learner == "main" else f" of the {learner}"
    words = f"{'the constant scale' if constant else 'the first scale'}{whose}, {scale_in_words(scale)},"
    suits = scales.suits(scale)
    if not scales.good:
        return ""
    if suits is None:
        return "" if constant else f"{words} is beyond those that were tried"
    if suits:
        return f"{words} is right"
    if constant:
        return ""  # that is a finding
    return (
        f"{words} {'is too high and will come down' if scale > 2.0 ** scales.good[-1] else 'is too low and will grow'}"
    )


def _said(finding: Finding) -> str:
    names = [("the model itself" if not name else "the loss" if name == LOSS else name) for name in finding.where]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}: {finding.what}"


def _span(exponents: Sequence[int]) -> str:
    if not exponents:
        return "none"
    return f"2^{exponents[0]}" if len(exponents) == 1 else f"2^{exponents[0]} to 2^{exponents[-1]}"


def _share(error: float) -> str:
    """A relative error as per cent, in at most six characters."""
    if error == float("inf"):
        return "inf"
    return f"{100 * error:.2g} %" if error < 0.0995 else f"{100 * error:.0f} %"


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        head + printable(text), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


class _Waiting:
    """Says on a terminal what is being done, on a line of its own that goes away; nothing anywhere else."""

    def __init__(self) -> None:
        self._shows = colourful(sys.stderr)

    def __enter__(self) -> _Waiting:
        return self

    def tell(self, what: str) -> None:
        """Replace the line."""
        if self._shows:
            print(f"\r\x1b[2K{what} ...", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._shows:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
