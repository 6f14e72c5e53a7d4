"""``mptrain doctor KEY=VALUE ...``: checks gradients in a precision, or a data set, and prints what it found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import say, waiting
from mptrain.engine.module_trail import LOSS
from mptrain.lab.doctor.check import ScalingReport, check_scaling, powers, scale_notes, verdict
from mptrain.lab.doctor.data_check import DataReport, check_data
from mptrain.lab.doctor.findings import error_share, why_no_range
from mptrain.lab.doctor.updates import lost_in_run
from mptrain.lab.finding import Finding
from mptrain.lab.step.ranges import LOST, ModuleScaling, scales_of
from mptrain.report.page import Block, Facts, Table, Text, facts, table
from mptrain.system.errors import EXIT_DATA, EXIT_NUMERICS, EXIT_OK
from mptrain.system.process_state import settings_restored
from mptrain.system.words import UNKNOWN, listed, rate
from mptrain.workloads.base.data_files import by_remark

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import Tensor

    from mptrain.cli.answer import Answer
    from mptrain.config.schema import Config


#: Maximum number of problems of each kind that are listed, and of files with the same remark.
PROBLEMS, FILES_NAMED = 100, 10

#: Maximum number of classes in the table; of more, the smallest and the largest ones are shown, half as many each.
CLASSES = 40

_SKIPPABLE = "fix or remove them; dataset.on_error=skip skips and counts unusable files"

#: Number of picture sizes that are listed.
_SIZES = 5


def doctor_data(config: Config) -> Outcome:
    """Read all files of a data set: its splits, classes, sizes, problems, and what training leaves out.

    Args:
        config: Validated configuration. Only its data set counts.

    Returns:
        The result; the exit code is 0, or 6 if training would stop at a file, the task needs more classes, or files
        have the same pixels in several splits or classes.

    Raises:
        MptrainError: The data set cannot be built.
    """
    with waiting() as tell:
        report = check_data(config, tell)
    counts, findings = data_findings(config, report)
    sizes = [f"{width}x{height} ({count:,})" for (width, height), count in report.sizes.items()]
    blocks: tuple[Block, ...] = (
        Text(f"{counts}; {report.shape}"),
        *survey_tables(report),
        facts(("most frequent sizes in pixels", listed(sizes, _SIZES))),
        findings,
    )
    code = EXIT_DATA if report.stopping or report.problems else EXIT_OK

    def data() -> Answer:
        from mptrain.lab.answers import DoctorAnswer

        return DoctorAnswer.checked(report, counts, class_counts(report))

    return Outcome(code, lambda: print_blocks(*blocks), data)


def data_findings(config: Config, report: DataReport) -> tuple[str, Facts]:
    """Return the number of problems of a data set in words, and the problems with the files that training converts.

    Args:
        config: Configuration with the data set.
        report: Result of the check of the files.
    """
    count = len(report.stopping)
    wrong = f"{count:,} error{'s stop' if count > 1 else ' stops'} training" if count else "no errors"
    if report.problems:
        wrong += f", {report.problems:,} other problem{'s' * (report.problems > 1)}"
    left_out = f", {len(report.skipped):,} skipped" if report.skipped else ""
    of = f" of {report.files:,}, evenly spaced" if report.read < report.files else ""
    read = f"; {report.read:,} files read{of}" if report.files else ""
    rows: list[tuple[str, str]] = []
    for hint in dict.fromkeys(report.hints.get(name, _SKIPPABLE) for name in report.stopping):
        those = [problem for problem in report.stopping.items() if report.hints.get(problem[0], _SKIPPABLE) == hint]
        rows += [*_each("found", those), ("hint", hint)]
    if leaks := [_same("splits", group.splits, group.names) for group in report.copies if group.leak]:
        hint = "remove all but one: an evaluation on training samples looks better than it is"
        rows += [*_each("found", leaks), ("hint", hint)]
    if conflicts := [_same("classes", group.labels, group.names) for group in report.copies if group.conflict]:
        rows += [*_each("found", conflicts), ("hint", "remove those in the wrong class")]
    rows += _each("note", ((name, f"skipped: {reason}") for name, reason in report.skipped.items()))
    remarks: list[tuple[str, Sequence[str]]] = [*by_remark(report.remarks).items()]
    remarks += [("same pixels", group.names) for group in report.copies if not group.leak and not group.conflict]
    rows += _each("note", ((remark, _counted(names)) for remark, names in remarks))
    rows += [("note", sentence) for sentence in (*report.warnings, *_lacking(report))]
    return f"{config.chosen.get('dataset', config.dataset.path)}: {wrong}{left_out}{read}", facts(*rows)


def survey_tables(report: DataReport) -> list[Table]:
    """Return tables with the numbers of samples and the lengths in each split, and with those of its classes.

    With more than `CLASSES` classes, the smallest and the largest of them in the training split are shown.

    Args:
        report: Result of the check of the data.
    """
    parts = list(report.samples)
    rows = [["samples", *(f"{count:,}" for count in report.samples.values())]]
    surveys = [report.surveys[part] for part in parts]
    for total in dict.fromkeys(name for survey in surveys for name in survey.totals):
        rows.append([total, *(f"{survey.totals.get(total, 0):,}" for survey in surveys)])
    for length in dict.fromkeys(name for survey in surveys for name in survey.lengths):
        rows.append([f"{length}, min / median / max", *(_span(survey.lengths.get(length)) for survey in surveys)])
    numeric = range(1, len(parts) + 1)
    tables = [table(("", *parts), rows, numeric)]
    if classes := _of_classes(report):
        tables.append(table(("class", *class_counts(report)), classes, numeric))
    return tables


def _of_classes(report: DataReport) -> list[list[str]]:
    """Return a row for each class: its number of samples in each split."""
    numbers = list(zip(report.labels, *class_counts(report).values(), strict=True)) if class_counts(report) else []
    half, left = CLASSES // 2, len(numbers) - CLASSES
    if left > 0:
        numbers.sort(key=lambda row: row[1])
    rows = [[name, *(f"{number:,}" for number in row)] for name, *row in numbers]
    between = [f"({left:,} classes in between)", *[""] * len(class_counts(report))]
    return [*rows[:half], between, *rows[-half:]] if left > 0 else rows


def class_counts(report: DataReport) -> dict[str, list[int]]:
    """Return the number of samples of each class, by split; empty for data without classes."""
    return {
        part: survey.labels.bincount(minlength=len(report.labels)).tolist()
        for part, survey in report.surveys.items()
        if report.labels and survey.labels is not None
    }


def _lacking(report: DataReport) -> list[str]:
    """Return a sentence for each split without samples of some classes; of the classes in training, if not of train."""
    sentences, known = [], set[str]()
    for part, numbers in class_counts(report).items():
        names = [name for name, number in zip(report.labels, numbers, strict=True) if not number and name not in known]
        if names:
            sentences.append(f"classes without samples in {part}: {listed(names, FILES_NAMED)}")
        known.update(names if part == "train" else ())
    return sentences


def _span(values: Tensor | None) -> str:
    if values is None or not len(values):
        return UNKNOWN
    numbers = values.double().quantile(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist()
    return " / ".join(map(rate, numbers))


def _same(what: str, where: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
    """Return the splits or classes of files with the same pixels, and the files."""
    return f"same pixels in {what} {' and '.join(dict.fromkeys(where))}", ", ".join(names)


def _each(head: str, problems: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    rows = [(head, f"{name}: {reason}") for name, reason in problems]
    return [*rows[:PROBLEMS], (head, f"{len(rows) - PROBLEMS:,} more")] if len(rows) > PROBLEMS else rows


def _counted(names: Sequence[str]) -> str:
    return f"{len(names):,} files: {listed(names, FILES_NAMED)}" if len(names) > 1 else names[0]


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
        lost = () if report.evidence.refused else lost_in_run(config)
    result = f"{config.model_title} in {config.precision.name}: {verdict(report)}"
    notes = (*scale_notes(report), *report.notes, *lost)
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
        worst = max(members, key=lambda module: module.best if module.judged else 0.0)
        good = sorted(set.intersection(*(set(module.good) for module in members)))
        shown = f"{name} ({len(members)})" if len(members) > 1 else name or "(model)"
        fp32, forward = max(module.fp32 for module in members), max(module.expected for module in members)
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
        "inaccurate in FP32": any(module.ill_conditioned for module in members),
        "not proportional": any(not module.in_proportion for module in members),
        "never finite": any(module.judged and not module.finite for module in members),
        "error too large": any(module.wrong and module.best > module.allowed_loss for module in members),
        "inexact": any(module.wrong for module in members),
        "drifts": any(module.drifts for module in members),
        "zero up to rounding": all(module.nothing for module in members),
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
