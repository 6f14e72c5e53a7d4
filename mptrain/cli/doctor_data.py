"""``mptrain doctor dataset=NAME ...``: what is in a data set, and what training would stop at, leave out or convert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mptrain.cli.messages import say, waiting, wrapped
from mptrain.errors import EXIT_DATA, EXIT_OK
from mptrain.inspection.data_check import DataReport, check_data
from mptrain.workloads.base.faulty_samples import by_remark

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.config.schema import Config

#: Maximum number of problems of each kind that are listed, and of files with the same remark.
PROBLEMS, FILES_NAMED = 100, 10

#: Maximum number of classes in the table; of more, the smallest and the largest ones are shown, half as many each.
CLASSES = 40

_SKIPPABLE = "fix or remove them; dataset.on_error=skip skips and counts unusable files"

#: Number of picture sizes that are listed.
_SIZES = 5


def doctor_data(config: Config) -> int:
    """Read all files of a data set, and print its splits, classes, sizes, problems, and what training leaves out.

    Args:
        config: Validated configuration. Only its data set counts.

    Returns:
        The exit code: 0, or 6 if training would stop at a file, the task needs more classes, or files have the same
        pixels in several splits or classes.

    Raises:
        MptrainError: The data set cannot be built.
    """
    with waiting() as tell:
        report = check_data(config, tell)
    first, *findings = data_lines(config, report) or [f"{_name(config)}: no errors"]
    lines = [first, *wrapped(report.shape), "", *survey_table(report)]
    if report.sizes:
        named = [f"{width}x{height} ({count:,})" for (width, height), count in report.sizes.items()]
        more = f" and {len(named) - _SIZES:,} more" if len(named) > _SIZES else ""
        lines += wrapped(f"{', '.join(named[:_SIZES])}{more}", "most frequent sizes in pixels: ")
    say("\n".join([*lines, *(["", *findings] if findings else [])]))
    return EXIT_DATA if report.stopping or report.problems else EXIT_OK


def data_lines(config: Config, report: DataReport) -> list[str]:
    """Return the lines of text that report problems of data files, and files that training skips or converts.

    Args:
        config: Configuration with the data set.
        report: Result of the check of the files.

    Returns:
        The lines, the first of which counts the problems; none for data without files and problems.
    """
    if not (report.files or report.stopping or report.skipped or report.warnings):
        return []
    count = len(report.stopping)
    wrong = f"{count:,} error{'s stop' if count > 1 else ' stops'} training" if count else "no errors"
    if report.problems:
        wrong += f", {report.problems:,} other problem{'s' * (report.problems > 1)}"
    left_out = f", {len(report.skipped):,} skipped" if report.skipped else ""
    of = f" of {report.files:,}, evenly spaced" if report.read < report.files else ""
    lines = [f"{_name(config)}: {wrong}{left_out}; {report.read:,} files read{of}"]
    said: list[tuple[str, str]] = []
    for hint in dict.fromkeys(report.hints.get(place, _SKIPPABLE) for place in report.stopping):
        those = [one for one in report.stopping.items() if report.hints.get(one[0], _SKIPPABLE) == hint]
        said += [*_each("found", those), ("hint: ", hint)]
    if leaks := [_same("splits", one.splits, one.names) for one in report.copies if one.leak]:
        hint = "remove all but one: an evaluation on training samples looks better than it is"
        said += [*_each("found", leaks), ("hint: ", hint)]
    if conflicts := [_same("classes", one.labels, one.names) for one in report.copies if one.conflict]:
        said += [*_each("found", conflicts), ("hint: ", "remove those in the wrong class")]
    said += _each("note", ((place, f"skipped: {reason}") for place, reason in report.skipped.items()))
    remarks: list[tuple[str, Sequence[str]]] = [*by_remark(report.remarks).items()]
    remarks += [("same pixels", one.names) for one in report.copies if not one.leak and not one.conflict]
    said += _each("note", ((remark, _counted(places)) for remark, places in remarks))
    said += [("note: ", sentence) for sentence in (*report.warnings, *_lacking(report))]
    return [*lines, *(line for head, text in said for line in wrapped(text, head))]


def survey_table(report: DataReport) -> list[str]:
    """Return the lines of a table with the numbers of samples and classes, and the lengths, of each split.

    With more than `CLASSES` classes, the smallest and the largest of them in the training split are shown.

    Args:
        report: Result of the check of the data.
    """
    parts = list(report.samples)
    rows = [["", *parts], ["samples", *(f"{count:,}" for count in report.samples.values())]]
    surveys = [report.surveys[part] for part in parts]
    for total in dict.fromkeys(name for survey in surveys for name in survey.totals):
        rows.append([total, *(f"{survey.totals.get(total, 0):,}" for survey in surveys)])
    for name, numbers in _of_classes(report).items():
        rows.append([name, *(f"{number:,}" if number >= 0 else "" for number in numbers)])
    for length in dict.fromkeys(name for survey in surveys for name in survey.lengths):
        rows.append([f"{length}, min / median / max", *(_span(survey.lengths.get(length)) for survey in surveys)])
    left, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join([name.ljust(left), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()
        for name, *cells in rows
    ]


def _of_classes(report: DataReport) -> dict[str, list[int]]:
    """Return a row for each class: its number of samples in each split; -1 in the row of classes that are not shown."""
    counts = _counts(report)
    if not counts:
        return {}
    rows = {f"  {name}": [numbers[place] for numbers in counts.values()] for place, name in enumerate(report.labels)}
    if len(rows) <= CLASSES:
        return rows
    names = sorted(rows, key=lambda name: rows[name][0])
    few, many = names[: CLASSES // 2], names[-CLASSES // 2 :]
    between = f"  ({len(names) - len(few) - len(many):,} classes in between)"
    return {**{name: rows[name] for name in few}, between: [-1] * len(counts), **{name: rows[name] for name in many}}


def _counts(report: DataReport) -> dict[str, list[int]]:
    """Return the number of samples of each class, by split; empty for data without classes."""
    return {
        part: survey.labels.bincount(minlength=len(report.labels)).tolist()
        for part, survey in report.surveys.items()
        if report.labels and survey.labels is not None
    }


def _lacking(report: DataReport) -> list[str]:
    """Return a sentence for each split without samples of some classes; of the classes in training, if not of train."""
    said, known = [], set[str]()
    for part, numbers in _counts(report).items():
        names = [name for name, number in zip(report.labels, numbers, strict=True) if not number and name not in known]
        if names:
            said.append(f"classes without samples in {part}: {_some(names)}")
        known.update(names if part == "train" else ())
    return said


def _span(values: Tensor | None) -> str:
    if values is None or not len(values):
        return "-"
    numbers = values.double().quantile(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist()
    return " / ".join(f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)


def _same(what: str, where: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
    """Return the splits or classes of files with the same pixels, and the files."""
    return f"same pixels in {what} {' and '.join(dict.fromkeys(where))}", ", ".join(names)


def _each(head: str, problems: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    said = [(f"{head}: ", f"{place}: {reason}") for place, reason in problems]
    return [*said[:PROBLEMS], (f"{head}: ", f"{len(said) - PROBLEMS:,} more")] if len(said) > PROBLEMS else said


def _counted(names: Sequence[str]) -> str:
    return f"{len(names):,} files: {_some(names)}" if len(names) > 1 else names[0]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - FILES_NAMED:,} more" if len(names) > FILES_NAMED else ""
    return f"{', '.join(names[:FILES_NAMED])}{more}"


def _name(config: Config) -> str:
    return config.chosen.get("dataset", config.dataset.path)
