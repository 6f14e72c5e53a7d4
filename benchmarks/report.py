"""``python -m benchmarks.report FILE.json ...``: what was measured, beside the goals."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.goals import GOALS
from benchmarks.results import Measurement, Results, read


def main(argv: list[str] | None = None) -> int:
    """Show result files; ``--markdown`` gives the table of judged numbers for a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args(argv)
    try:
        found = [read(path) for path in asked.files]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for results in found:
        if asked.markdown:
            print(markdown(results))
        else:
            show(results)
    return 0


def show(results: Results) -> None:
    """A table for a terminal."""
    machine = results.machine
    cores = f"{machine['cores']} cores, {machine['threads']} threads"
    title = f"{results.suite} on {machine['processor']}, {cores}, torch {machine['versions'].get('torch')}"
    if device := machine.get("device"):
        title += f", {device['name']}"
    if results.rehearsal:
        title += " (a rehearsal: these numbers mean nothing)"
    table = Table(title=escape(title), title_justify="left", show_lines=False)
    for column in ("goal", "measurement", "value", "95 % interval", "goal value", ""):
        table.add_column(column, justify="right" if column in ("value", "goal value") else "left", overflow="fold")
    for row in results.measurements:
        style = "" if row.judged else "dim"
        table.add_row(*(escape(cell) for cell in _cells(row)), style=style)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    for why in dict.fromkeys(f"{row.goal} {row.state}: {row.why}" for row in results.measurements if row.why):
        console.print(escape(why))
    for name, why in results.failures.items():
        console.print(f"[red]{escape(name)} failed[/]: {escape(why)}")


def markdown(results: Results) -> str:
    """The judged numbers as a Markdown table."""
    lines = ["| goal | measurement | value | 95 % interval | goal value | |", "|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in results.measurements if row.judged]
    lines += [""] + [
        f"- {' '.join(filter(None, (row.goal, row.what)))}: {row.why}"
        for row in results.measurements
        if row.why and row.judged
    ]
    return "\n".join(lines)


def _cells(row: Measurement) -> tuple[str, str, str, str, str, str]:
    goal = GOALS[row.goal]
    bound = goal.bounds.get(row.what) if row.judged else None
    sign = "≤" if goal.better == "low" else "≥"
    what = ": ".join(filter(None, (goal.what, row.what))) if row.judged else row.what
    value = "n/a" if row.value is None else f"{_number(row.value)} {goal.unit if row.judged else ''}".strip()
    interval = "" if row.low is None or row.high is None else f"{_number(row.low)} to {_number(row.high)}"
    met = goal.met(row)
    verdict = row.state if row.state != "measured" else {True: "met", False: "missed", None: ""}[met]
    return row.goal, what, value, interval, "" if bound is None else f"{sign} {_number(bound)}", verdict


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
