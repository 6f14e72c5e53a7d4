"""Says in ``run.json`` what a run is, and what it runs on."""

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
    """The state of a run that is about to be worked on.

    Args:
        directory: Its directory.
        config: Its configuration.
        device: Where it will train.
        ranks: On how many processes.
        before: What ``run.json`` said until now; its attempts are kept.
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
    """Name to version of what computes."""
    versions = {"mptrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    toolkits = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return versions | {name: version for name, version in toolkits.items() if version}


def _device_in_words(device: torch.device) -> str:
    if device.type != "cpu":
        return f"{device} ({name_of(device)})"
    return f"cpu ({torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})"


def _git_sha() -> str | None:
    """The commit of the working directory's repository, if it is one."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
