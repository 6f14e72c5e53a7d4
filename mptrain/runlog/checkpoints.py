"""Checkpoints that are there whole or not at all: written beside, hashed, renamed, and verified before use.

The order that makes a kill at any moment harmless: the data file reaches the disk, then the manifest that
names it (the commit point), then pointers and deletions, which only save time and space. What a state contains is the
business of the caller. Only this module, `checkpoint_data`, `checkpoint_shards` and `saver` import torch in `mptrain.runlog`.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from mptrain.errors import CheckpointError, StorageError
from mptrain.runlog.atomic_files import TEMPORARY, storage_errors, write_atomically
from mptrain.runlog.checkpoint_data import check_plain, read_verified, write_state
from mptrain.runlog.checkpoint_shards import FOLDER, Collectives, insert_shards, write_shards
from mptrain.runlog.manifest import BEST, DATA, LAST, Manifest, manifest_name, manifests_in, read_manifest, step_of

_AGAIN = "-again"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was verified and loaded.

    Attributes:
        state: What was saved; tensors are on the CPU.
        manifest: What was known about it.
        skipped: One sentence for each newer checkpoint that could not be used.
    """

    state: dict[str, Any]
    manifest: Manifest
    skipped: list[str]


class CheckpointStore:
    """The checkpoints of one run. The caller holds the run's lock while saving.

    Args:
        folder: Where they are; made on the first save.
        keep: How many of the newest to keep (at least 1), besides the best.
        higher_is_better: Which metric is the better one; of equal metrics the older checkpoint is the best.
    """

    def __init__(self, folder: Path, keep: int, *, higher_is_better: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = folder
        self.keep = keep
        self._sign = 1.0 if higher_is_better else -1.0

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        records: Mapping[str, int],
        metric: float | None,
        config_digest: str,
        digests: Mapping[str, str] | None = None,
        parts: tuple[str, dict[str, str]] | None = None,
    ) -> Path:
        """Save a state durably; a checkpoint of the same step is replaced, those of later steps are dropped.

        Args:
            state: dict, list, tuple, str, int, float, bool, None and tensors only. Nothing may change it meanwhile.
            step: Attempted steps so far.
            records: What `RecordWriter.flush` returned, forced to the disk since.
            metric: The validation metric of exactly these weights; None, inf and nan if unknown.
            config_digest: Digest of the configuration.
            digests: What `RecordWriter.digests` returned at the same moment.
            parts: What `write_shards` gave for this step.

        Returns:
            The manifest's path.

        Raises:
            TypeError: The state holds something that a safe load would refuse; names where.
            StorageError: The disk refuses; all earlier checkpoints are intact.
        """
        tensors = check_plain(state)
        metric = metric if metric is not None and math.isfinite(metric) else None
        with storage_errors(self.folder):
            self.folder.mkdir(exist_ok=True)  # never the run's own
            self._remove_leftovers(keep=parts[0] if parts else "")
            newest = next(iter(manifests_in(self.folder)), None)
        good = "" if newest is None else f"the checkpoint of step {step_of(newest)}"
        data = self._free_data_name(step)
        digest, size = write_state(state, tensors, data, good)
        path = self.folder / manifest_name(step)
        folder, files = parts or ("", {})
        manifest = Manifest(
            step,
            data.name,
            digest,
            size,
            dict(records),
            metric,
            config_digest,
            dict(digests or {}),
            parts=folder,
            part_files=files,
        )
        write_atomically(path, manifest.to_json(), good=good)  # the commit point
        self.drop_after(step)
        return path

    def write_parts(self, shards: dict[str, Tensor], step: int, comm: Collectives) -> tuple[str, dict[str, str]]:
        """Write this rank's parts of tensors beside what `save` is going to write; all ranks do at once.

        Returns:
            The folder's name and SHA-256 of its files, of all ranks.

        Raises:
            StorageError: The disk of one of them refuses.
        """
        first, second = (path.with_suffix(FOLDER) for path in _data_names(self.folder / manifest_name(step)))
        manifest, named = self.folder / manifest_name(step), ""
        if manifest.exists():
            with contextlib.suppress(StorageError):
                named = read_manifest(manifest).parts
        name = comm.broadcast_object((second if named == first.name else first).name)
        return name, write_shards(self.folder / name, shards, comm)

    def load_latest(self) -> LoadedCheckpoint | None:
        """The newest checkpoint that is sound; damaged ones are passed over and listed in ``skipped``.

        Returns:
            None if the run has no checkpoint at all.

        Raises:
            CheckpointError: There are checkpoints, and all of them are damaged.
        """
        skipped: list[str] = []
        for path in manifests_in(self.folder):
            try:
                return _load(path, skipped)
            except StorageError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(skipped)}",
                "restore the folder from a copy, or start the run again",
            )
        return None

    def load(self, which: Path | Literal["last", "best"]) -> LoadedCheckpoint:
        """One certain checkpoint; nothing else is tried if it is damaged.

        Args:
            which: ``last`` (newest step), ``best`` (best metric), or the path of a manifest or data file.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        path: Path | None
        if isinstance(which, Path):
            path = _manifest_beside(which)
        elif which == LAST:
            path = next(iter(manifests_in(self.folder)), None)
        else:
            path = self.best()
        if path is None:
            raise CheckpointError(
                f"{self.folder} has no {which} checkpoint",
                "train first, or name another run"
                if which == LAST
                else "use the last one: nothing was evaluated yet, or the task has no metric to choose by",
            )
        try:
            return _load(path, [])
        except CheckpointError as error:
            raise CheckpointError(str(error), error.hint or self._way_round(path, which)) from error

    def _way_round(self, damaged: Path, which: Path | Literal["last", "best"]) -> str:
        """Return what can be done with a run one of whose checkpoints is damaged."""
        resume = f"mptrain resume {self.folder.parent}"
        hint = f"restore it from a copy; a run that is not done goes on from one before it that is sound: {resume}"
        other = self.best() if which == LAST else None
        return hint if other in (None, damaged) else f"--best takes {other.name}, or {hint}"

    def best(self) -> Path | None:
        """The manifest with the best metric; None where no checkpoint has one."""
        ranked: list[tuple[float, int, Path]] = []
        for path in manifests_in(self.folder):
            with contextlib.suppress(StorageError):
                metric = read_manifest(path).metric
                if metric is not None:
                    ranked.append((self._sign * metric, -step_of(path), path))
        return max(ranked)[-1] if ranked else None

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: a run that goes on from an older one has another future.

        Raises:
            StorageError: One of them cannot be removed.
        """
        with storage_errors(self.folder, "clean"):
            for path in manifests_in(self.folder):
                if step_of(path) > step:
                    path.unlink()
            best = self.best()
            for path in manifests_in(self.folder)[self.keep :]:
                if path != best:
                    path.unlink()
            self._remove_leftovers()
        self._point(LAST, next(iter(manifests_in(self.folder)), None))
        self._point(BEST, best)

    def _point(self, name: str, manifest: Path | None) -> None:
        """Write a pointer for people and scripts; nothing here reads it back."""
        pointer = self.folder / name
        if manifest is None:
            with storage_errors(pointer, "clean"):
                pointer.unlink(missing_ok=True)
        else:
            write_atomically(pointer, manifest.name + "\n", durable=False)

    def _remove_leftovers(self, keep: str = "") -> None:
        """Remove what killed writers left: temporary files, and data that no manifest names, but for what is to be kept."""
        named = {keep}
        for path in manifests_in(self.folder):
            try:
                manifest = read_manifest(path)
                named |= {manifest.file, manifest.parts}
            except StorageError:  # perhaps a newer version can read it
                named |= {data.with_suffix(kind).name for data in _data_names(path) for kind in (DATA, FOLDER)}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.suffix == TEMPORARY or (path.suffix == DATA and path.name not in named):
                    path.unlink(missing_ok=True)
                elif path.suffix == FOLDER and path.name not in named and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)

    def _free_data_name(self, step: int) -> Path:
        """A name that no data file has: that of an earlier save must live until its manifest is replaced."""
        first, second = _data_names(self.folder / manifest_name(step))
        return second if first.exists() else first


def _data_names(manifest: Path) -> tuple[Path, Path]:
    """The two names that the data file of a manifest can have; they alternate when a step is saved again."""
    return manifest.with_suffix(DATA), manifest.with_name(f"{manifest.stem}{_AGAIN}{DATA}")


def _manifest_beside(path: Path) -> Path:
    """The manifest of a checkpoint that was named by either of its files."""
    return path if path.suffix != DATA else path.with_name(path.stem.removesuffix(_AGAIN) + ".json")


def _load(path: Path, skipped: list[str]) -> LoadedCheckpoint:
    """Verify and load the checkpoint of one manifest; ``skipped`` lists the newer ones that could not be used.

    Raises:
        StorageError: It is damaged or cannot be read; the message is a sentence that names the file.
    """
    manifest = read_manifest(path)
    state = read_verified(path.with_name(manifest.file), manifest.sha256, path.name, manifest.bytes)
    if manifest.parts:
        state = insert_shards(state, path.with_name(manifest.parts), manifest.part_files)
    return LoadedCheckpoint(state, manifest, skipped)
