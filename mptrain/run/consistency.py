"""Checks that a run, its data and its ranks are those of its record: configuration, samples, code and versions.

Each rank has read its own command line and files, and nothing that they exchange later would show a difference:
copies of the weights would drift apart (DDP), or the trained network would be a mixture (FSDP2).
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mptrain.config.allowed_targets import NOT_OF_USERS
from mptrain.config.compose import allowed_packages, compose, reload, search_path
from mptrain.config.config_diff import ABSENT, config_digest, describe_change, diff
from mptrain.config.schema import Config
from mptrain.config.targets import Given
from mptrain.config.value_checks import show
from mptrain.config.yaml_files import read_yaml
from mptrain.engine.fingerprints import data_order
from mptrain.engine.parts import Parts
from mptrain.parallel.communicator import Communicator
from mptrain.runlog import RunDirectory, RunState, read_run
from mptrain.runlog.manifest import Manifest, manifests_in, read_manifest
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import (
    CheckpointError,
    ConfigError,
    MptrainError,
    Problem,
    StorageError,
    user_packages,
)
from mptrain.system.process_state import versions_now
from mptrain.system.records import EvalRecord
from mptrain.system.words import listed
from mptrain.workloads.base.loader import Loader

_RESTORE = "restore the file from a copy"


#: Keys that change the data, or the batches, made from the same files.
_MAKE_DATA = ("dataset", "seed", "train.batch_size", "train.one_batch")

#: Keys and sections that may differ between ranks. Rank 0 alone has a run directory, trackers and sinks, machines have
#: different numbers of cores, the code of the user is compared itself, and each rank has a device of its own
#: (`mptrain.run.build.parallelism.require_own_devices`).
_OWN = ("run", "logger", "extensions", "chosen", "device", "threads")

#: Libraries besides torch that compute samples, networks and updates.
_LIBRARIES = ("numpy", "torchvision", "timm")

#: Differences that are listed, at most.
_MOST = 8


@dataclass(frozen=True)
class _Ingredients:
    """Configuration of a rank as YAML, its sources and its versions, by name.

    ``code`` has the digest and the file of each imported module of the user.
    """

    config: str
    code: dict[str, tuple[str, str]]
    versions: dict[str, str]

    def differences(self, first: _Ingredients) -> Iterator[str]:
        """Yield in what this rank differs from rank 0, in words that follow ``rank N has``."""
        for name in first.versions.keys() & self.versions.keys():
            if self.versions[name] != first.versions[name]:
                yield f"{name} {self.versions[name]}, rank 0 has {first.versions[name]}"
        for name, (digest, file) in self.code.items():  # a module that one of them has not imported is not compared
            if first.code.get(name, (digest,))[0] != digest:
                yield f"other code of {name} ({file}) than rank 0"
        for key, theirs, own in diff(first.config, self.config, _OWN) if first.config != self.config else ():
            if own == ABSENT:
                yield f"no {key}, rank 0 has {key}={show(theirs)}"
            else:
                yield f"{key}={show(own)}, rank 0 has {'none' if theirs == ABSENT else show(theirs)}"


def require_same_ranks(config: Config, comm: Communicator) -> None:
    """Check that each rank has rank 0's configuration, code and versions; all ranks call this, on the host.

    Raises:
        ConfigError: A rank differs; the same on every rank, with the ranks and what differs.
    """
    if comm.world_size == 1:
        return
    with comm.together():
        own = _Ingredients(config.yaml, _code_of_user(), _versions())
        gathered = comm.all_gather_object(list(own.differences(comm.broadcast_object(own))))
    ranks = defaultdict(list)
    for rank, differences in enumerate(gathered):
        for words in differences:
            ranks[words].append(str(rank))
    sentences = [
        f"rank {who[0]} has {words}" if len(who) == 1 else f"ranks {listed(who, 8)} have {words}"
        for words, who in ranks.items()
    ]
    if len(sentences) > _MOST:
        sentences[_MOST:] = [f"{len(sentences) - _MOST} more differences between ranks"]
    if sentences:
        hint = (
            "start all ranks with one command line, and give all machines the same files of code and the same packages"
        )
        raise ConfigError([*map(Problem, sentences[:-1]), Problem(sentences[-1], hint)])


def _versions() -> dict[str, str]:
    others = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return versions_now() | {name: str(version) for name, version in others.items() if version}


def _code_of_user() -> dict[str, tuple[str, str]]:
    """Return digest and file of the source of each imported module that the user has allowed, or that lies beside it.

    Modules beside it, in the same folder of the search path, are what such code imports. Its path may differ between
    ranks. Compiled modules are left out, and so is the program that began the rank.
    """
    folders: set[Path] = set()
    for package in user_packages & sys.modules.keys():
        spec = getattr(sys.modules[package], "__spec__", None)
        locations = (spec.submodule_search_locations or [spec.origin]) if spec else []
        folders.update(Path(location).resolve().parent for location in locations if location)
    sources = {}
    for name, module in list(sys.modules.items()):
        file, package = getattr(module, "__file__", None), name.partition(".")[0]
        if not isinstance(file, str) or not file.endswith(".py") or name == "__main__" or package in NOT_OF_USERS:
            continue
        path = Path(file).resolve()
        beside = "site-packages" not in path.parts and not folders.isdisjoint(path.parents)
        if beside or package in user_packages:
            with contextlib.suppress(OSError):
                sources[name] = (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    return sources


Change = tuple[str, Any, Any]


def reload_config(
    directory: RunDirectory, overrides: Sequence[str], given: Mapping[str, Given] = MappingProxyType({})
) -> Config:
    """Load the configuration of a run from its ``config.yaml``, with overrides, and what a program gives, applied.

    Raises:
        ConfigError: The configuration or an override is invalid.
        StorageError: The configuration cannot be read, or is invalid because it was changed after training.
    """
    written = written_config(directory)
    try:
        return reload(written, overrides, given=given)
    except ConfigError as error:
        warning = ""
        with contextlib.suppress(StorageError, ConfigError):  # then the original error is the best message
            newest = next(iter(manifests_in(directory.paths.checkpoints)), None)
            if newest is not None:
                warning = _mismatch(directory, written, directory.read_state(), read_manifest(newest))
        if warning:
            raise StorageError(f"{warning}: {error}", _RESTORE) from error
        raise


def written_config(directory: RunDirectory) -> str:
    """Return the text of a run's ``config.yaml``; raise StorageError if it cannot be read or is not valid YAML."""
    written = directory.read_config()
    try:
        read_yaml(written)
    except ConfigError as error:
        raise StorageError(f"{directory.paths.config} is damaged: {error}", _RESTORE) from error
    return written


