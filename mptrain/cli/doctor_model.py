"""``mptrain doctor KEY=VALUE ...``: checks gradients in a precision, and finds usable loss scales and data errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.build.parts import settings_restored
from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.doctor_data import class_counts, data_findings
from mptrain.cli.messages import say, waiting
from mptrain.inspection.data_check import check_data
from mptrain.inspection.doctor import ScalingReport, check_scaling
from mptrain.inspection.doctor_findings import why_no_range
from mptrain.inspection.doctor_ranges import LOST, ModuleScaling, UsableScales, scales_of
from mptrain.inspection.findings import Finding, label
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.words import UNKNOWN, counted, listed, share
from mptrain.probe.module_trail import LOSS
from mptrain.report.page import Table, Text, facts, table
from mptrain.system.errors import EXIT_DATA, EXIT_NUMERICS, EXIT_OK

if TYPE_CHECKING:
    from mptrain.config.schema import Config

#: Maximum number of table rows; with more modules, a row stands for all modules inside the same parent.
ROWS = 32

#: Maximum number of module names that are listed for a finding.
NAMED = 4

_FORMATS = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


@settings_restored()
def doctor_model(config: Config) -> Outcome:
    """Check the data files of a configuration and the gradients of its first step.

    The gradients in the configured precision, at many loss scales, are compared with those in a wider one.

    Args:
        config: Validated configuration.

    Returns:
        The problems found; the exit code is 0, 4 if the model has a problem, or 6 if training would stop at a file or
        the data has a problem. Those of the data are printed before the model is checked.

    Raises:
        MptrainError: The parts cannot be built, or the first batch fails.
    """
    with waiting() as tell:
        data = check_data(config, tell)
    counts, of_data = data_findings(config, data)
    if data.files or data.stopping or data.skipped or data.warnings:
        print_blocks(Text(counts), of_data)
    checked = (data, counts, class_counts(data))
    if data.stopping:
        return Outcome(EXIT_DATA, lambda: None, lambda answers: answers.DoctorAnswer.checked(*checked))
    if data.files:
        say("")
    with waiting() as tell:
        report = check_scaling(config, tell)
    result = f"{config.model_title} in {config.precision.name}: {verdict(report)}"
    notes = (*_largest_error(report), *_about_scales(report), *report.notes)
    blocks = (
        Text(result),
        scale_table(report.modules) if report.modules else None,
        facts(("compared", _compared(report) if report.modules else ""), *(("note", sentence) for sentence in notes)),
        *(facts(("found", _said(finding)), ("hint", finding.hint)) for finding in report.findings),
    )
    usable = () if why_no_range(report.evidence, report.findings) else scales_of(report.modules).good
    own = {"verdict": result, "notes": notes, "usable_exponents": usable}
    return Outcome(
        EXIT_NUMERICS if report.findings else EXIT_DATA if data.problems else EXIT_OK,
        lambda: print_blocks(*blocks),
        lambda answers: answers.DoctorAnswer.checked(*checked, answers.Model.of(report, **own)),
    )


def verdict(report: ScalingReport) -> str:
    """Summarise a check of a model's gradients in one sentence: the number of problems and the usable loss scales."""
    count = len(report.findings)
    wrong = f"{counted(count, 'problem')} found"
    if why := why_no_range(report.evidence, report.findings):
        return f"{wrong}; {why}"
    scales = scales_of(report.modules)
    if not scales.good:
        return f"{wrong}; no loss scale is usable for all modules"
    return f"{wrong}; usable loss scales: {_span(scales.good)}, middle 2^{scales.best}"


def _largest_error(report: ScalingReport) -> list[str]:
    """Return a sentence on the module whose gradients half precision changes most; nothing if none is judged."""
    errors = {one.name: math.hypot(one.expected, one.best) for one in report.modules if one.judged}
    worst = max(errors, key=lambda one: errors[one], default=None)
    if worst is None or math.isinf(errors[worst]):
        return []
    return [f"gradients are off by up to {_share(errors[worst])}, most in {label(worst)}"]


