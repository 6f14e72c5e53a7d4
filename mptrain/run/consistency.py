"""Compares ``config.yaml`` and the data of a run with what it was trained with: digests on record against what is there now."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mptrain.config.compose import compose, reload
from mptrain.config.config_diff import config_digest, describe_change, diff
from mptrain.config.schema import Config
from mptrain.config.value_checks import show
from mptrain.config.yaml_files import read_yaml
from mptrain.engine.fingerprints import data_order
from mptrain.engine.parts import Parts
from mptrain.errors import ConfigError, MptrainError, StorageError
from mptrain.records import EvalRecord
from mptrain.runlog import RunDirectory, RunState, read_run
from mptrain.runlog.manifest import Manifest, manifests_in, read_manifest

_RESTORE = "restore the file from a copy"

Change = tuple[str, Any, Any]

#: Keys that make other data, or other batches, of the same files.
_MAKE_DATA = ("dataset", "seed", "train.batch_size", "train.one_batch")


def reload_config(directory: RunDirectory, overrides: Sequence[str]) -> Config:
    """The configuration of a run, with changes.

    Raises:
        ConfigError: It is wrong, or the changes are.
        StorageError: It cannot be read, or is wrong because it is no longer what the run was trained with.
    """
    written = written_config(directory)
    try:
        return reload(written, overrides)
    except ConfigError as error:
        warning = ""
        with contextlib.suppress(StorageError, ConfigError):  # then its own words are the best there are
            newest = next(iter(manifests_in(directory.paths.checkpoints)), None)
            if newest is not None:
                warning = _mismatch(directory, written, directory.read_state(), read_manifest(newest))
        if warning:
            raise StorageError(f"{warning}: {error}", _RESTORE) from error
        raise


def written_config(directory: RunDirectory) -> str:
    """The text of ``config.yaml``.

    Raises:
        StorageError: It cannot be read, or is no YAML.
    """
    written = directory.read_config()
    try:
        read_yaml(written)
    except ConfigError as error:
        raise StorageError(f"{directory.paths.config} is damaged: {error}", _RESTORE) from error
    return written


def require_unchanged_config(
    directory: RunDirectory, written: str, state: RunState | None, manifest: Manifest, said: Mapping[str, str]
) -> str:
    """Refuse a ``config.yaml`` that no command has changed, and that is another than the checkpoint was made with.

    Args:
        directory: The run.
        written: The text of the file.
        state: Of the run; its attempts tell what commands have changed.
        manifest: Of the checkpoint.
        said: Keys that are given a value now, which may be what was damaged, and the words that do.

    Returns:
        A warning where it is another, and those keys may be why; empty where it is the same.

    Raises:
        StorageError: It is another in keys that nobody has named.
    """
    warning = _mismatch(directory, written, state, manifest)
    if not warning:
        return ""
    edits = _edits(directory, written, manifest)
    untold = [change for change in edits if not any(f"{change[0]}.".startswith(f"{key}.") for key in said)]
    if said and not untold:
        return warning
    told = f": {'; '.join(describe_change(*change) for change in untold)}" if untold else ""
    words = [f"{key}={show(value)}" for key, _, value in untold] if len(untold) <= 3 and untold else ["KEY=VALUE"]
    line = " ".join([*words, *map(shlex.quote, said.values())])
    raise StorageError(
        f"{warning}{told}", f"{_RESTORE}, or say what is to be another: mptrain resume {directory.root} {line}"
    )


def require_undamaged_config(directory: RunDirectory, written: str, state: RunState | None) -> None:
    """Refuse a ``config.yaml`` that no command has changed, where a command would be blamed for being another.

    Args:
        directory: The run.
        written: The text of the file.
        state: Of the run.

    Raises:
        StorageError: It is another than the newest checkpoint was made with.
    """
    for path in manifests_in(directory.paths.checkpoints):
        with contextlib.suppress(StorageError):
            if warning := _mismatch(directory, written, state, read_manifest(path)):
                break
            return
    else:
        return
    raise StorageError(warning, _RESTORE)


def _mismatch(directory: RunDirectory, written: str, state: RunState | None, manifest: Manifest) -> str:
    """A sentence where ``config.yaml`` is another than the checkpoint was made with, and no command has changed it."""
    attempts = state.attempts if state else ()
    if manifest.config_digest == config_digest(written) or any(
        attempt.changes and attempt.from_step >= manifest.step for attempt in attempts
    ):
        return ""
    return f"{directory.paths.config} is damaged or was edited: step {manifest.step:,} was trained with another"


def _edits(directory: RunDirectory, written: str, manifest: Manifest) -> list[Change]:
    """In what it is another, where the words of the command line still make what the checkpoint was made with."""
    with contextlib.suppress(MptrainError):
        trained = compose(list(directory.read_overrides())).yaml
        if config_digest(trained) == manifest.config_digest:
            return diff(trained, written)
    return []


def changed_training_data(root: Path, parts: Parts) -> tuple[str, ...]:
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


def changed_evaluation_data(root: Path, records: Sequence[EvalRecord], changed: Sequence[str]) -> tuple[str, ...]:
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