def require_unchanged_config(
    directory: RunDirectory, written: str, state: RunState | None, manifest: Manifest, overrides: Mapping[str, str]
) -> str:
    """Require that a run's ``config.yaml`` is the one that a checkpoint was trained with, unless a command changed it.

    Args:
        directory: The run directory.
        written: Text of ``config.yaml``.
        state: State of the run from ``run.json``; its attempts have the digests of their configurations.
        manifest: Manifest of the checkpoint, with the digest of its configuration.
        overrides: Keys that the present command sets, each with its override. A difference in these alone is returned
            as a warning (empty for none), and one in any other key raises StorageError.
    """
    warning = _mismatch(directory, written, state, manifest)
    if not warning:
        return ""
    edits = _edits(directory, written, manifest)
    untold = [change for change in edits if not any(f"{change[0]}.".startswith(f"{key}.") for key in overrides)]
    if overrides and not untold:
        return warning
    described = f": {'; '.join(describe_change(*change) for change in untold)}" if untold else ""
    words = [f"{key}={show(value)}" for key, _, value in untold] if len(untold) <= 3 and untold else ["KEY=VALUE"]
    line = " ".join(["mptrain resume", str(directory.root), *words, *map(shlex.quote, overrides.values())])
    line = search_path(allowed_packages(overrides.values())) + line
    raise StorageError(f"{warning}{described}", f"{_RESTORE}, or change these keys on purpose: {line}")


