"""Whether ``config.yaml`` of a run is what the run was trained with, and what is another in it where it is not."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mptrain.config.compose import compose, reload
from mptrain.config.differences import change_in_words, config_digest, diff
from mptrain.config.files import read_yaml
from mptrain.config.ranges import show
from mptrain.errors import ConfigError, MptrainError, StorageError
from mptrain.runlog.manifest import Manifest, manifests_in, read_manifest

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.runlog import RunDirectory, RunState

_RESTORE = "restore the file from a copy"

Change = tuple[str, Any, Any]


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
        strange = ""
        with contextlib.suppress(StorageError, ConfigError):  # then its own words are the best there are
            newest = next(iter(manifests_in(directory.paths.checkpoints)), None)
            if newest is not None:
                strange = _strange(directory, written, directory.read_state(), read_manifest(newest))
        if strange:
            raise StorageError(f"{strange}: {error}", _RESTORE) from error
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


def require_as_trained(
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
    strange = _strange(directory, written, state, manifest)
    if not strange:
        return ""
    edits = _edits(directory, written, manifest)
    untold = [change for change in edits if not any(f"{change[0]}.".startswith(f"{key}.") for key in said)]
    if said and not untold:
        return strange
    told = f": {'; '.join(change_in_words(*change) for change in untold)}" if untold else ""
    words = [f"{key}={show(value)}" for key, _, value in untold] if len(untold) <= 3 and untold else ["KEY=VALUE"]
    line = " ".join([*words, *map(shlex.quote, said.values())])
    raise StorageError(
        f"{strange}{told}", f"{_RESTORE}, or say what is to be another: mptrain resume {directory.root} {line}"
    )


def require_no_damage(directory: RunDirectory, written: str, state: RunState | None) -> None:
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
            if strange := _strange(directory, written, state, read_manifest(path)):
                break
            return
    else:
        return
    raise StorageError(strange, _RESTORE)


def _strange(directory: RunDirectory, written: str, state: RunState | None, manifest: Manifest) -> str:
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
