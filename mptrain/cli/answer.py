"""Objects that commands print with ``--json``: their base, and those of ``mptrain runs`` and ``mptrain eval``.

The JSON Schema of each, made from its types and docstrings, is a file in ``schemas/``. A new field keeps the version;
one that is gone, renamed or has another meaning raises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from mptrain.cli.messages import writing
from mptrain.system.masking import masked
from mptrain.system.records import as_json

if TYPE_CHECKING:
    from mptrain.report.run_list import FoundRun
    from mptrain.run.evaluation import Evaluation


class Data(BaseModel):
    """Part of an object that a command prints with ``--json``."""

    model_config = ConfigDict(from_attributes=True, frozen=True)

    @classmethod
    def of(cls, source: object, **known: Any) -> Self:
        """Return the data with the values given, and all others from the attributes of that name of an object."""
        names = cls.model_fields.keys() - known.keys()
        return cls.model_validate({**{name: getattr(source, name) for name in names}, **known})


class Answer(Data):
    """Object that a command prints with ``--json``; ``SCHEMA`` is its name and version, its field ``schema``."""

    SCHEMA: ClassVar[str]


def print_answer(answer: Answer) -> None:
    """Print an object on standard output as one line of strict JSON, without secrets.

    Raises:
        StorageError: Standard output cannot be written.
    """
    with writing():
        print(as_json({"schema": answer.SCHEMA, **_decodable(masked(answer.model_dump()))}), flush=True)


def _decodable(value: Any) -> Any:
    """Return a value whose texts have escapes in place of lone surrogates (undecodable bytes), which JSON lacks."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_decodable(key): _decodable(item) for key, item in value.items()}
    return [_decodable(item) for item in value] if isinstance(value, (list, tuple)) else value


class EvaluatedSplit(Data):
    """Metrics of a split.

    Attributes:
        split: ``val`` or ``test``.
        samples: Number of samples.
        metrics: Values by metric name.
        intervals: Lower and upper bound of the 95 % confidence interval over the choice of samples, by metric name.
    """

    split: str
    samples: int
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]


class ClassAnswers(Data):
    """Answers of a classifier by class.

    Attributes:
        split: Name of the split.
        class_names: Names of the C classes.
        confusion: Numbers of samples by true class and class that the network said, C rows of C; samples with an output
            that is not finite are missing.
        not_finite: Number of these.
        page: Path of the page, with the most certain mistakes.
    """

    split: str
    class_names: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    not_finite: int
    page: str


class EvalAnswer(Answer):
    """Object that ``mptrain eval --json`` prints.

    Attributes:
        run: The run directory.
        checkpoint: ``last`` or ``best``.
        step: Training steps attempted before the checkpoint.
        averaged: The averaged weights (``train.ema_decay``) were evaluated.
        splits: Metrics of each split.
        notes: Differences in configuration or data between this evaluation and the run, one sentence each.
        by_class: Answers by class; null without ``--by-class``.
    """

    SCHEMA = "mptrain.eval/1"
    run: str
    checkpoint: Literal["last", "best"]
    step: int
    averaged: bool
    splits: tuple[EvaluatedSplit, ...]
    notes: tuple[str, ...]
    by_class: ClassAnswers | None

    @classmethod
    def evaluated(cls, evaluation: Evaluation, checkpoint: str, page: Path | None) -> Self:
        """Return the data of an evaluation, and of its page by class."""
        by_class = ClassAnswers.of(evaluation.by_class, page=str(page)) if evaluation.by_class else None
        splits = tuple(map(EvaluatedSplit.of, evaluation.records))
        return cls.of(evaluation, run=str(evaluation.root), checkpoint=checkpoint, splits=splits, by_class=by_class)


class ListedRun(Data):
    """Run in a list.

    Attributes:
        path: The run directory.
        status: ``done``, ``failed``, ``preempted``, ``running``, or ``killed`` while running.
        started: Start of its last attempt in UTC, ISO 8601; empty if unknown.
        overrides: Its ``KEY=VALUE`` overrides.
        steps: Number of attempted steps at the end of its last attempt; null if that has not ended.
        metric_name: Name of its final metric; null without one, and ``metric`` its value.
        reason: Reason why it ended; empty if it is done.
    """

    path: str
    status: str
    started: str
    overrides: tuple[str, ...]
    steps: int | None
    metric_name: str | None
    metric: float | None
    reason: str


class RunsAnswer(Answer):
    """Object that ``mptrain runs --json`` prints.

    Attributes:
        runs: Runs below the folder that fit the filters, the newest first or sorted; with ``--prune`` those to remove.
        notes: Runs that cannot be read, and with ``--prune`` those that stay, one sentence each.
        removed: Paths of the runs that ``--prune`` has removed.
    """

    SCHEMA = "mptrain.runs/1"
    runs: tuple[ListedRun, ...]
    notes: tuple[str, ...]
    removed: tuple[str, ...] = ()

    @classmethod
    def from_runs(cls, runs: Sequence[FoundRun], notes: Sequence[str], removed: Sequence[str] = ()) -> Self:
        """Return the data of runs that were found."""
        return cls(runs=tuple(map(ListedRun.of, runs)), notes=tuple(notes), removed=tuple(removed))
