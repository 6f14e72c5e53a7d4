"""Summary of a finished run: final metrics, counts, throughput, memory and energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mptrain.engine.memory import memory_by_use, memory_peak
from mptrain.engine.monitor import early_stop
from mptrain.precision.alignment import unaligned_share
from mptrain.precision.support import supports
from mptrain.precision.upcast import uses_upcast

if TYPE_CHECKING:
    from mptrain.engine.parts import Options, Parts, Progress
    from mptrain.engine.step_log import LearnerLog


def summarise(
    parts: Parts,
    options: Options,
    progress: Progress,
    learner_logs: Sequence[LearnerLog],
    activations: int | None = None,
) -> dict[str, Any]:
    """Return the contents of a finished run's ``summary.json`` as plain values.

    ``metric`` is from the last evaluation on test data, or on validation data if there are no test data; ``intervals``
    has the 95 % confidence intervals of all metrics of that evaluation, and ``val_intervals`` those of the last one on
    validation data, by which settings are chosen. Ratios are fractions, not per cent. Units are
    bytes, seconds, joules and loss terms per second; ``steady`` figures leave out the warm-up of each attempt.
    ``activations`` are the bytes that a pass saves for its backward pass; None without any training step.
    """
    record = "test" if "test" in progress.last else "val"
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    early = early_stop(parts.task, options.train.early_stopping, progress.early_stopping)
    return {
        "metric_name": parts.task.metric,
        "higher_is_better": parts.task.higher_is_better if parts.task.metric else None,
        "metric": progress.last.get(record, {}).get(parts.task.metric or ""),
        "metric_split": record,
        "intervals": progress.intervals.get(record, {}),
        "val_intervals": progress.intervals.get("val", {}),
        "best_val": progress.best,
        "val": progress.last.get("val"),
        "test": progress.last.get("test"),
        "steps": progress.step,
        "learners": {log.name: _of_learner(log, progress) for log in learner_logs},
        "planned_steps": planned,
        "epochs": progress.epoch,
        "planned_epochs": options.train.epochs,
        "max_steps": options.train.max_steps,
        "max_minutes": options.train.max_minutes,
        "stopped_early": early if early and progress.step < planned else None,
        "samples": progress.samples,
        "term": parts.task.term,
        "terms": progress.terms,
        "terms_per_second": progress.terms / max(progress.seconds, 1e-9),
        "steady_terms_per_second": progress.steady_terms / progress.steady_seconds if progress.steady_terms else None,
        "steady_steps": progress.steady_steps,
        "train_seconds": progress.seconds,
        "data_wait": progress.waited / max(progress.seconds, 1e-9),
        "energy_joules": None if progress.joules is None or math.isnan(progress.joules) else progress.joules,
        "memory_before": parts.origin.memory,
        "peak_memory": memory_peak(parts.device),
        "memory_by_use": None if activations is None else memory_by_use(parts, activations),
        "unusable_samples": {name: loader.split.skipped for name, loader in parts.loaders.items()},
        "converted_files": {name: len(loader.split.faults.remarks) for name, loader in parts.loaders.items()},
        "device": str(parts.device),
        "threads": torch.get_num_threads(),
        "facts": facts(parts),
    }


def _of_learner(log: LearnerLog, progress: Progress) -> dict[str, Any]:
    path = progress.learners[log.name].scale_path
    return {
        "updates": log.updates,
        "skipped": log.skipped,
        "skip_rate": log.skipped / progress.step if progress.step else 0.0,
        "overflows": log.history.counts,
        "scale": dict(zip(("first", "min", "max", "last"), path, strict=False)),
    }


def facts(parts: Parts) -> dict[str, Any]:
    """Return facts about a run's model and device that explain its speed, for ``summary.json``.

    ``upcast`` says that half-precision products are computed in FP32 and rounded once, on a CPU without half
    arithmetic; ``support`` says how the device supports the precision mode.
    """
    return {
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "unaligned": unaligned_share(parts.model),
        "convolutions": any(parameter.ndim >= 4 for parameter in parts.model.parameters()),
        "upcast": uses_upcast(parts.policy, parts.device),
        "support": supports(parts.policy, parts.device).reason,
    }