def scale_table(modules: Sequence[ModuleScaling]) -> Table:
    """Return a table with the gradient errors and usable loss scales of each module of a model.

    With more than `ROWS` modules, a row stands for all modules inside the same parent. Errors are percentages; loss
    scales are powers of two.

    Args:
        modules: Measurements of the modules, at least one.
    """
    rows = []
    for name, members in _grouped(modules).items():
        worst = max(members, key=lambda one: one.best if one.judged else 0.0)
        good = sorted(set.intersection(*(set(one.good) for one in members)))
        shown = f"{name} ({len(members)})" if len(members) > 1 else name or "(model)"
        fp32, forward = max(one.fp32 for one in members), max(one.expected for one in members)
        scales = _span(good) if worst.judged else UNKNOWN
        rows.append((shown, f"{fp32:.0e}", _share(forward), _share(worst.best), scales, _note(members)))
    return table(("module", "FP32", "forward", "backward", "scales", "note"), rows, numeric=(1, 2, 3))


def _grouped(modules: Sequence[ModuleScaling]) -> dict[str, list[ModuleScaling]]:
    """Group modules by the longest prefix of their dotted names that gives at most `ROWS` groups."""
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
    """Return a short remark on the most serious problem of the modules; empty for none."""
    remarks = {
        "inaccurate in FP32": any(one.ill_conditioned for one in members),
        "not proportional": any(not one.in_proportion for one in members),
        "never finite": any(one.judged and not one.finite for one in members),
        "error too large": any(one.wrong for one in members),
        "drifts": any(one.drifts for one in members),
        "zero up to rounding": all(one.nothing for one in members),
    }
    return next((words for words, holds in remarks.items() if holds), "")


def _compared(report: ScalingReport) -> str:
    form, reference = _FORMATS[report.evidence.compute], _FORMATS[report.reference]
    return (
        f"one step of {report.samples} samples, the first, without an update. Errors are relative L2 norms of "
        f"gradients. FP32: against {reference}; forward: error caused by {form} in the forward pass, against "
        f"{reference}; backward: error added by the backward pass at its best scale, at most "
        f"{_share(report.modules[0].tolerance)} is accepted. scales: those at which no gradient overflows and "
        f"underflow loses at most {_share(LOST)} of a gradient, or twice the forward error but no more than half of "
        f"the gradient. Later gradients may be larger or smaller"
    )


def _about_scales(report: ScalingReport) -> list[str]:
    """Return sentences that compare the configured loss scales with the usable ones."""
    if why_no_range(report.evidence, report.findings):
        return []
    scales = scales_of(report.modules)
    sentences = [_configured(scales, name, *scale) for name, scale in report.evidence.scales.items()]
    if scales.overflows is not None:
        sentences.insert(0, f"gradients overflow at 2^{scales.overflows} and above")
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _configured(scales: UsableScales, learner: str, scale: float, constant: bool) -> str:
    whose = "" if learner == "main" else f" of the {learner}"
    suits = scales.suits(scale)
    if not scales.good or (constant and not suits):  # an unusable constant scale is already a finding
        return ""
    how = "is usable"
    if suits is None:
        how = "is outside the tested range"
    elif not suits:
        how = "is too high and will decrease" if scale > 2.0 ** scales.good[-1] else "is too low and will grow"
    return f"{'the constant scale' if constant else 'the initial scale'}{whose}, {scale_in_words(scale)}, {how}"


def _said(finding: Finding) -> str:
    names = [("the model itself" if not name else "the loss" if name == LOSS else name) for name in finding.where]
    return f"{listed(names, NAMED)}: {finding.what}"


def _span(exponents: Sequence[int]) -> str:
    if not exponents:
        return "none"
    return f"2^{exponents[0]}" if len(exponents) == 1 else f"2^{exponents[0]} to 2^{exponents[-1]}"


def _share(error: float) -> str:
    return "inf" if math.isinf(error) else share(error)
