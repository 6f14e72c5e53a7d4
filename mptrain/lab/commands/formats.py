"""``mptrain formats``: which number formats a network can be trained in, and which layers must stay in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome, composed, run_folder
from mptrain.cli.messages import say, waiting
from mptrain.lab.formats.examine import formats_of_config, formats_of_run
from mptrain.lab.formats.page import write_formats
from mptrain.system.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.cli.answer import Answer


def formats(arguments: Namespace) -> Outcome:
    """Look at the number formats of a run's next step, or of a step of a new configuration.

    Args:
        arguments: Parsed command line: a run and overrides, or a configuration; ``--at``, ``--formats``, ``--keep``,
            ``--output`` and ``--config-dir``.

    Returns:
        The formats with their verdicts, with the exit code 0 whatever these are.

    Raises:
        MptrainError: The arguments are invalid, or the step cannot be computed.
    """
    names = [name for name in (arguments.formats or "").split(",") if name]
    budget, out = (arguments.keep or 0.0) / 100, Path(arguments.output) if arguments.output else None
    run = next(iter(arguments.words), "")
    if run:
        if arguments.at:
            raise UsageError("--at is for a new configuration", f"{run} is looked at after its last checkpoint")
        folder = run_folder(run, arguments.overrides)
        with waiting() as tell:
            report = formats_of_run(folder, arguments.overrides, names, budget, tell)
        out = out or Path(folder) / "formats"
    else:
        config = composed(arguments)
        with waiting() as tell:
            report = formats_of_config(config, arguments.at or (), names, budget, tell)
    page = write_formats(out, report) if out else None

    def show() -> None:
        print_blocks(*report.blocks())
        if not budget:
            say("\n--keep 20 looks for the layers that, kept in FP32, take most of an error away")
        if page is not None:
            say(f"\n{page}")

    def answer() -> Answer:
        from mptrain.lab.answers import FormatsAnswer

        return FormatsAnswer.reported(report, str(page or ""))

    return Outcome(EXIT_OK, show, answer)
