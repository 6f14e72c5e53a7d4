"""Creation, lookup and locking of run directories, each of which holds all files of one training run.

The text in the lock file only names the holder for people. Only the kernel decides whether the lock is held.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mptrain.runlog.atomic_files import (
    TEMPORARY,
    remove_drafts,
    require_folder_stays,
    require_no_links,
    storage_errors,
    sync_folder,
    write_all,
    write_atomically,
)
from mptrain.runlog.manifest import manifests_in
from mptrain.runlog.run_paths import RUN_JSON, RunPaths, check_run_name, fresh_name
from mptrain.runlog.run_state import SCHEMA, RunState, now, read_state
from mptrain.runlog.strict_json import parse_strict, read_object
from mptrain.system.errors import ConfigError, OtherVersion, StorageError, did_you_mean
from mptrain.system.files import open_in_place, open_to_read, read_bytes, require_replaceable

PATIENCE = 0.3  # seconds to retry; a reader in `holder_of` blocks a writer for microseconds

_held: set[int] = set()


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Process that holds the lock of a run or sweep, as it wrote itself into the lock file.

    Attributes:
        pid: Process id; 0 if the process has not written it yet.
        host: Host name; empty if unknown.
        since: Time at which it took the lock, UTC in ISO 8601; empty if unknown.
    """

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}" if self.pid else "another process"


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a run or sweep folder inside the ``with`` block.

    The lock file is created if missing and never removed. Its folder must stay in place meanwhile. Raise StorageError
    if another process holds the lock; the message names it.
    """
    with storage_errors(path, "lock"):
        descriptor = open_in_place(path, os.O_RDWR)
        try:
            deadline = time.monotonic() + PATIENCE
            while not (taken := _take(descriptor)) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not taken:
                raise StorageError(
                    f"{path.parent} is being written by {_read_holder(descriptor)}",
                    "wait until that process ends, stop it, or choose another run.name",
                )
            os.ftruncate(descriptor, 0)
            holder = LockHolder(os.getpid(), socket.gethostname(), now())
            write_all(descriptor, bytearray(json.dumps(asdict(holder)).encode() + b"\n"))
        except BaseException:
            os.close(descriptor)
            raise
    _held.add(descriptor)
    try:
        with require_folder_stays(path.parent):
            yield
    finally:
        if descriptor in _held:  # a forked child has already closed its copy
            _held.discard(descriptor)
            os.close(descriptor)  # the kernel releases the lock with its last descriptor


def holder_of(path: Path) -> LockHolder | None:
    """Return the process that holds a lock; None if the lock is free or its file does not exist."""
    if not path.exists():
        return None
    with storage_errors(path, "read"), open_to_read(path) as file:
        return None if _take(file.fileno(), shared=True) else _read_holder(file.fileno())


def _take(descriptor: int, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _read_holder(descriptor: int) -> LockHolder:
    text = os.pread(descriptor, 4096, 0)
    try:
        return LockHolder(**parse_strict(text.decode()))
    except (ValueError, TypeError):  # the holder has not written its name yet
        return LockHolder(0, "", "")


def _forget_in_child() -> None:
    """Close the lock in a forked worker, because its copy would outlive a killed parent. The parent keeps the lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


_TRIES = 100


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Existing directory of one training run, with access to its lock and its small files."""

    paths: RunPaths

    @property
    def root(self) -> Path:
        """Path of the run directory."""
        return self.paths.root

    def lock(self) -> AbstractContextManager[None]:
        """Return a context manager that holds the run's write lock; the kernel releases it if the process dies.

        Raise StorageError if another process holds the lock; the message names it and its host.
        """
        return hold_lock(self.paths.lock)

    def holder(self) -> LockHolder | None:
        """Return the process that is writing this run (it holds the lock); None if no process is."""
        return holder_of(self.paths.lock)

    def read_state(self) -> RunState | None:
        """Read ``run.json``; None if the process of the run was killed before it wrote the file."""
        return read_state(self.paths.run_json)

    def write_state(self, state: RunState) -> None:
        """Write ``run.json`` (identity, status and attempts of the run), replacing it atomically and durably."""
        write_atomically(self.paths.run_json, state.to_json())

    def write_config(self, config: str, overrides: Sequence[str]) -> None:
        """Write the configuration of the run, ``config.yaml``, and the overrides it was made from, ``overrides.yaml``.

        ``config`` is the fully resolved configuration as YAML text. ``overrides`` are the ``KEY=VALUE`` overrides of
        the command line, written as a YAML list of quoted strings.
        """
        lines = [f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides]
        write_atomically(self.paths.config, config)
        write_atomically(self.paths.overrides, "".join(lines) or "[]\n")

    def read_overrides(self) -> tuple[str, ...]:
        """Read the ``KEY=VALUE`` overrides of the command line from ``overrides.yaml``; empty without the file."""
        path = self.paths.overrides
        with storage_errors(path, "read"):  # keeps undecodable bytes of a command line
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
        """Remove temporary files of killed processes from the run directory; the caller must hold the run's lock."""
        for folder in (self.root, *filter(Path.is_dir, self.paths.folders)):
            remove_drafts(folder)

    def read_config(self) -> str:
        """Read the text of ``config.yaml``, the resolved configuration of the run."""
        path = self.paths.config
        with storage_errors(path, "read"):
            content = read_bytes(path)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"byte {error.start} is not UTF-8 ({error.reason})"
            raise StorageError(f"{path} is damaged: {what}", "restore the file from a copy") from error


