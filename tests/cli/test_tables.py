"""Tables on narrow terminals: every number is whole, and what found no room is named."""

from __future__ import annotations

import io
import sys

import pytest
from comparison.fake_runs import arm

from mptrain.cli.comparison_table import print_comparison
from mptrain.cli.tables import BREAK, Column, render_table
from mptrain.comparison.compare_arms import compare


class Tty(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch, width, **environment):
    """Make standard output a terminal of so many columns, and return what is written to it."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": str(width), **environment}.items():
        monkeypatch.setenv(name, value)
    stream = Tty()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


COLUMNS = [
    Column("arm", ("fp32", "fp16_dynamic"), is_text=True),
    Column(f"change{BREAK}in top1", ("-", f"-0.0017{BREAK}[-0.0362, +0.0329]"), 5),
    Column("samples/s", ("12,345", "123,456"), 1, "throughput"),
    Column("skipped", ("0 %", "7 %"), 2),
]


@pytest.mark.parametrize(
    ("width", "whole", "left_out"),
    [
        (80, ["fp16_dynamic  -0.0017 [-0.0362, +0.0329]    123,456      7 %"], None),
        (55, ["-0.0017    123,456      7 %", "              [-0.0362, +0.0329]"], None),
        (45, ["-0.0017      7 %", "              [-0.0362, +0.0329]"], "not shown: throughput"),
        (34, ["-0.0017", "              [-0.0362, +0.0329]"], "not shown: throughput, skipped"),
    ],
)
def test_cells_are_broken_where_they_say_then_the_least_important_columns_are_left_out(
    monkeypatch, width, whole, left_out
):
    on_terminal(monkeypatch, width, NO_COLOR="1")
    lines = render_table(COLUMNS, piped_width=200)
    assert max(map(len, lines)) <= width
    assert all(any(part in line for line in lines) for part in whole), lines
    assert (lines[-1] if "not shown" in lines[-1] else None) == left_out


def test_a_comparison_on_80_columns_has_whole_verdicts_and_intervals(monkeypatch):
    terminal = on_terminal(monkeypatch, 80, NO_COLOR="1")
    comparison = compare([arm("fp32", [0.95, 0.94, 0.96]), arm("amp_dynamic", [0.92, 0.95, 0.99])])
    print_comparison(comparison)
    table = terminal.getvalue().partition("\n\n")[0]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    found = comparison.arms[1].difference
    for part in ("reference", "undecided", "amp_dynamic", f"[{found.low:+.4f}, {found.high:+.4f}]"):
        assert part in table


@pytest.mark.parametrize(("environment", "styled"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, True)])
def test_what_is_bold_is_plain_where_no_colours_are_wanted(monkeypatch, environment, styled):
    terminal = on_terminal(monkeypatch, 120, **environment)
    print_comparison(compare([arm("fp32", [0.95] * 3), arm("amp_dynamic", [0.95] * 3)]))
    assert ("\x1b[1m" in terminal.getvalue()) is styled
    assert "\\x1b" not in terminal.getvalue()
