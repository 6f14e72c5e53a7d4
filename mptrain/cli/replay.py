"""``mptrain replay``: simulation of another loss scaling rule on the recorded steps of a run, without training."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from mptrain.cli.messages import printable, say, wrapped
from mptrain.cli.tables import BREAK, Column, render_table
from mptrain.errors import EXIT_OK
from mptrain.inspection.replay import replay_run
from mptrain.report import write_replay
from mptrain.report.replay_page import CAVEAT, COLUMNS, Replay, replay_rows


def replay(run: str, overrides: Sequence[str]) -> int:
    """Simulate a loss scaling rule on the recorded steps of a run, print its effect, and write a report.

    Args:
        run: The run directory, or ``last`` for the run that was started last.
        overrides: ``scaler=NAME`` and ``scaler.KEY=VALUE``; if empty, the run's own rule is replayed.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The run or the rule cannot be loaded, or the records are not sufficient.
    """
    found = replay_run(run, overrides)
    written = write_replay(found)
    say("\n".join([*_lines(found), "", str(written.html), str(written.md)]), styled=True)
    return EXIT_OK


def _lines(found: Replay) -> list[str]:
    columns = zip(*replay_rows(found), strict=True)
    table = [
        Column(
            name.replace(" ", BREAK),
            tuple(escape(printable(cell)) for cell in cells),
            importance=place if 3 < place < len(COLUMNS) - 1 else None,
            is_text=place < 2,
        )
        for place, (name, cells) in enumerate(zip(COLUMNS, columns, strict=True))
    ]
    lines = [*render_table(table, piped_width=120), ""]
    for learner in found.learners:
        of = f"{printable(learner.name)} " if len(found.learners) > 1 else ""
        said = {
            "recorded": learner.recorded_rule,
            "replayed": learner.rule,
            "found": learner.agreement(),
            "known": learner.basis(),
        }
        lines += [line for head, text in said.items() for line in wrapped(text, f"{of}{head}: ")]
    for note in found.notes:
        lines += wrapped(note, "note: ")
    if any(learner.parted is not None for learner in found.learners):
        lines += wrapped(CAVEAT, "caveat: ")
    return lines
