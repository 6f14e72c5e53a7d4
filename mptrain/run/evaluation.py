"""Measures a saved run again: other weights of it, another device, another precision of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.config.differences import change_in_words, diff
from mptrain.engine.evaluate import evaluate
from mptrain.engine.snapshot import load_weights, require_same_labels, require_same_schema
from mptrain.engine.weights_io import has_averages
from mptrain.errors import DataError
from mptrain.run.data_fingerprint import other_evaluated_data
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run

if TYPE_CHECKING:
    from mptrain.records import EvalRecord


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        root: The run directory, which was only read.
        step: Attempted steps of the checkpoint.
        averaged: Whether the averages of the weights were measured.
        records: One for each split.
        notes: In what the evaluation differs from the run, one sentence each.
    """

    root: Path
    step: int
    averaged: bool
    records: tuple[EvalRecord, ...]
    notes: tuple[str, ...]


def evaluate_run(run: str, overrides: Sequence[str], which: str, *, average: bool) -> Evaluation:
    """Evaluate a checkpoint on the validation and test splits.

    Args:
        run: The run directory, or ``last``.
        overrides: Keys that differ from the run's configuration.
        which: ``last`` or ``best``.
        average: Measure the average of the weights, where there is one.

    Raises:
        MptrainError: No usable checkpoint, or data or device are missing.
    """
    directory = find_run(run)
    text = directory.read_config()
    config = reload(text, overrides)
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    loaded = store.load(cast('Literal["last", "best"]', which))
    parts, _ = build(config, weights=False)
    require_same_schema(loaded.state)
    require_same_labels(parts, loaded.state)
    load_weights(parts, loaded.state)
    progress = loaded.state["progress"]
    splits = [name for name in ("val", "test") if name in parts.loaders]
    if not splits:
        raise DataError(f"{parts.dataset.name} has neither validation nor test data", "there is nothing to evaluate on")
    step, epoch = progress["step"], progress["epoch"]
    measured = [
        evaluate(parts, parts.loaders[name], name, step, epoch, lambda: False, average=average, intervals=True)
        for name in splits
    ]
    records = tuple(outcome.record for outcome in measured if outcome is not None)
    changes = diff(text, config.yaml)
    notes = [change_in_words(*change) for change in changes]
    notes += other_evaluated_data(directory.root, records, [key for key, _, _ in changes])
    return Evaluation(
        directory.root,
        step,
        average and bool(parts.averages()) and has_averages(loaded.state),
        records,
        tuple(notes),
    )
