"""List of runs from Python, which prints as the terminal lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from typing_extensions import override

from mptrain.report.notebook import Shown, dataframe, first_rows
from mptrain.report.page import Block, Bullets
from mptrain.report.run_list import FoundRun, runs_table, sort_notes
from mptrain.runlog.run_reader import Run

_Run = TypeVar("_Run", bound=Run)

#: Columns that a table of pandas has of all runs, also where they do not differ.
_ALWAYS = ("run", "status", "reason", "started", "steps")


class RunList(Shown, list[_Run]):
    """List of runs that shows itself as a table: name, status, steps, metric, and the number that they are sorted by.

    Args:
        runs: The runs.
        killed: Paths of those that no process held when they were listed, although they have not ended.
        key: Number that they are sorted by, or ``started``.
    """

    def __init__(self, runs: Iterable[_Run] = (), killed: Iterable[str] = (), key: str = "started") -> None:
        super().__init__(runs)
        self._killed, self._key = frozenset(killed), key

    def _found(self) -> list[FoundRun]:
        return [FoundRun(run, held=str(run.paths.root) not in self._killed) for run in self]

    @override
    def blocks(self) -> Sequence[Block]:
        runs = self._found()
        shown = replace(first_rows(runs_table(runs, self._key), "runs"), optional=("started", "overrides"))
        return shown, Bullets(tuple(sort_notes(runs, self._key)), "warn")

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each run.

        Its columns are ``run`` (the path), ``status``, ``reason``, ``started`` and ``steps``; and of the keys of the
        configuration, the options of its groups, and the numbers of ``summary.json`` those in which the runs differ,
        such as ``seed``, ``precision``, ``val_top1`` and ``test_top1``.

        Raises:
            EnvironmentRefused: pandas is not installed.
        """
        rows = [{**run.settings(), "steps": run.steps, **run.numbers()} for run in self._found()]
        frame = dataframe(rows, columns=None if rows else _ALWAYS)
        own = [name for name in frame if name not in _ALWAYS and not name.startswith("chosen.")]
        own = [name for name in own if not name.endswith("_target_")]  # their paths in Python, which the options name
        return frame[[*_ALWAYS, *(name for name in own if frame[name].astype(str).nunique(dropna=False) > 1)]]
