"""Device abstraction: numeric formats and features of torch devices, and the calls that differ between them.

Functions that all accelerators share come from torch.accelerator, others from the device's module
(`torch.get_device_module`). `Capabilities` lists the features that not every device has. CPUs and an
NVIDIA H200 have been used for training; support of ROCm (which torch calls ``cuda``), XPU and MPS follows torch's
sources.
"""

from __future__ import annotations

import functools
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Display names of accelerators.
NAMES = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


@dataclass(frozen=True)
class Capabilities:
    """Numeric formats and features that a torch device supports; a field is True if the device has the feature.

    Attributes:
        host: The device's memory is host memory, which the host reads without synchronising.
        fp16: Fast FP16 matrix products and convolutions, likewise ``bf16``; on a CPU also
            upcast ones (`mptrain.precision.upcast`).
        tf32: TF32 arithmetic inside FP32 matrix products.
        graphs: Launched work can be captured in a graph (a CUDA graph) and replayed.
        pinned: Asynchronous copies from and to pinned host memory.
        streams: Concurrent streams and events.
        fused: torch's fused optimizers, which can skip an update on the device (``found_inf``).
    """

    host: bool = False
    fp64: bool = True
    fp16: bool = True
    bf16: bool = True
    tf32: bool = False
    graphs: bool = False
    pinned: bool = False
    streams: bool = False
    fused: bool = True


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the numeric formats and features that a device supports, cached for the process."""
    return _ask(device)


def _ask(device: torch.device) -> Capabilities:
    if device.type == "cuda":
        if is_rocm():
            return Capabilities(graphs=True, pinned=True, streams=True)
        level = compute_capability(device)
        ampere = level >= (8, 0)  # tensor cores support BF16 and TF32
        return Capabilities(
            fp16=has_tensor_cores(device), bf16=ampere, tf32=ampere, graphs=True, pinned=True, streams=True
        )
    if device.type == "xpu":
        properties: Any = torch.get_device_module(device).get_device_properties(device)
        # Some Intel devices have no FP64.
        return Capabilities(fp64=properties.has_fp64, fp16=properties.has_fp16, pinned=True, streams=True, fused=False)
    if device.type == "mps":
        return Capabilities(fp64=False, bf16=torch.backends.mps.is_macos_or_newer(14, 0), fused=False)
    return Capabilities(host=device.type == "cpu")


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype that a device supports: float64, or float32 on a device without FP64."""
    return torch.float64 if capabilities(device).fp64 else torch.float32


def in_widest(tensor: Tensor) -> Tensor:
    """Convert a tensor to the widest floating-point dtype that its device supports: float64, or else float32."""
    return tensor.to(widest(tensor.device))


def beside_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor on a device that supports FP64, with its dtype unchanged.

    A tensor whose device supports FP64 is returned as it is. Any other (MPS, some XPU) is copied to the
    CPU, which synchronises.
    """
    return tensor if capabilities(tensor.device).fp64 else tensor.cpu()


def count_of(kind: str) -> int:
    """Return the number of accelerators of one kind (``cuda``, ``xpu``, ``mps``); torch supports one kind at a time.

    It is 0 if torch's accelerator is of another kind or there is none.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0


def other_accelerator() -> str | None:
    """Return the device type of this machine's accelerator if it is not CUDA (``xpu``, ``mps``); otherwise None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type != "cuda" else None


def use(device: torch.device) -> None:
    """Make a device torch's current device, which pinned memory, streams and compiled kernels use; CPUs are ignored."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def seed(number: int) -> None:
    """Seed torch's default generators: the CPU's, and those of this machine's accelerators.

    Without an accelerator `torch.manual_seed` would describe the whole stack for CUDA devices that may come, each time.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def begun() -> torch.device | None:
    """Return this machine's accelerator if this process has begun to use it; otherwise None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return None
    return accelerator


