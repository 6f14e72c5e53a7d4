"""Evaluation of a saved run, also on another device or in another precision mode, and export of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch

from mptrain.build.parts import build, settings_restored
from mptrain.build.workload import build_dataset
from mptrain.config.compose import reload
from mptrain.config.config_diff import describe_change, diff
from mptrain.config.schema import Config
from mptrain.engine.evaluate import evaluate
from mptrain.engine.snapshot import load_weights, require_same_labels, require_same_schema
from mptrain.engine.weights_io import has_averages, in_dtype, plain_weights, weights_file
from mptrain.precision.apply import count_out_of_range, describe_clamped
from mptrain.run.by_class import ByClass, by_class
from mptrain.run.consistency import changed_evaluation_data, trained_on
from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run
from mptrain.runlog.strict_json import read_object
from mptrain.runlog.trained_samples import beside, read_trained, write_trained
from mptrain.system.errors import DataError
from mptrain.system.records import EvalRecord

#: Keys by which an evaluation holds out a part of a folder without splits, instead of taking all of it as test data.
_SHARES = ("dataset.val_share", "dataset.val_samples", "dataset.test_share")


@dataclass(frozen=True)
class Evaluation:
    """Result of evaluating a checkpoint of a run on its validation and test data.

    Attributes:
        root: The run directory, which is only read.
        step: Training steps attempted before the checkpoint.
        averaged: Whether averaged weights (``train.ema_decay``) were evaluated.
        records: One record of metrics per split.
        notes: Differences in configuration or data between this evaluation and the run, one sentence each.
        by_class: Answers of a classifier by class, if requested.
    """

    root: Path
    step: int
    averaged: bool
    records: tuple[EvalRecord, ...]
    notes: tuple[str, ...]
    by_class: ByClass | None = None


@settings_restored()
def evaluate_run(
    run: str, overrides: Sequence[str], which: str, *, average: bool, by_classes: bool = False
) -> Evaluation:
    """Evaluate a checkpoint of a run, ``last`` or ``best``, on the validation and test splits of its data.

    ``run`` is the run directory, or ``last`` for the run that was started last. Overrides change the run's
    configuration, such as ``device=cpu`` or ``precision.eval=fp32``. ``average`` evaluates the average of the weights
    if there is one, and ``by_classes`` also measures the answers of a classifier by class, on the last split.

    Raises:
        MptrainError: There is no usable checkpoint, or data or device are missing.
    """
    directory = find_run(run)
    text = directory.read_config()
    config = reload(text, overrides)
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    loaded = store.load(cast('Literal["last", "best"]', which))
    keys = {word.partition("=")[0].lstrip("+~") for word in overrides}
    elsewhere = "dataset.root" in keys and keys.isdisjoint(_SHARES)
    labels = tuple(read_object(directory.paths.data).get("labels", ()))
    dataset = build_dataset(config, labels) if elsewhere else None
    parts, _ = build(config, weights=False, trains=False, dataset=dataset)
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
    notes = [describe_change(*change) for change in changes]
    notes += trained_on(read_trained(directory.root), parts)
    notes += changed_evaluation_data(directory.root, records, [key for key, _, _ in changes])
    return Evaluation(
        root=directory.root,
        step=step,
        averaged=average and bool(parts.averages()) and has_averages(loaded.state),
        records=records,
        notes=tuple(notes),
        by_class=by_class(parts, splits[-1], average=average) if by_classes else None,
    )


@dataclass(frozen=True)
class Export:
    """Result of exporting the weights of a run's checkpoint to a file.

    Attributes:
        data: Path of the run's description of its data (labels, preprocessing), which may not exist.
        path: The exported file, a plain state dict, loadable with ``weights_only=True``.
        step: Training steps attempted before the checkpoint.
        averaged: Whether the weights are averages (``train.ema_decay``).
        tensors: Number of tensors.
        warnings: Differences between the exported and the trained weights, one sentence each.
    """

    data: Path
    path: Path
    config: Config
    step: int
    averaged: bool
    tensors: int
    bytes: int
    warnings: tuple[str, ...] = ()


def export_run(
    run: str,
    which: Literal["last", "best"],
    dtype: torch.dtype,
    *,
    average: bool,
    output: Path | None,
    trusted: Sequence[str] = (),
) -> Export:
    """Write the weights of a checkpoint to a file as a plain state dict, for `torch.load` with ``weights_only=True``.

    Args:
        run: The run directory, or ``last`` for the run that was started last.
        which: Checkpoint to export, ``last`` or ``best``.
        dtype: Dtype of all floating-point tensors in the file; FP16 saturates at 65504.
        average: Whether to export the average of the weights if there is one.
        output: Target file, replaced if it exists; ``.safetensors`` writes that format. None writes to a file in the
            run's ``export`` folder.
        trusted: Overrides of ``extensions.allow``, which name the packages that the configuration may call.

    Raises:
        MptrainError: There is no usable checkpoint, or the file cannot be written.
    """
    directory = find_run(run)
    config = reload(directory.read_config(), trusted)
    config = replace(config, overrides=tuple(directory.read_overrides()))
    loaded = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep).load(which)
    require_same_schema(loaded.state)
    averaged = average and has_averages(loaded.state)
    trained = plain_weights(loaded.state, average=averaged)
    clamped = {
        name: count
        for name, value in trained.items()
        if value.is_floating_point() and (count := count_out_of_range(value, dtype))
    }
    weights = in_dtype(trained, dtype)
    if output is None:
        output = (
            directory.paths.export / f"{which}{'-average' if averaged else ''}-{str(dtype).removeprefix('torch.')}.pt"
        )
        with storage_errors(output.parent):
            output.parent.mkdir(exist_ok=True)
    content = weights_file(weights, output)
    write_atomically(output, content)
    if directory.root.absolute() not in output.absolute().parents:
        write_trained(beside(output), read_trained(directory.root))
    return Export(
        directory.paths.data,
        output,
        config,
        loaded.state["progress"]["step"],
        averaged,
        len(weights),
        len(content),
        warnings=(describe_clamped(clamped, dtype),) if clamped else (),
    )
