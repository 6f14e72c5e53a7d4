"""Says in ``run.json`` what a run is, what it runs on, and how it failed."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mptrain import __version__
from mptrain.config.targets import is_allowed
from mptrain.errors import EXIT_BUG, ConfigError, MptrainError, Preempted, StorageError
from mptrain.masking import masked
from mptrain.runlog import RunDirectory, RunState, write_atomically

if TYPE_CHECKING:
    from mptrain.config.schema import Config


def describe(directory: RunDirectory, config: Config, device: torch.device, before: RunState | None) -> RunState:
    """The state of a run that is about to be worked on.

    Args:
        directory: Its directory.
        config: Its configuration.
        device: Where it will train.
        before: What ``run.json`` said until now; its attempts are kept.
    """
    state = RunState(
        id=os.path.relpath(directory.root, config.run.root),
        argv=tuple(sys.argv[1:]),
        command=f"mptrain {shlex.join(config.overrides)}".strip(),
        git_sha=_git_sha(),
        versions=versions_now(),
        device=_device_in_words(device),
        precision=config.precision.in_words(),
    )
    return replace(state, attempts=before.attempts) if before else state


def versions_now() -> dict[str, str]:
    """Name to version of what computes."""
    versions = {"mptrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def how_it_failed(error: BaseException, directory: RunDirectory) -> tuple[Any, str, int]:
    """Status, reason and exit code for ``run.json``; an unexpected error leaves its traceback in ``failure/``."""
    if isinstance(error, Preempted):
        return "preempted", str(error), error.exit_code
    if isinstance(error, MptrainError):
        return "failed", str(error), error.exit_code
    with contextlib.suppress(OSError, StorageError):
        directory.paths.failure.mkdir(exist_ok=True)
        write_atomically(directory.paths.failure / "traceback.txt", masked("".join(traceback.format_exception(error))))
    return "failed", f"{type(error).__name__}: {error}", EXIT_BUG


def users_own(error: BaseException, config: Config) -> ConfigError | None:
    """What to say about an exception that came out of a package of the user's, rather than out of ours.

    Args:
        error: Unexpected.
        config: Its ``extensions.allow`` says which packages are the user's.

    Returns:
        An error that names the innermost place in such a package; None if the traceback leads through none.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if is_allowed(module, config.extensions.allow) and not is_allowed(module, ("mptrain",)):
            place = f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
    if place is None:
        return None
    return ConfigError(
        f"{place}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
        "that is code which extensions.allow lets in; the whole traceback is in the run's failure folder",
    )


def _device_in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})"


def _git_sha() -> str | None:
    """The commit of the working directory's repository, if it is one."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