def current(kind: str) -> torch.device:
    """Return the current device of this machine's kind of accelerator, such as ``cuda``, with its index."""
    return torch.device(kind, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device that supports streams (`Capabilities.streams`)."""
    return torch.get_device_module(device).current_stream(device)


def new_stream(device: torch.device) -> Any:
    """Create a stream on a device that supports streams (`Capabilities.streams`)."""
    return torch.get_device_module(device).Stream(device)


def on_stream(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Return a context manager that makes a stream of a device the current stream of that device."""
    region: AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return region


def event_now(device: torch.device, *, sleeping: bool = False) -> Any:
    """Record a new event on the current stream of a device that supports streams, and return the event.

    ``sleeping`` lets a thread that waits for the event sleep instead of spin; only CUDA supports the choice.
    """
    make = torch.get_device_module(device).Event
    event = make(blocking=sleeping) if device.type == "cuda" else make()
    event.record(current_stream(device))  # explicit, because the device need not be the current one
    return event


def memory_in_use(device: torch.device) -> int:
    """Return the number of bytes of an accelerator's memory that are currently allocated for tensors."""
    module = torch.get_device_module(device)
    used: int = module.current_allocated_memory() if device.type == "mps" else module.memory_allocated(device)
    return used


def memory_peak(device: torch.device) -> int:
    """Return the peak number of bytes of an accelerator's memory allocated for tensors since `forget_peak`.

    MPS has no peak; there it is the number of bytes currently allocated.
    """
    if device.type == "mps":
        return memory_in_use(device)
    peak: int = torch.get_device_module(device).max_memory_allocated(device)
    return peak


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `memory_peak` returns to the memory currently allocated; no effect on MPS."""
    if device.type != "mps":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's random number generator, a uint8 tensor on the CPU."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of an accelerator's random number generator to one that `random_state` returned."""
    torch.get_device_module(device).set_rng_state(state, device)


def name_of(device: torch.device) -> str:
    """Return the product name of an accelerator, such as ``NVIDIA A100-SXM4-40GB``."""
    if device.type == "mps":
        return "Apple GPU"
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


def properties_of(device: torch.device) -> Any:
    """Return torch's device properties (memory, multiprocessors, ...) of a CUDA or XPU device."""
    return torch.get_device_module(device).get_device_properties(device)


def total_memory(device: torch.device) -> int:
    """Return the number of bytes of a device's memory; on MPS, the maximum that Metal recommends."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    module = torch.get_device_module(device)
    size: int = module.recommended_max_memory() if device.type == "mps" else properties_of(device).total_memory
    return size


def is_rocm() -> bool:
    """Return whether torch was built for ROCm, so that devices of type ``cuda`` are AMD GPUs."""
    return torch.version.hip is not None


def untried(device: torch.device) -> str:
    """Return a warning for the user if mptrain was never run on this kind of device; empty for CPUs and NVIDIA GPUs."""
    if device.type == "cuda" and is_rocm():
        return "ROCm/HIP is untested: mptrain has never been run on an AMD GPU"
    if device.type == "cuda" or device.type not in NAMES:
        return ""
    lacks = "" if capabilities(device).fp64 else "; without FP64, norms and scalers compute in FP32"
    return f"device={device.type} is untested: mptrain has never been run on {NAMES[device.type]}{lacks}"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability of an NVIDIA device as (major, minor), such as (8, 0)."""
    return torch.cuda.get_device_capability(device)


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether an NVIDIA device has tensor cores, which compute in FP16: from Volta on, but for small Turings."""
    level = compute_capability(device)
    return level >= (7, 0) and not (level == (7, 5) and _SMALL_TURING.search(name_of(device)))


#: Names of devices of compute capability 7.5 on the chips TU116 and TU117, which have no tensor cores.
_SMALL_TURING = re.compile(r"\b(GTX 16\d\d|MX[45]50|T(400|500|550|600|1000|1200|2000))\b")


def built_for() -> tuple[str, ...]:
    """Return the architectures of this torch build's CUDA kernels, such as ``sm_80``."""
    return tuple(torch.cuda.get_arch_list())


def has_kernels(level: tuple[int, int], built: tuple[str, ...]) -> bool:
    """Return whether an NVIDIA device of compute capability ``level`` can run the CUDA kernels of a torch build.

    Machine code (``sm_80``) runs on devices of the same major version and an equal or later minor version; with the
    suffix ``a``, only on that exact version. The driver compiles PTX (``compute_80``) for that and all later versions.
    Unknown entries are ignored.
    """
    for entry in built:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry):
            kind, own, bound = match[1], (int(match[2]), int(match[3])), match[4]
            same_major = own[0] == level[0] and own <= level
            if own == level or (bound != "a" and (same_major or (kind == "compute" and not bound and own <= level))):
                return True
    return False