def create_run(root: Path, label: str, name: str | None = None) -> RunDirectory:
    """Create a new, empty run directory: ``ROOT/NAME``, or without a name ``ROOT/DATE/TIME-LABEL-xxxx``.

    ``root`` (``run.root``) is created if missing; ``label`` is ``MODEL-DATASET-PRECISION``; ``name`` is ``run.name``.

    Raises:
        ConfigError: The name is invalid (`check_run_name`), or is ``last``.
        StorageError: ``ROOT/NAME`` exists, lies inside another run, or cannot be created.
    """
    if name is None:
        return _create_fresh(root, label)
    check_run_name(name)
    if name == "last":  # existing runs of this name can still be resumed
        raise ConfigError("run.name='last' is reserved: commands use it for the newest run", "choose another run.name")
    path = root / name
    require_outside_runs(path.parent)
    if not _make(path):
        raise StorageError(
            f"run directory {path} exists", "continue it with run.resume=auto, or choose another run.name"
        )
    return RunDirectory(RunPaths(path))


def require_outside_runs(path: Path) -> None:
    """Raise StorageError for a path that a user gives to write to, if it is, or lies in, a run directory."""
    resolved = Path(os.path.realpath(path))
    for folder in (resolved, *resolved.parents):
        if os.access(folder / RUN_JSON, os.F_OK):
            hint = "choose a path, or a run.root and run.name, outside of runs: their files stay as they are"
            raise StorageError(f"{path} {'is' if folder == resolved else 'lies in'} the run {folder}", hint)


def require_target(path: Path, own: Path | None = None) -> None:
    """Raise StorageError, before any work, if a file cannot be written where a user wants it.

    It must not lie in a run directory, but for the folder ``own``; what is there must be a regular file, and its folder
    be writable. What killed writers of the same file have left is removed.
    """
    if own is None or Path(os.path.realpath(path.parent)) != Path(os.path.realpath(own)):
        require_outside_runs(path)
    require_replaceable(path)
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {path}: {path.parent} is read-only", "choose a writable folder")
    remove_drafts(path.parent, path.name)


