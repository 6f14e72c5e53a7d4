"""Environment of a training run: versions, device, settings of torch's CUDA backends, commit of the source tree."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import torch

from mptrain import __version__
from mptrain.system.device import compute_capability, name_of

#: File in which NVIDIA's driver for Linux says its version.
_DRIVER = Path("/proc/driver/nvidia/version")


def versions_now() -> dict[str, str]:
    """Return the versions of mptrain, Python, torch and torch's GPU toolkit (``cuda`` or ``hip``), by name."""
    versions = {"mptrain": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    toolkits = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return versions | {name: version for name, version in toolkits.items() if version}


def cuda_backends(device: torch.device) -> dict[str, str]:
    """Return what decides the bits of CUDA kernels: compute capability, driver, cuDNN, and settings of torch.

    Settings have the names that they have in ``torch.backends``. Empty for a device that is not a CUDA device.
    """
    if device.type != "cuda":
        return {}
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    values = {
        "compute_capability": ".".join(map(str, compute_capability(device))),
        "driver": _driver_version(),
        "cudnn.version": cudnn.version(),
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        "cuda.matmul.fp32_precision": cuda.matmul.fp32_precision,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuda.fp16_bf16_reduction_math_sdp_allowed": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    return {name: str(value) for name, value in values.items()}


def _driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, such as ``550.54.15``; ``unknown`` if Linux does not say it."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        found = None
    return found[0] if found else "unknown"


def device_in_words(device: torch.device) -> str:
    """Return a device with its name, or with the number of threads and the instructions of a CPU."""
    if device.type != "cpu":
        return f"{device} ({name_of(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads != 1)}, {torch.backends.cpu.get_cpu_capability()})"


def git_commit() -> str | None:
    """Return the commit of the current folder's repository; None outside of one."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
