"""``mptrain replay``: simulation of another loss scaling rule on the recorded steps of a run, without training."""

from __future__ import annotations

from collections.abc import Sequence

from mptrain.cli.blocks import print_blocks
from mptrain.inspection.replay import replay_run
from mptrain.report import write_replay
from mptrain.report.page import Code, Text
from mptrain.system.errors import EXIT_OK


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
    written = write_replay(replay_run(run, overrides))
    *shown, _ = written.page.sections  # the last one is the command
    print_blocks(Text(written.page.lead), *shown, Code(f"{written.html}\n{written.md}"))
    return EXIT_OK
