"""``mptrain report PATH ...``: writes reports of runs, sweeps, comparisons and recipes, and prints their paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.messages import say
from mptrain.cli.places import place
from mptrain.runlog.directory import last_run
from mptrain.system.errors import EXIT_OK

if TYPE_CHECKING:
    from argparse import Namespace


def report_folders(arguments: Namespace) -> int:
    """Write the HTML and Markdown report of each folder, and print the paths of its files.

    Args:
        arguments: Parsed command line; its words are folders of runs, sweeps, comparisons or recipes, or ``last`` for
            the run that was started last.

    Returns:
        The exit code 0.

    Raises:
        StorageError: A folder is not a run, sweep or comparison, or it cannot be read or written.
    """
    from mptrain.report import write_report

    for word in arguments.words:
        path = last_run(Path("outputs")).root if word == "last" else place(word)
        written = write_report(path)
        say(f"{written.html}\n{written.md}")
    return EXIT_OK
