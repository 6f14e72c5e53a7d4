"""``mptrain recommend RUN [--sweep SWEEP]``: recommends a static loss scale from a run's gradient histograms."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command_line import take_options
from mptrain.cli.report import place
from mptrain.errors import EXIT_DATA, EXIT_OK, UsageError
from mptrain.report.page import Code, Text
from mptrain.runlog.directory import last_run


def recommend_scale(words: Sequence[str]) -> int:
    """Print the static loss scale recommended for a run and the effect of every other scale, and write a report.

    The report is written into the run's folder.

    Args:
        words: Arguments of the command: the run, or ``last``; ``--sweep`` with the folder of a sweep over static
            scales.

    Returns:
        The exit code: 0, or 6 if a learner (a model with its optimizer) has too few histograms for a recommendation.

    Raises:
        UsageError: The arguments do not name exactly one run.
        StorageError: The run has no histograms, the sweep has no static scales, or a folder cannot be read or written.
    """
    run, sweep = _read(words)
    path = last_run(Path("outputs")).root if run == "last" else place(run)
    from mptrain.report import recommend, write_forecast

    found = recommend(path, place(sweep) if sweep else None)
    written = write_forecast(found)
    *shown, _ = written.page.sections  # the last one is the run
    print_blocks(Text(written.page.lead), *shown, Code(f"{written.html}\n{written.md}"))
    known = all(forecast.largest is not None and not forecast.too_few for forecast in found.forecasts.values())
    return EXIT_OK if known else EXIT_DATA


def _read(words: Sequence[str]) -> tuple[str, str]:
    """Return the run and the sweep of the arguments; the sweep is empty if not given."""
    runs, found = take_options(words, {"--sweep": "outputs/sweeps/NAME"})
    hint = "recommend takes a run, and --sweep SWEEP"
    for word in runs:
        if word.startswith("-"):
            raise UsageError(f"unknown option '{word}'", hint)
        if "=" in word and not Path(word).exists():
            if re.match(r"(learners\.[^.=]+\.)?scaler\b", word):
                hint += f"; to simulate another scaler, write mptrain replay RUN {shlex.quote(word)}"
            raise UsageError(f"recommend does not take KEY=VALUE, but got '{word}'", hint)
    if len(runs) != 1:
        what = f"recommend takes one run, but got {len(runs)}" if runs else "recommend needs a run directory"
        raise UsageError(
            what, "name a run that was trained with diagnostics=histograms, such as mptrain recommend last"
        )
    return runs[0], found.get("--sweep", [""])[-1]
