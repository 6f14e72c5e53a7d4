"""The run directory: made exclusively, found again, locked against a second writer.

What is in the files is the business of `state`, `writer`, `reader` and `checkpoints`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mptrain.errors import ConfigError, OlderLayout, StorageError, did_you_mean
from mptrain.files import read_bytes
from mptrain.runlog.atomic_files import (
    TEMPORARY,
    remove_drafts,
    require_no_links,
    storage_errors,
    sync_folder,
    write_atomically,
)
from mptrain.runlog.lock import LockHolder, hold_lock, holder_of
from mptrain.runlog.manifest import manifests_in
from mptrain.runlog.run_paths import RUN_JSON, RunPaths, check_run_name, fresh_name
from mptrain.runlog.run_state import RunState, read_state
from mptrain.runlog.strict_json import parse_strict

_TRIES = 100


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory that exists.

    Attributes:
        paths: Where everything in it is.
    """

    paths: RunPaths

    @property
    def root(self) -> Path:
        """The directory itself."""
        return self.paths.root

    def lock(self) -> AbstractContextManager[None]:
        """Hold the run for writing while the context lasts; the kernel releases it if the process dies.

        Raises:
            StorageError: Another process holds it (named with its host), or the lock file cannot be written.
        """
        return hold_lock(self.paths.lock)

    def holder(self) -> LockHolder | None:
        """The process that is writing this run now, or None."""
        return holder_of(self.paths.lock)

    def read_state(self) -> RunState | None:
        """The content of ``run.json``; None if the run's process was killed before it wrote that.

        Raises:
            StorageError: The file cannot be read, is damaged, or is of another schema.
        """
        return read_state(self.paths.run_json)

    def write_state(self, state: RunState) -> None:
        """Replace ``run.json`` atomically and durably.

        Raises:
            StorageError: It cannot be written; the old content is untouched.
        """
        write_atomically(self.paths.run_json, state.to_json())

    def write_config(self, config: str, overrides: Sequence[str]) -> None:
        """Write ``config.yaml`` and ``overrides.yaml``.

        Args:
            config: The fully resolved configuration as YAML text.
            overrides: The overrides of the command line, written as a YAML list of quoted strings.

        Raises:
            StorageError: One of them cannot be written.
        """
        lines = [f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides]
        write_atomically(self.paths.config, config)
        write_atomically(self.paths.overrides, "".join(lines) or "[]\n")

    def read_overrides(self) -> tuple[str, ...]:
        """The words in ``overrides.yaml``, as `write_config` wrote them; none where there is no such file.

        Raises:
            StorageError: The file cannot be read, or is damaged.
        """
        path = self.paths.overrides
        with storage_errors(path, "read"):  # undecodable bytes of a command line were written as they are
            lines = read_bytes(path).decode("utf-8", "surrogateescape").split("\n") if path.exists() else []
        words = []
        for number, line in enumerate(lines, 1):
            if line.startswith("- "):
                try:
                    words.append(parse_strict(line[2:]))
                except ValueError:
                    words.append(None)
                if not isinstance(words[-1], str):
                    why = f"{path}, line {number} is damaged: it is not a quoted string"
                    raise StorageError(why, "restore the file from a copy")
        return tuple(words)

    def remove_drafts(self) -> None:
        """Remove what killed processes had begun to write; call it while the lock is held.

        Raises:
            StorageError: Something cannot be removed.
        """
        for folder in (self.root, *filter(Path.is_dir, self.paths.folders)):
            remove_drafts(folder)

    def read_config(self) -> str:
        """The text of ``config.yaml``.

        Raises:
            StorageError: The file cannot be read, or is damaged.
        """
        path = self.paths.config
        with storage_errors(path, "read"):
            content = read_bytes(path)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"byte {error.start} is no UTF-8 ({error.reason})"
            raise StorageError(f"{path} is damaged: {what}", "restore the file from a copy") from error


def create_run(root: Path, label: str, name: str | None = None) -> RunDirectory:
    """Make a run directory that belongs to this run alone.

    Args:
        root: The root of all runs; made if missing.
        label: ``MODEL-DATASET-PRECISION``, part of the name of a nameless run.
        name: A stable name: ``root/NAME``; None makes ``root/DATE/TIME-LABEL-xxxx``.

    Raises:
        ConfigError: The name is not usable (see `check_run_name`).
        StorageError: ``root/NAME`` exists or lies inside another run, or the disk refuses.
    """
    if name is None:
        return _create_fresh(root, label)
    check_run_name(name)
    if name == "last":  # runs that are called so already can be gone on with
        raise ConfigError("run.name='last' is what commands call the newest run", "choose another run.name")
    path = root / name
    for ancestor in path.relative_to(root).parents:
        if str(ancestor) != "." and (root / ancestor / RUN_JSON).exists():
            raise StorageError(f"run.name={name!r} lies inside the run {root / ancestor}", "choose another run.name")
    if not _make(path):
        raise StorageError(
            f"run directory {path} exists", "continue it with run.resume=auto, or choose another run.name"
        )
    return RunDirectory(RunPaths(path))


