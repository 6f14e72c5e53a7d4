"""The outcome of a campaign as a Markdown table, by kind of fault."""

from __future__ import annotations

from collections import Counter

from tests.faults.drawing import KINDS

HEAD = ("fault", "cases", "identical", "after restoring", "bit kept", "exit codes", "steps lost", "records lost", "failures")


def table(reports):
    """Lines of Markdown: one for each kind of fault, and one for all."""
    kinds = [kind for kind in KINDS if any(report.case.kind == kind for report in reports)]
    rows = [_row(kind.replace("_", " "), [one for one in reports if one.case.kind == kind]) for kind in kinds]
    rows.append(_row("all", reports))
    return [_line(HEAD), _line("---" for _ in HEAD), *map(_line, rows)]


def _row(name, reports):
    sound = [one for one in reports if not one.failures]
    codes = Counter(code for one in reports for code in one.codes)
    shown = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()) if code > 0)
    identical = sum(not one.kept and not one.restored for one in sound)
    return (
        name, len(reports), identical, sum(one.restored for one in sound), sum(one.kept for one in sound), shown,
        _most(one.steps_lost for one in reports), _most(one.records_lost for one in reports), len(reports) - len(sound),
    )  # fmt: skip


def _most(numbers):
    known = [number for number in numbers if number is not None]
    return max(known) if known else ""


def _line(cells):
    return f"| {' | '.join(map(str, cells))} |"
