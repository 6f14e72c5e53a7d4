"""Device abstraction: capabilities of devices, and the calls that differ between them.

Functions that all accelerators share come from torch.accelerator, others from the device's module
(`torch.get_device_module`). `Capabilities` lists the features that a device lacks. Only CPUs have been used for
training. CUDA support follows its documentation; support of ROCm (which torch calls ``cuda``), XPU and MPS follows
torch's sources.
"""

from __future__ import annotations

import contextlib
import functools
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
    """Capabilities of a device.

    Attributes:
        host: Its memory is host memory, which the host reads without synchronising.
        fp64: Supports FP64 tensors.
        fp16: Supports fast FP16 products, or on a CPU upcast ones (`mptrain.precision.upcast`).
        bf16: Supports BF16 products likewise.
        tf32: Supports TF32 in FP32 products.
        graphs: Launched work can be captured in a graph and replayed.
        pinned: Supports asynchronous copies from and to pinned memory.
        streams: Supports concurrent streams and events.
        fused: Has torch's fused optimizers, which skip an update on the device.
        triton: Has Triton kernels in mptrain.
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
    triton: bool = False


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities of a device, cached for the process."""
    return _ask(device)


def _ask(device: torch.device) -> Capabilities:
    if device.type == "cuda":
        if is_rocm():
            return Capabilities(graphs=True, pinned=True, streams=True)
        level = compute_capability(device)
        volta, ampere = level >= (7, 0), level >= (8, 0)
        # Tensor cores support FP16 from Volta on, BF16 and TF32 from Ampere on.
        return Capabilities(fp16=volta, bf16=ampere, tf32=ampere, graphs=True, pinned=True, streams=True, triton=volta)
    if device.type == "xpu":
        properties: Any = torch.get_device_module(device).get_device_properties(device)
        # Some Intel devices have no FP64.
        return Capabilities(fp64=properties.has_fp64, fp16=properties.has_fp16, pinned=True, streams=True, fused=False)
    if device.type == "mps":
        return Capabilities(fp64=False, bf16=torch.backends.mps.is_macos_or_newer(14, 0), fused=False)
    return Capabilities(host=device.type == "cpu")


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of a device: float64 or float32."""
    return torch.float64 if capabilities(device).fp64 else torch.float32


def in_widest(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest floating-point dtype of its device."""
    return tensor.to(widest(tensor.device))


def beside_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor on a device with FP64: its own device, or the CPU, which synchronises."""
    return tensor if capabilities(tensor.device).fp64 else tensor.cpu()


def count_of(kind: str) -> int:
    """Return the number of devices of a kind (``cuda``, ``xpu``, ``mps``); torch supports one kind at a time."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if found is not None and found.type == kind else 0


def other_accelerator() -> str | None:
    """Return the kind of this machine's accelerator if it is not CUDA; otherwise None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type != "cuda" else None


def use(device: torch.device) -> None:
    """Make a device the current device, which pinned memory, streams and compiled kernels use."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def current(kind: str) -> torch.device:
    """Return the current device of a kind."""
    return torch.device(kind, torch.accelerator.current_device_index())


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current device."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device with `Capabilities.streams`."""
    return torch.get_device_module(device).current_stream(device)


def new_stream(device: torch.device) -> Any:
    """Create a new stream on a device with `Capabilities.streams`."""
    return torch.get_device_module(device).Stream(device)


def on_stream(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which a stream is the current stream of a device."""
    region: AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return region


def event_now(device: torch.device, *, sleeping: bool = False) -> Any:
    """Record an event on the current stream of a device with `Capabilities.streams`.

    Args:
        device: The device.
        sleeping: Whether a thread that waits for the event sleeps instead of spinning; only CUDA supports the choice.
    """
    make = torch.get_device_module(device).Event
    event = make(blocking=sleeping) if device.type == "cuda" else make()
    event.record(current_stream(device))  # explicit, because the device need not be the current one
    return event


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph capture is in progress on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of accelerator memory currently allocated for tensors."""
    module = torch.get_device_module(device)
    used: int = module.current_allocated_memory() if device.type == "mps" else module.memory_allocated(device)
    return used


def memory_peak(device: torch.device) -> int:
    """Return the peak bytes of accelerator memory allocated for tensors; on MPS, the current bytes."""
    if device.type == "mps":
        return memory_in_use(device)
    peak: int = torch.get_device_module(device).max_memory_allocated(device)
    return peak


def forget_peak(device: torch.device) -> None:
    """Reset the peak of `memory_peak`."""
    if device.type != "mps":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's random number generator."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of an accelerator's random number generator."""
    torch.get_device_module(device).set_rng_state(state, device)


def name_of(device: torch.device) -> str:
    """Return the product name of an accelerator."""
    if device.type == "mps":
        return "Apple GPU"
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


def properties_of(device: torch.device) -> Any:
    """Return torch's properties of a CUDA or XPU device."""
    return torch.get_device_module(device).get_device_properties(device)


def total_memory(device: torch.device) -> int:
    """Return the bytes of accelerator memory; on MPS, the maximum that Metal recommends."""
    module = torch.get_device_module(device)
    size: int = module.recommended_max_memory() if device.type == "mps" else properties_of(device).total_memory
    return size


def is_rocm() -> bool:
    """Return whether torch's ``cuda`` is ROCm, so that devices are AMD GPUs."""
    return torch.version.hip is not None


def untried(device: torch.device) -> str:
    """Return a warning for a kind of device on which mptrain is untested; otherwise empty."""
    if device.type == "cuda":
        return "ROCm/HIP is untested: mptrain has never been run on an AMD GPU" if is_rocm() else ""
    if device.type not in NAMES:
        return ""
    lacks = "" if capabilities(device).fp64 else "; without FP64, norms and scalers compute in FP32"
    return f"device={device.type} is untested: mptrain has never been run on {NAMES[device.type]}{lacks}"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA device."""
    return torch.cuda.get_device_capability(device)


def built_for() -> tuple[str, ...]:
    """Return the architectures of this torch build's CUDA kernels, such as ``sm_80``."""
    return tuple(torch.cuda.get_arch_list())


def has_kernels(level: tuple[int, int], built: tuple[str, ...]) -> bool:
    """Return whether an NVIDIA device can run the kernels of a torch build.

    Machine code (``sm_80``) runs on devices of the same major version and an equal or later minor version; with the
    suffix ``a``, only on that exact version. The driver compiles PTX (``compute_80``) for that and all later versions.

    Args:
        level: Compute capability.
        built: Architectures of the build (`built_for`); unknown entries are ignored.
    """
    for entry in built:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry):
            kind, own, bound = found[1], (int(found[2]), int(found[3])), found[4]
            same_major = own[0] == level[0] and own <= level
            if own == level or (bound != "a" and (same_major or (kind == "compute" and not bound and own <= level))):
                return True
    return False