def require_undamaged_config(directory: RunDirectory, written: str, state: RunState | None) -> None:
    """Require that a run's ``config.yaml``, of text ``written``, is the one of its newest checkpoint.

    Called before a difference to a requested configuration is attributed to the present command. A run without a
    readable checkpoint passes.

    Raises:
        StorageError: The newest checkpoint was trained with another configuration, and no command changed it.
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
    """Return a sentence if ``config.yaml`` is neither the checkpoint's nor that of an attempt since; else ``""``."""
    since = [attempt for attempt in (state.attempts if state else ()) if attempt.from_step >= manifest.step]
    if config_digest(written) in (manifest.config_digest, *(attempt.config_digest for attempt in since)):
        return ""
    return (
        f"{directory.paths.config} is damaged or was edited: "
        f"step {manifest.step:,} was trained with another configuration"
    )


def _edits(directory: RunDirectory, written: str, manifest: Manifest) -> list[Change]:
    """Return the differences to the checkpoint's configuration, if the run's command line still produces it."""
    with contextlib.suppress(MptrainError):
        trained = compose(list(directory.read_overrides())).yaml
        if config_digest(trained) == manifest.config_digest:
            return diff(trained, written)
    return []


def changed_training_data(root: Path, parts: Parts) -> tuple[str, ...]:
    """Return a warning if the newest epoch on record would now have other samples; else an empty tuple.

    The records must be truncated to the checkpoint. Raise DataError if the first batch of that epoch cannot be read.
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
    return (f"the training data have changed: epoch {known['epoch'] + 1} would not have the same samples",)


def changed_evaluation_data(root: Path, records: Sequence[EvalRecord], changed: Sequence[str]) -> tuple[str, ...]:
    """Return a warning for each split whose samples differ from those that the run last evaluated.

    Nothing is returned if one of the configuration keys ``changed`` since the run changes the data.
    """
    if any(key == name or key.startswith(f"{name}.") for key in changed for name in _MAKE_DATA):
        return ()
    before: dict[str, dict[str, Any]] = {}
    for event in read_run(root).events():
        if event["event"] == "evaluation" and event.get("data"):
            before[event["split"]] = event
    return tuple(
        f"the {record.split} data differ from those that the run evaluated: {record.samples:,} samples now, "
        f"{before[record.split]['samples']:,} then"
        for record in records
        if record.split in before and before[record.split]["data"] != record.data
    )


def changed_code(root: Path, parts: Parts) -> tuple[str, ...]:
    """Return a sentence if the code of a model of the user's own is not that which a run was started with."""
    starts = (event for event in read_run(root).events() if event["event"] == "start")
    before, now = next(starts, {}).get("model_code"), parts.origin.code
    if not before or not now or before == now:
        return ()
    return ("the code of the model, or its structure, is not that with which the run was started",)


def require_same_units(directory: RunDirectory, parts: Parts) -> None:
    """Raise CheckpointError if targets have another mean, deviation or names of outputs than a run was trained with.

    Its network answers in deviations from that mean. Digests do not serve: sums differ a little between machines.
    """
    card, facts = read_object(directory.paths.data, missing_ok=True), parts.dataset.facts()
    for name in ("target_mean", "target_std", "output_names"):
        before, now = list(card.get(name, ())), list(facts.get(name, ()))
        same = before == now
        if not same and name != "output_names" and len(before) == len(now):
            same = bool(np.allclose(before, now, rtol=1e-5, atol=0))
        if before and not same:
            raise CheckpointError(
                f"{name} of the training targets is {_values(now)}, and the run was trained with {_values(before)}",
                "its network answers in that unit: restore the training data",
            )


def _values(values: list[Any]) -> str:
    return listed([one if isinstance(one, str) else f"{one:.6g}" for one in values], 4)


def trained_on(known: frozenset[bytes], parts: Parts) -> tuple[str, ...]:
    """Return a sentence for each split with samples among those, by their digests, that the weights were trained on."""
    held = {name: digests_of(loader) for name, loader in parts.loaders.items() if name != "train"}
    if not known and any(held.values()):
        return ("it is not on record which samples the weights were trained on",)
    if known and held and not any(held.values()):
        return ("it was not looked at whether these samples were trained on: they have no digests",)
    counts = {name: sum(digest in known for digest in digests) for name, digests in held.items()}
    return tuple(
        f"{count:,} of {len(held[name]):,} {name} samples were trained on" for name, count in counts.items() if count
    )


def digests_of(loader: Loader) -> list[bytes]:
    """Return a digest of each sample of a split; none if it does not offer any."""
    return loader.split.digests() if hasattr(loader.split, "digests") else []
