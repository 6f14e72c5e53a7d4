"""The final numbers of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mptrain.engine.memory import memory_peak

if TYPE_CHECKING:
    from mptrain.engine.job import Options, Parts, Progress
    from mptrain.engine.ledger import Account


def summarise(parts: Parts, options: Options, progress: Progress, account: Account) -> dict[str, Any]:
    """What stands in ``summary.json``.

    Args:
        parts: What the run is made of.
        options: What the user chose about it.
        progress: How far it came.
        account: Of its first learner.

    Returns:
        Plain values. ``metric`` is of the last evaluation on test data, on validation data where there are no test
        data; fractions, not per cent. Bytes, seconds, samples a second.
    """
    record = "test" if "test" in progress.last else "val"
    return {
        "metric_name": parts.task.metric,
        "metric": progress.last.get(record, {}).get(parts.task.metric),
        "metric_split": record,
        "best_val": progress.best,
        "val": progress.last.get("val"),
        "test": progress.last.get("test"),
        "steps": progress.step,
        "updates": account.updates,
        "skipped": account.refused,
        "skip_rate": account.refused / progress.step if progress.step else 0.0,
        "overflows": account.history.counts,
        "scale": dict(zip(("first", "min", "max", "last"), progress.scale_path, strict=False)),
        "epochs": progress.epoch,
        "planned_epochs": options.train.epochs,
        "max_steps": options.train.max_steps,
        "samples": progress.samples,
        "samples_per_second": progress.samples / max(progress.seconds, 1e-9),
        "train_seconds": progress.seconds,
        "peak_memory": memory_peak(parts.device),
        "unusable_samples": {name: loader.split.skipped for name, loader in parts.loaders.items()},
        "device": str(parts.device),
        "threads": torch.get_num_threads(),
    }
