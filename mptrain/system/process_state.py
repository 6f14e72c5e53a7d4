"""State of a process that trains: torch's settings, random number generators, and versions and devices."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from mptrain import __version__
from mptrain.system import device as devices
from mptrain.system.device import begun, compute_capability, name_of

#: Variables of the environment that a run with ``train.deterministic`` or ``train.compile`` sets.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore afterwards what keys of a run set: torch's threads, deterministic and benchmark mode, and precision."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    mode = torch.get_deterministic_debug_mode()
    try:
        with _matmul_precision_restored():
            yield
    finally:
        torch.set_num_threads(threads)
        if torch.get_deterministic_debug_mode() != mode:  # setting it imports torch's compiler
            torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _matmul_precision_restored() -> Iterator[None]:
    """Restore what `mptrain.precision.apply.set_matmul_precision` sets when the context ends."""
    cuda, cudnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha
    names = [(cuda.matmul, f"allow_{dtype}_reduced_precision_reduction") for dtype in ("fp16", "bf16")]
    settings: list[tuple[Any, str]] = [*names, (cuda.matmul, "fp32_precision")]
    settings += [(getattr(cudnn, kind), "fp32_precision") for kind in ("conv", "rnn")]
    before = [getattr(*setting) for setting in settings]
    fused, sums = mha.get_fastpath_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()
    try:
        yield
    finally:
        mha.set_fastpath_enabled(fused)
        cuda.allow_fp16_bf16_reduction_math_sdp(sums)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cuda.matmul.allow_tf32, cudnn.allow_tf32 = before[2] == "tf32", before[3] == "tf32"
        for setting, value in zip(settings, before, strict=True):
            setattr(*setting, value)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, of NumPy, and of torch on every device, so that a run can be reproduced."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    devices.seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and an accelerator's generators by name, for a checkpoint.

    The names are ``python``, ``numpy``, ``torch``, and the device type such as ``cuda``. The values are of types that
    ``torch.load(..., weights_only=True)`` accepts.
    """
    version, internal, gauss = random.getstate()
    _, key, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    states: dict[str, Any] = {
        "numpy": {"key": key.tolist(), "position": position, "has_gauss": has_gauss, "gauss": cached},
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = devices.random_state(device)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of the random generators that `random_state` returned, such as those of a checkpoint.

    NumPy's generator and an accelerator's are left unchanged if no state of theirs was saved.
    """
    python = states["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    if numpy := states.get("numpy"):
        np.random.set_state(("MT19937", numpy["key"], numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        devices.set_random_state(states[device.type], device)


@contextlib.contextmanager
def other_random_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed all random generators for the duration of a context, and restore their states afterwards."""
    states = random_state(device)
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(states, device)


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
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        match = None
    return match[0] if match else "unknown"


def device_in_words(device: torch.device) -> str:
    """Return a device with its name, or with the number of threads and the instructions of a CPU."""
    if device.type != "cpu":
        return f"{device} ({name_of(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads != 1)}, {torch.backends.cpu.get_cpu_capability()})"


def git_commit() -> str | None:
    """Return the commit of the current folder's repository; None outside of one."""
    try:
        completed = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None if completed.returncode == 0 else None


@contextlib.contextmanager
def caller_restored() -> Iterator[None]:
    """Restore generators of random numbers, filters of warnings, variables and the current folder afterwards.

    Contexts of the caller (``no_grad``, ``inference_mode``, ``autocast``, another default dtype or device) do not reach
    inside: numbers are those of the command line.
    """
    device = begun() or torch.device("cpu")
    states, folder, dtype = random_state(device), Path.cwd(), torch.get_default_dtype()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        torch.set_default_dtype(torch.float32)
        with contextlib.ExitStack() as stack:
            for context in (warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad()):
                stack.enter_context(context)
            for kind in {"cpu", device.type} if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled() else ():
                stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        os.chdir(folder)
        set_random_state(states, device)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