def _make(path: Path) -> bool:
    """Make a directory with those above it; False where it exists: the kernel lets exactly one process make it."""
    with storage_errors(path, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            return False
        sync_folder(path.parent)
    return True


def existing_run(root: Path, name: str) -> RunDirectory | None:
    """The run called NAME if there is one, else None; for the caller who decides on resuming.

    A directory whose maker was killed before it wrote ``run.json`` counts as a run without a state.

    Raises:
        ConfigError: The name is not usable.
        StorageError: ``root/NAME`` is something else than a run directory, has symbolic links in it, or cannot be read.
    """
    paths = RunPaths(root / check_run_name(name))
    with storage_errors(paths.root, "read"):
        if not paths.root.exists():
            return None
        early = {paths.lock.name, paths.config.name, paths.overrides.name, paths.data.name}
        found = {entry.name for entry in paths.root.iterdir() if entry.suffix != TEMPORARY}
        if RUN_JSON in found or found <= early:
            return _readable(paths)
    raise StorageError(f"{paths.root} exists and is not a run: it has no {RUN_JSON}", "choose another run.name")


def open_run(path: Path) -> RunDirectory:
    """The run in a directory.

    Raises:
        StorageError: There is no such directory, it holds no ``run.json`` that can be read, or there are symbolic links in it.
    """
    paths = RunPaths(path)
    if not path.is_dir():
        raise StorageError(f"no run directory {path}", _meant(path))
    if not paths.run_json.exists():
        raise StorageError(f"{path} is not a run directory: it has no {RUN_JSON}", "name the folder of one run")
    return _readable(paths)


def refuse_older_layout(path: Path) -> None:
    """Refuse a folder whose ``run.json`` an older version wrote, which stands for all its files; others are read later, or not at all.

    Raises:
        OlderLayout: Names the folder.
    """
    try:
        RunDirectory(RunPaths(path)).read_state()
    except OlderLayout:
        raise
    except StorageError:
        return


def _readable(paths: RunPaths) -> RunDirectory:
    """The run, if no link in it leads elsewhere and this version wrote it.

    Raises:
        OlderLayout: An older version wrote it.
        StorageError: Names a link.
    """
    require_no_links(paths.root, paths.folders)
    refuse_older_layout(paths.root)
    return RunDirectory(paths)


def _meant(path: Path) -> str:
    """A hint for a path that is no directory: the run that a file lies in, or one of a similar name."""
    if path.exists():
        for folder in path.parents:
            if (folder / RUN_JSON).exists():
                return f"it is a file of a run; write {folder}"
    runs: dict[str, Path] = {}
    for root in dict.fromkeys((Path("outputs"), path.parent if path.parent.name else Path("outputs"))):
        runs |= {str(run.root.relative_to(root)): run.root for run in _runs_below(root)}
    guess = did_you_mean(path.name, runs) or did_you_mean(str(path), runs)
    return f"did you mean {runs[guess]}?" if guess else "name a directory that holds a run.json, or write: last"


def find_run(run: str) -> RunDirectory:
    """Return the run in a directory, or of a name below ``outputs``; ``last`` is the newest one there.

    Raises:
        StorageError: There is none, or it has no configuration yet.
    """
    named = Path("outputs") / run  # as run.name= named it
    place = named if named.is_dir() and not Path(run).exists() else Path(run)
    directory = last_run(Path("outputs")) if run == "last" else open_run(place)
    if not directory.paths.config.exists():
        killed = not any(True for _ in manifests_in(directory.paths.checkpoints))
        raise StorageError(
            f"{directory.root} has no config.yaml",
            "it was killed before it began: start it again" if killed else "restore the file from a copy",
        )
    return directory


def last_run(root: Path) -> RunDirectory:
    """The run that was started or resumed last; directories with a damaged ``run.json`` are passed over.

    Raises:
        OlderLayout: Older versions of mptrain wrote all runs below the root.
        StorageError: There is no run below the root, or the last one has symbolic links in it.
    """
    newest: tuple[str, RunDirectory] | None = None
    older: dict[Path, str] = {}
    for run in _runs_below(root):
        try:
            state = run.read_state()
        except OlderLayout as error:
            older |= error.writers
            continue
        except StorageError:
            continue
        if state is not None and (newest is None or state.started > newest[0]):
            newest = (state.started, run)
    if newest is None and older:
        raise OlderLayout(older)
    if newest is None:
        raise StorageError(f"there is no run in {root}", "train first, or set run.root to where the runs are")
    return _readable(newest[1].paths)


def _create_fresh(root: Path, label: str) -> RunDirectory:
    for _ in range(_TRIES):
        date, folder = fresh_name(label)
        if _make(root / date / folder):
            return RunDirectory(RunPaths(root / date / folder))
    raise StorageError(f"{_TRIES} names in {root} were all taken", "set run.name")


def _runs_below(root: Path) -> Iterator[RunDirectory]:
    """Every directory with a ``run.json``, not looking inside runs and hidden folders."""
    for folder, children, files in os.walk(root):
        if RUN_JSON in files:
            children.clear()
            yield RunDirectory(RunPaths(Path(folder)))
        children[:] = [child for child in children if not child.startswith(".")]
