"""``mptrain doctor KEY=VALUE ...``: checks gradients in a precision, and finds usable loss scales and data errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import say, waiting
from mptrain.lab.commands.doctor_data import class_counts, data_findings
from mptrain.lab.data_check import check_data
from mptrain.lab.doctor import ScalingReport, check_scaling
from mptrain.lab.doctor_findings import why_no_range
from mptrain.lab.doctor_ranges import LOST, ModuleScaling, scales_of
from mptrain.lab.doctor_words import error_share, powers, scale_notes, verdict
from mptrain.lab.findings import Finding
from mptrain.numerics.words import UNKNOWN, listed
from mptrain.probe.module_trail import LOSS
from mptrain.report.page import Table, Text, facts, table
from mptrain.system.errors import EXIT_DATA, EXIT_NUMERICS, EXIT_OK
from mptrain.system.process_state import settings_restored

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from mptrain.cli.answer import Answer
    from mptrain.config.schema import Config
    from mptrain.lab.data_check import DataReport

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
        return Outcome(EXIT_DATA, lambda: None, lambda: _answer(checked))
    if data.files:
        say("")
    with waiting() as tell:
        report = check_scaling(config, tell)
    result = f"{config.model_title} in {config.precision.name}: {verdict(report)}"
    notes = (*scale_notes(report), *report.notes)
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
        lambda: _answer(checked, report, own),
    )


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
        scales = powers(good) if worst.judged else UNKNOWN
        rows.append((shown, f"{fp32:.0e}", error_share(forward), error_share(worst.best), scales, _note(members)))
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
        "error too large": any(one.wrong and one.best > one.allowed_loss for one in members),
        "inexact": any(one.wrong for one in members),
        "drifts": any(one.drifts for one in members),
        "zero up to rounding": all(one.nothing for one in members),
    }
    return next((words for words, holds in remarks.items() if holds), "")


def _compared(report: ScalingReport) -> str:
    form, reference = _FORMATS[report.evidence.compute], _FORMATS[report.reference]
    return (
        f"one step of {report.samples} samples, the first, without an update. Errors are relative L2 norms of "
        f"gradients. FP32: against {reference}; forward: error caused by {form} in the forward pass, against "
        f"{reference}; backward: error added by the backward pass at its best scale; up to "
        f"{error_share(report.modules[0].tolerance)} is rounding, {error_share(LOST)} is borne by training. scales: "
        f"those at which no gradient overflows and underflow loses at most {error_share(LOST)} of a gradient, or twice "
        f"the forward error but no more than half of the gradient. Later gradients may be larger or smaller"
    )


def _said(finding: Finding) -> str:
    names = [("the model itself" if not name else "the loss" if name == LOSS else name) for name in finding.where]
    return f"{listed(names, NAMED)}: {finding.what}"


def _answer(
    data: tuple[DataReport, str, dict[str, list[int]]],
    report: ScalingReport | None = None,
    own: Mapping[str, Any] | None = None,
) -> Answer:
    """Return the object that ``--json`` prints: the data set, and unless that stops training the model."""
    from mptrain.lab.answers import DoctorAnswer, Model

    return DoctorAnswer.checked(*data, Model.of(report, **(own or {})) if report else None)
