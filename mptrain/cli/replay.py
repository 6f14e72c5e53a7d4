"""``mptrain replay``: what another loss scaling rule would have done to a run, without training it again."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mptrain.campaign.replaying import replay_run
from mptrain.cli.messages import colourful, printable, say
from mptrain.cli.rows import width_of
from mptrain.errors import EXIT_OK
from mptrain.report import write_replay
from mptrain.report.replay_page import CAVEAT, COLUMNS, replay_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mptrain.report.replay_page import Replay


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
    console = Console(width=None if sys.stdout.isatty() else 120, no_color=not colourful(sys.stdout))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if at < 2 else "right")
    for row in replay_rows(found):
        table.add_row(*(escape(printable(cell)) for cell in row))
    with console.capture() as drawn:
        console.print(table)
    lines = [line.rstrip() for line in drawn.get().splitlines()] + [""]
    several = len(found.learners) > 1
    for learner in found.learners:
        of = f"{learner.name} " if several else ""
        lines += _wrapped(f"{of}recorded", learner.recorded_rule)
        lines += _wrapped(f"{of}replayed", learner.rule)
        lines += _wrapped(f"{of}found", learner.agreement())
        lines += _wrapped(f"{of}known", learner.basis())
    for note in found.notes:
        lines += _wrapped("note", note)
    if any(learner.parted is not None for learner in found.learners):
        lines += _wrapped("mind", CAVEAT)
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{printable(head)}: {printable(text)}",
        width_of(sys.stdout),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
