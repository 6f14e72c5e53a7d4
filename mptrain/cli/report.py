"""``mptrain report PATH ...``: writes reports of runs, sweeps, comparisons and recipes, and prints their paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mptrain.cli.messages import say
from mptrain.errors import EXIT_OK, UsageError
from mptrain.runlog.directory import last_run


def place(word: str) -> Path:
    """Return the folder that an argument names: a path, or else the name of a run under ``outputs``.

    Args:
        word: The argument; ``run.name=`` puts runs under ``outputs``. A path that does not exist is returned as it is.
    """
    path, named = Path(word).expanduser(), Path("outputs") / word
    return named if named.is_dir() and not path.exists() else path


def report_folders(words: Sequence[str]) -> int:
    """Write the HTML and Markdown report of each folder, and print the paths of its files.

    Args:
        words: Folders of runs, sweeps, comparisons or recipes; ``last`` is the run that was started last.

    Returns:
        The exit code 0.

    Raises:
        UsageError: No folder is given, or an argument is not a folder.
        StorageError: A folder is not a run, sweep or comparison, or it cannot be read or written.
    """
    if not words:
        raise UsageError(
            "report needs a folder", "write mptrain report last, or the folder of a run, sweep or comparison"
        )
    for word in words:
        if word.startswith("-") or (("=" in word) and not Path(word).exists()):
            raise UsageError(f"'{word}' is not a folder", "report takes only folders, or the word last")
    from mptrain.report import write_report

    for word in words:
        path = last_run(Path("outputs")).root if word == "last" else place(word)
        written = write_report(path)
        say(f"{written.html}\n{written.md}")
    return EXIT_OK
