"""The lines of ``mptrain doctor KEY=VALUE ...`` about the files of a data set."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mptrain.cli.messages import printable
from mptrain.workloads.base.faulty_samples import by_remark

if TYPE_CHECKING:
    from mptrain.inspection.data_check import DataReport

#: The most files of each kind that are named.
NAMED = 100


def data_lines(name: str, report: DataReport, width: int) -> list[str]:
    """Return what there is to say, in lines: every file that training stops at, leaves out or converts; nothing of data without files.

    Args:
        name: Of the data set.
        report: What was found.
        width: Characters of a line; names of files are not broken.
    """
    if not (report.files or report.stopping or report.skipped):
        return []
    count = len(report.stopping)
    things = f"{count:,} things stop" if count > 1 else "one thing stops"
    wrong = f"{things} training" if count else "nothing stops training"
    left_out = f", {len(report.skipped):,} left out" if report.skipped else ""
    of = f" of {report.files:,}, evenly spread" if report.read < report.files else ""
    lines = [f"{name}: {wrong}{left_out}; {report.read:,} files read{of}"]
    lines += _each("found", report.stopping, width)
    if count:
        hint = "mend or remove them; dataset.on_error=skip leaves out and counts files that cannot be used"
        lines += _wrapped(f"hint: {hint}", width)
    lines += _each("note", {place: f"left out: {reason}" for place, reason in report.skipped.items()}, width)
    for remark, places in by_remark(report.remarks).items():
        more = f" and {len(places) - NAMED:,} more" if len(places) > NAMED else ""
        lines += _wrapped(f"note: {remark}: {', '.join(places[:NAMED])}{more}", width)
    return lines


def _each(head: str, problems: Mapping[str, str], width: int) -> Iterable[str]:
    for place, reason in list(problems.items())[:NAMED]:
        yield from _wrapped(f"{head}: {place}: {reason}", width)
    if len(problems) > NAMED:
        yield f"{head}: {len(problems) - NAMED:,} more"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(printable(text), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
