"""``mptrain doctor KEY=VALUE ...``: does this model train rightly in this precision, and at which loss scales?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mptrain.cli.messages import line_width, say, supports_colour, wrapped
from mptrain.errors import EXIT_DATA, EXIT_NUMERICS, EXIT_OK
from mptrain.inspection.data_check import DataReport, check_data
from mptrain.inspection.findings import Finding
from mptrain.inspection.scale_check import ScalingReport, check_scaling
from mptrain.inspection.scale_check_findings import why_no_range
from mptrain.inspection.scale_check_ranges import LOST, ModuleScaling, UsableScales, scales_of
from mptrain.numerics.formats import scale_in_words
from mptrain.probe.module_trail import LOSS
from mptrain.workloads.base.faulty_samples import by_remark

if TYPE_CHECKING:
    from mptrain.config.schema import Config

#: Rows of the table at most: beyond, modules are shown by the module that holds them.
ROWS = 32

#: The most files of each kind that are named.
FILES_NAMED = 100

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
    with _waiting() as tell:
        data = check_data(config, tell)
    if lines := data_lines(config.chosen.get("dataset", config.dataset.path), data):
        say("\n".join(lines if data.stopping else [*lines, ""]))
    if data.stopping:
        return EXIT_DATA
    with _waiting() as tell:
        report = check_scaling(config, tell)
    name = f"{config.chosen.get('model', config.model.path)} in {config.precision.name}"
    lines = wrapped(verdict(report), f"{name}: ", indent="")
    if report.modules:
        lines += ["", *table(report.modules, line_width(sys.stdout)), "", *wrapped(_compared(report), "compared: ")]
    for sentence in [*_about_scales(report), *report.notes]:
        lines += wrapped(sentence, "note: ")
    for finding in report.findings:
        lines += ["", *wrapped(_said(finding), "found: "), *wrapped(finding.hint, "hint: ")]
    say("\n".join(lines), styled=True)
    return EXIT_NUMERICS if report.findings else EXIT_OK


def data_lines(name: str, report: DataReport) -> list[str]:
    """Return what there is to say, in lines: every file that training stops at, leaves out or converts; nothing of data without files.

    Args:
        name: Of the data set.
        report: What was found.
    """
    if not (report.files or report.stopping or report.skipped):
        return []
    count = len(report.stopping)
    things = f"{count:,} things stop" if count > 1 else "one thing stops"
    wrong = f"{things} training" if count else "nothing stops training"
    left_out = f", {len(report.skipped):,} left out" if report.skipped else ""
    of = f" of {report.files:,}, evenly spread" if report.read < report.files else ""
    lines = [f"{name}: {wrong}{left_out}; {report.read:,} files read{of}"]
    said = _each("found", report.stopping)
    if count:
        hint = "mend or remove them; dataset.on_error=skip leaves out and counts files that cannot be used"
        said.append(("hint: ", hint))
    said += _each("note", {place: f"left out: {reason}" for place, reason in report.skipped.items()})
    for remark, places in by_remark(report.remarks).items():
        more = f" and {len(places) - FILES_NAMED:,} more" if len(places) > FILES_NAMED else ""
        said.append(("note: ", f"{remark}: {', '.join(places[:FILES_NAMED])}{more}"))
    return [*lines, *(line for head, text in said for line in wrapped(text, head))]


def _each(head: str, problems: Mapping[str, str]) -> list[tuple[str, str]]:
    said = [(f"{head}: ", f"{place}: {reason}") for place, reason in list(problems.items())[:FILES_NAMED]]
    return [*said, (f"{head}: ", f"{len(problems) - FILES_NAMED:,} more")] if len(problems) > FILES_NAMED else said


def verdict(report: ScalingReport) -> str:
    """Return one sentence: whether something is wrong, and which loss scales are right."""
    count = len(report.findings)
    wrong = "nothing is wrong" if not count else "something is wrong" if count == 1 else f"{count} things are wrong"
    if why := why_no_range(report.evidence, report.findings):
        return f"{wrong}; {why}"
    scales = scales_of(report.modules)
    if not scales.good:
        return f"{wrong}; no loss scale is right for all modules"
    return f"{wrong}; loss scales {_span(scales.good)} are right, 2^{scales.best} is in their middle"


def table(modules: Sequence[ModuleScaling], width: int) -> list[str]:
    """Return a row for each module, or, where they are many, for what holds them: errors as shares, scales as powers of two."""
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
    deepest = max(module.name.count(".") + 1 for module in modules)
    groups: dict[str, list[ModuleScaling]] = {}
    for depth in range(deepest, 0, -1):
        groups = {}
        for module in modules:
            groups.setdefault(".".join(module.name.split(".")[:depth]), []).append(module)
        if len(groups) <= ROWS:
            break
    return groups


def _note(members: Sequence[ModuleScaling]) -> str:
    """Return a remark on modules, in few words."""
    remarks = {
        "wrong in FP32": any(one.ill_conditioned for one in members),
        "not in proportion": any(not one.in_proportion for one in members),
        "never finite": any(one.judged and not one.finite for one in members),
        "too far off": any(one.wrong for one in members),
        "drifts": any(one.drifts for one in members),
        "zero but for rounding": all(one.nothing for one in members),
    }
    return next((words for words, holds in remarks.items() if holds), "")


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
    """Return sentences that compare the configured scales with the good ones."""
    if why_no_range(report.evidence, report.findings):
        return []
    scales = scales_of(report.modules)
    sentences = [_configured(scales, name, *scale) for name, scale in report.evidence.scales.items()]
    if scales.overflows is not None:
        sentences.insert(0, f"from 2^{scales.overflows} on gradients overflow")
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _configured(scales: UsableScales, learner: str, scale: float, constant: bool) -> str:
    whose = "" if learner == "main" else f" of the {learner}"
    suits = scales.suits(scale)
    if not scales.good or (constant and not suits):  # a constant one that is wrong is a finding
        return ""
    how = "is right"
    if suits is None:
        how = "is beyond those that were tried"
    elif not suits:
        how = "is too high and will come down" if scale > 2.0 ** scales.good[-1] else "is too low and will grow"
    return f"{'the constant scale' if constant else 'the first scale'}{whose}, {scale_in_words(scale)}, {how}"


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


@contextlib.contextmanager
def _waiting() -> Iterator[Callable[[str], None]]:
    """Give a function that says on a terminal what is being done, on a line of its own that goes away; nothing anywhere else."""
    shows = supports_colour(sys.stderr)

    def tell(what: str) -> None:
        if shows:
            print(f"\r\x1b[2K{what}", end="", file=sys.stderr, flush=True)

    try:
        yield lambda what: tell(f"{what} ...")
    finally:
        tell("")
