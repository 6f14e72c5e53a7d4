"""``mptrain doctor dataset=NAME ...``: what is in a data set, and what training would stop at, leave out or convert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import waiting
from mptrain.lab.data_check import DataReport, check_data
from mptrain.numerics.words import UNKNOWN, listed, rate
from mptrain.report.page import Block, Facts, Table, Text, facts, table
from mptrain.system.errors import EXIT_DATA, EXIT_OK
from mptrain.workloads.base.faulty_samples import by_remark

if TYPE_CHECKING:
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
    said: list[tuple[str, str]] = []
    for hint in dict.fromkeys(report.hints.get(place, _SKIPPABLE) for place in report.stopping):
        those = [one for one in report.stopping.items() if report.hints.get(one[0], _SKIPPABLE) == hint]
        said += [*_each("found", those), ("hint", hint)]
    if leaks := [_same("splits", one.splits, one.names) for one in report.copies if one.leak]:
        hint = "remove all but one: an evaluation on training samples looks better than it is"
        said += [*_each("found", leaks), ("hint", hint)]
    if conflicts := [_same("classes", one.labels, one.names) for one in report.copies if one.conflict]:
        said += [*_each("found", conflicts), ("hint", "remove those in the wrong class")]
    said += _each("note", ((place, f"skipped: {reason}") for place, reason in report.skipped.items()))
    remarks: list[tuple[str, Sequence[str]]] = [*by_remark(report.remarks).items()]
    remarks += [("same pixels", one.names) for one in report.copies if not one.leak and not one.conflict]
    said += _each("note", ((remark, _counted(places)) for remark, places in remarks))
    said += [("note", sentence) for sentence in (*report.warnings, *_lacking(report))]
    return f"{config.chosen.get('dataset', config.dataset.path)}: {wrong}{left_out}{read}", facts(*said)


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
    said, known = [], set[str]()
    for part, numbers in class_counts(report).items():
        names = [name for name, number in zip(report.labels, numbers, strict=True) if not number and name not in known]
        if names:
            said.append(f"classes without samples in {part}: {listed(names, FILES_NAMED)}")
        known.update(names if part == "train" else ())
    return said


def _span(values: Tensor | None) -> str:
    if values is None or not len(values):
        return UNKNOWN
    numbers = values.double().quantile(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist()
    return " / ".join(map(rate, numbers))


def _same(what: str, where: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
    """Return the splits or classes of files with the same pixels, and the files."""
    return f"same pixels in {what} {' and '.join(dict.fromkeys(where))}", ", ".join(names)


def _each(head: str, problems: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    said = [(head, f"{place}: {reason}") for place, reason in problems]
    return [*said[:PROBLEMS], (head, f"{len(said) - PROBLEMS:,} more")] if len(said) > PROBLEMS else said


def _counted(names: Sequence[str]) -> str:
    return f"{len(names):,} files: {listed(names, FILES_NAMED)}" if len(names) > 1 else names[0]