def _make(path: Path) -> bool:
    """Create a directory and its parents; False if it exists. If several processes try, exactly one gets True."""
    with storage_errors(path, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            return False
        sync_folder(path.parent)
    return True


def existing_run(root: Path, name: str) -> RunDirectory | None:
    """Return the run directory ``ROOT/NAME``, so that the caller can resume the run; None if it does not exist.

    If the process was killed before it wrote ``run.json``, the directory counts as a run without a state.

    Raises:
        ConfigError: The name is invalid.
        OtherVersion: Another version of mptrain wrote the run.
        StorageError: ``ROOT/NAME`` is not a run directory, contains symbolic links, or cannot be read.
    """
    paths = RunPaths(root / check_run_name(name))
    with storage_errors(paths.root, "read"):
        if not paths.root.exists():
            return None
        if paths.run_json.exists() or _was_killed_early(paths):
            return _readable(paths)
    raise StorageError(f"{paths.root} exists and is not a run: it has no {RUN_JSON}", "choose another run.name")


def _was_killed_early(paths: RunPaths) -> bool:
    """Return whether a folder has at most the files that a start writes before ``run.json``."""
    early = {path.name for path in (paths.lock, paths.config, paths.overrides, paths.data, paths.trained_samples)}
    return {entry.name for entry in paths.root.iterdir() if entry.suffix != TEMPORARY} <= early


def open_run(path: Path, *, any_version: bool = False) -> RunDirectory:
    """Return the run directory at a path, after checking that it is one.

    With ``any_version`` the reader of its ``run.json`` checks the version.

    Raises:
        OtherVersion: Another version of mptrain wrote the run.
        StorageError: The directory does not exist, has no ``run.json``, or contains symbolic links.
    """
    paths = RunPaths(path)
    with storage_errors(path, "read"):
        if not path.is_dir():
            raise StorageError(f"no run directory {path}", _meant(path))
    if not paths.run_json.exists():
        if paths.lock.exists() and _was_killed_early(paths):
            why = f"{path} has no {RUN_JSON}: the run was killed before training started"
            raise StorageError(why, "repeat its command with run.resume=auto, or remove the folder")
        raise StorageError(f"{path} is not a run directory: it has no {RUN_JSON}", "give the folder of a run")
    return _readable(paths, any_version=any_version)


def refuse_other_version(path: Path) -> None:
    """Raise OtherVersion for a run directory of another version, whose formats this one cannot read.

    Only the schema number in ``run.json`` is checked. A missing or damaged file passes.
    """
    try:
        read_object(RunPaths(path).run_json, SCHEMA, missing_ok=True)
    except OtherVersion:
        raise
    except StorageError:
        return


def _readable(paths: RunPaths, *, any_version: bool = False) -> RunDirectory:
    require_no_links(paths.root, paths.folders)
    if not any_version:
        refuse_other_version(paths.root)
    return RunDirectory(paths)


def _meant(path: Path) -> str:
    """Return a hint for a path that is not a directory: the run that contains the file, or a run of a similar name."""
    if path.exists():
        for folder in path.parents:
            if (folder / RUN_JSON).exists():
                return f"it is a file of a run; use {folder}"
    runs: dict[str, Path] = {}
    for root in dict.fromkeys((Path("outputs"), path.parent if path.parent.name else Path("outputs"))):
        runs |= {str(run.root.relative_to(root)): run.root for run in runs_below(root)}
    names = {**runs, "last": "last"}
    guess = did_you_mean(path.name, names) or did_you_mean(str(path), names)
    return f"did you mean {names[guess]}?" if guess else "give a folder that contains a run.json, or last"


def find_run(run: str, root: Path = Path("outputs")) -> RunDirectory:
    """Find a run that the user named on the command line.

    ``run`` is the path of the run directory, the run's name below the root, or ``last`` for the newest run there. Raise
    StorageError if it does not exist, or has no ``config.yaml`` (yet).
    """
    named = root / run  # the run.name of the run
    with storage_errors(named, "read"):
        is_run = RunPaths(Path(run)).run_json.exists()  # a folder of the same name may have the data
        path = named if named.is_dir() and not is_run else Path(run)
    directory = last_run(root) if run == "last" else open_run(path)
    if not directory.paths.config.exists():
        killed = not any(True for _ in manifests_in(directory.paths.checkpoints))
        raise StorageError(
            f"{directory.root} has no config.yaml",
            "it was killed before training started: start it again" if killed else "restore the file from a copy",
        )
    return directory


def last_run(root: Path) -> RunDirectory:
    """Return the run directory below a root folder whose run was started or resumed last.

    Directories with a damaged ``run.json`` are ignored.

    Raises:
        OtherVersion: Other versions of mptrain wrote all runs below the root.
        StorageError: There is no run below the root, or the last one contains symbolic links.
    """
    newest: tuple[str, RunDirectory] | None = None
    other: OtherVersion | None = None
    for run in runs_below(root):
        try:
            started = _last_start(run.paths.run_json)
        except OtherVersion as error:
            other = error
            continue
        except StorageError:
            continue
        if started is not None and (newest is None or started > newest[0]):
            newest = (started, run)
    if newest is None and other is not None:
        raise other
    if newest is None:
        raise StorageError(f"there is no run in {root}", "train first, or set run.root to where the runs are")
    return _readable(newest[1].paths)


def _last_start(path: Path) -> str | None:
    """Return the start of the last attempt in a ``run.json``, empty without one; None if it is missing or damaged.

    The other fields are not checked, because there may be thousands of runs and the shell may wait for completions.
    """
    fields = read_object(path, SCHEMA, missing_ok=True)
    match fields.get("attempts", []):
        case [*_, {"started": str(started)}]:
            return started
        case []:
            return "" if fields else None
    return None


def _create_fresh(root: Path, label: str) -> RunDirectory:
    require_outside_runs(root)
    for _ in range(_TRIES):
        date, folder = fresh_name(label)
        if _make(root / date / folder):
            return RunDirectory(RunPaths(root / date / folder))
    raise StorageError(f"no unused run name found in {root} after {_TRIES} tries", "set run.name")


def runs_below(root: Path) -> Iterator[RunDirectory]:
    """Yield every directory with a ``run.json``, without descending into runs and hidden folders."""
    for folder, children, files in os.walk(root):
        if RUN_JSON in files:
            children.clear()
            yield RunDirectory(RunPaths(Path(folder)))
        children[:] = [child for child in children if not child.startswith(".")]
