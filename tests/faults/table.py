"""The outcome of a campaign as a Markdown table, by kind of fault."""

from __future__ import annotations

from collections import Counter

from tests.faults.drawing import KINDS

HEAD = (
    *("fault", "cases", "identical", "after restoring", "bit kept", "exit codes"),
    *("steps lost", "in intervals", "records lost", "failures"),
)


def table(reports):
    """Lines of Markdown: one for each kind of fault, and one for all.

    A case counts for its first fault; what was lost, for the fault that it was lost by.
    """
    kinds = [kind for kind in KINDS if any(report.case.kind == kind for report in reports)]
    rows = [_row(_name(kind), [one for one in reports if one.case.kind == kind], reports, [kind]) for kind in kinds]
    rows.append(_row("all", reports, reports, list(KINDS)))
    return [_line(HEAD), _line("---" for _ in HEAD), *map(_line, rows)]


def _row(name, reports, all_reports, kinds):
    sound = [one for one in reports if not one.failures]
    codes = Counter(code for one in reports for code in one.codes)
    shown = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()) if code > 0)
    identical = sum(not one.kept and not one.restored for one in sound)
    lost = [one.steps_lost[kind] for one in all_reports for kind in kinds if kind in one.steps_lost]
    records = [one.records_lost[kind] for one in all_reports for kind in kinds if kind in one.records_lost]
    return (
        *(name, len(reports), identical, sum(one.restored for one in sound), sum(one.kept for one in sound), shown),
        *(max(steps for steps, _ in lost) if lost else "", f"{max(share for _, share in lost):.2f}" if lost else ""),
        *(max(records) if records else "", len(reports) - len(sound)),
    )


def _line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def _name(kind):
    return kind.replace("_", " ")
