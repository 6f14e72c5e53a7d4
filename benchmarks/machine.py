"""Where something was measured: whatever moves the numbers."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

#: Packages whose versions belong to a result.
PACKAGES = ("torch", "torchvision", "hydra-core", "lightning", "accelerate", "timm")
#: Instructions that decide how half-precision arithmetic runs on a CPU.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")


def facts() -> dict[str, Any]:
    """Processor, cores, memory, device, versions and commit; JSON values."""
    info = _cpu_info()
    flags = set(info.get("flags", "").split())
    found: dict[str, Any] = {
        "processor": info.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["device"] = {
            "name": torch.cuda.get_device_name(),
            "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **_driver(),
        }
    return found


def _cpu_info() -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def _version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _commit() -> str:
    """The commit of the sources, with ``+`` where they were changed since; empty where git does not know."""
    root = Path(__file__).resolve().parents[1]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        sha = _output("git", "-C", str(root), "rev-parse", "--short", "HEAD")
        changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", "mptrain")
        return sha + ("+" if changed else "")
    return ""


def _driver() -> dict[str, str]:
    """Driver and clocks of the first NVIDIA device, as its own tool says them."""
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        told = _output("nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader").split(", ")
        return dict(zip(asked.split(","), told, strict=False))
    return {}


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
