"""Whether a run that is gone on with, or evaluated again, meets the data that it met before: digests on record against the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.engine.fingerprints import data_order
from mptrain.runlog.reader import read_run

if TYPE_CHECKING:
    from mptrain.engine.job import Parts
    from mptrain.records import EvalRecord

#: Keys that make other data, or other batches, of the same files.
_MAKE_DATA = ("dataset", "seed", "train.batch_size", "train.one_batch")


def other_training_data(root: Path, parts: Parts) -> tuple[str, ...]:
    """A sentence where the newest epoch on record would consist of other samples now; nothing where it would not, or none is known.

    Args:
        root: The run directory, its records cut back to where it goes on.
        parts: As they are built now.

    Raises:
        DataError: The first batch of that epoch cannot be read.
        StorageError: The records cannot be read.
    """
    known: dict[str, Any] = {}
    for event in read_run(root).events():
        known = event if event["event"] == "data_order" else known
    if not known:
        return ()
    loader = parts.loaders["train"]
    now = data_order(loader, known["epoch"], loader.whole_batch(known["epoch"]))
    if all(known.get(name) == value for name, value in now.items()):
        return ()
    return (f"the training data are other ones: epoch {known['epoch'] + 1} would not begin as it did",)


def other_evaluated_data(root: Path, records: Sequence[EvalRecord], changed: Sequence[str]) -> tuple[str, ...]:
    """A sentence for each split that holds other data than the run last evaluated.

    Args:
        root: The run directory.
        records: What was evaluated now.
        changed: Keys that differ from the run's; those that make other data explain it.

    Raises:
        StorageError: The records cannot be read.
    """
    if any(key == name or key.startswith(f"{name}.") for key in changed for name in _MAKE_DATA):
        return ()
    before: dict[str, dict[str, Any]] = {}
    for event in read_run(root).events():
        if event["event"] == "evaluation" and event.get("data"):
            before[event["split"]] = event
    return tuple(
        f"the {record.split} data are not those that the run evaluated: {record.samples:,} samples now, "
        f"{before[record.split]['samples']:,} then"
        for record in records
        if record.split in before and before[record.split]["data"] != record.data
    )
