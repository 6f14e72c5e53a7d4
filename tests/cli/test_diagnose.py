"""Of many modules the terminal shows those that matter."""

from __future__ import annotations

from mptrain.lab.commands.diagnose import MOST_ROWS, interesting
from mptrain.runlog.diagnosis_file import ModuleRow, ValueRange


def rows(count, *, breaks=None):
    return [
        ModuleRow(
            f"layer{place}", "Conv2d", 1, "float16", ValueRange(float(place), 0.0, 0.0, 0, 0),
            ValueRange(float(count - place), place / count, 0.0, 0, 0), "backward" if place == breaks else "",
        )
        for place in range(count)
    ]  # fmt: skip


def test_few_modules_are_all_shown():
    assert interesting(rows(MOST_ROWS)) == (rows(MOST_ROWS), 0)


def test_of_many_modules_those_around_the_break_the_ends_and_the_extremes_stay_in_their_order():
    modules = rows(200, breaks=77)
    shown, left_out = interesting(modules)
    assert (len(shown), left_out) == (MOST_ROWS, 200 - MOST_ROWS)
    assert {modules[place] for place in (0, 5, 76, 77, 78, 194, 199)} <= set(shown)
    assert shown == [row for row in modules if row in shown]
    assert sum(row.forward.largest >= 185 for row in shown) >= 10
