"""Description of a run and its environment (command, versions, device) for ``run.json``."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import replace

import torch

from mptrain import __version__
from mptrain.config.schema import Config
from mptrain.device import name_of
from mptrain.runlog import RunDirectory, RunState


def describe(
    directory: RunDirectory, config: Config, device: torch.device, ranks: int, before: RunState | None
) -> RunState:
    """Return the content of ``run.json`` for a run that is about to start or resume: command, versions, device etc.

    Args:
        directory: The run directory.
        config: Configuration of the run.
        device: Training device.
        ranks: World size.
        before: Previous state in ``run.json``; its attempts are kept. None for a new run.
    """
    state = RunState(
        id=os.path.relpath(directory.root, config.run.root),
        argv=tuple(sys.argv[1:]),
        command=f"mptrain {shlex.join(config.overrides)}".strip(),
        git_sha=_git_sha(),
        versions=versions_now(),
        device=_device_in_words(device),
        precision=config.precision.describe(),
        ranks=ranks,
    )
    return replace(state, attempts=before.attempts) if before else state


def versions_now() -> dict[str, str]:
    """Return the versions of mptrain, Python, torch and torch's GPU toolkit (``cuda`` or ``hip``), by name."""
    versions = {"mptrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    toolkits = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return versions | {name: version for name, version in toolkits.items() if version}


def _device_in_words(device: torch.device) -> str:
    if device.type != "cpu":
        return f"{device} ({name_of(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads != 1)}, {torch.backends.cpu.get_cpu_capability()})"


def _git_sha() -> str | None:
    """Return the commit of the Git repository in the working directory, or None if there is none."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
