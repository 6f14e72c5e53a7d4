"""``mptrain replay``: what another loss scaling rule would have done to a run, without training it again."""

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
    """Replay a rule, print what it would have done, write its page, and print the paths of that.

    Args:
        run: The run directory, or ``last``.
        overrides: ``scaler=NAME`` and ``scaler.KEY=VALUE``; none replays the run's own rule.

    Raises:
        MptrainError: The run or the rule cannot be had, or the records do not say enough.
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
        lines += wrapped(CAVEAT, "mind: ")
    return lines
