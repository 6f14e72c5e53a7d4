"""Removal of run directories: whole or not at all, inside one folder, and never one that a process is writing."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.directory import RunDirectory
from mptrain.runlog.lock import holder_of
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_reader import Run
from mptrain.runlog.sweeps import SweepPaths
from mptrain.system.errors import StorageError

#: Name of a folder that is being removed; it is hidden, so that it is no run any more.
_GONE = re.compile(r"\.[0-9a-f]{8}\.removed")


def size_of(root: Path) -> int:
    """Return the bytes of all files in a folder; symbolic links are not followed."""
    size = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                size += os.lstat(Path(folder, name)).st_size
    return size


def remove_run(run: Run, folder: Path) -> None:
    """Remove a run directory inside a folder, with the folders that become empty.

    It is renamed at once and then removed. If the process is killed meanwhile, `remove_leftovers` removes the rest.

    Raises:
        StorageError: The directory is not inside the folder, it has other runs or sweeps inside, a process is writing
            it or its sweep, it has changed since it was read, or it cannot be removed.
    """
    root, directory = run.paths.root, RunDirectory(run.paths)
    if root.is_symlink() or folder.resolve() not in root.resolve().parents:
        raise StorageError(f"{root} does not lie inside {folder}", "name the folder that holds it")
    if inner := _runs_inside(root):
        raise StorageError(f"{root} has another run inside, {inner}", "move it away, or remove it first")
    if writer := holder_of(SweepPaths(root.parent).lock):
        raise StorageError(f"{root} belongs to a sweep that {writer} runs", "wait until it has ended")
    with directory.lock():
        if directory.read_state() != run.state:
            raise StorageError(f"{root} has changed since it was listed", "list the runs again")
        gone = root.with_name(f".{secrets.token_hex(4)}.removed")
        with storage_errors(root, "remove"):
            root.rename(gone)
    with storage_errors(gone, "remove"):
        shutil.rmtree(gone, ignore_errors=True)  # another process may remove the same leftovers
        if gone.exists():
            shutil.rmtree(gone)
        for parent in root.parents:
            if parent.resolve() == folder.resolve() or not parent.is_dir() or any(parent.iterdir()):
                return
            parent.rmdir()


def _runs_inside(root: Path) -> Path | None:
    """Return a run or sweep below a run directory, whose own folders hold none; None if there is none."""
    for folder, _, files in os.walk(root):
        place = Path(folder)
        if place != root and not {RunPaths(place).run_json.name, SweepPaths(place).json.name}.isdisjoint(files):
            return place
    return None


def remove_leftovers(folder: Path) -> None:
    """Remove what removals that were killed have left below a folder."""
    for place, children, _ in os.walk(folder):
        for child in filter(_GONE.fullmatch, children):
            shutil.rmtree(Path(place, child), ignore_errors=True)
