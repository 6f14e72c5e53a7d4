"""What a device can do, and which precision suits it.

Facts: NVIDIA tensor cores take FP16 from compute capability 7.0 (Volta), BF16 and TF32 from 8.0 (Ampere). torch's own
`is_bf16_supported` counts emulation and says yes on a T4, so it is not asked. These are not asked of AMD's GPUs, which torch calls
``cuda`` as well, and whose numbers mean something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.device import (
    NAMES,
    Capabilities,
    built_for,
    capabilities,
    compute_capability,
    count_of,
    current,
    has_kernels,
    is_rocm,
    other_accelerator,
)
from mptrain.errors import EnvironmentRefused
from mptrain.precision.upcast import uses_upcast
from mptrain.torch_private import has_native_half

if TYPE_CHECKING:
    from mptrain.precision.policy import Policy


@dataclass(frozen=True)
class Support:
    """Whether a device can run a mode.

    Attributes:
        ok: It can be run without ``precision.force``.
        reason: What the device has or lacks.
        advice: What to choose instead, or what to expect; empty when there is nothing to say.
        forcible: Whether ``precision.force`` can make it run.
    """

    ok: bool
    reason: str
    advice: str = ""
    forcible: bool = True


def resolve_device(name: str) -> torch.device:
    """Return the device that ``auto``, ``cpu``, ``cuda``, ``xpu``, ``mps`` or one of them with a number stands for.

    ``auto`` takes a CUDA device or the CPU. XPU and MPS are taken only where they are asked for: nobody has trained on them here,
    and on MPS norms and scalers round differently, for want of FP64.

    Raises:
        EnvironmentRefused: An accelerator was asked for and is not there, or has fewer devices.
    """
    if name == "auto":
        return current("cuda") if count_of("cuda") else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    kind, count = NAMES[device.type], count_of(device.type)
    if count == 0:
        raise EnvironmentRefused(f"device={name}: torch sees no {kind} device", _instead_of(device.type))
    if (device.index or 0) >= count:
        there = f"are {count} {kind} devices" if count > 1 else f"is one {kind} device"
        raise EnvironmentRefused(
            f"device={name}: there {there}",
            f"use {device.type}:0 to {device.type}:{count - 1}" if count > 1 else f"use {device.type}",
        )
    return torch.device(device.type, device.index or 0)


def _instead_of(kind: str) -> str:
    """Return what to do without a device of a kind."""
    here = other_accelerator()
    if kind == "cuda" and here is not None:
        return f"this machine has {here}, which is untried: device={here}; or use device=cpu"
    needs = {
        "cuda": "use device=cpu or run: mptrain doctor",
        "xpu": "XPU needs an Intel GPU, its driver and torch's build for it; else use device=cpu, or run: mptrain doctor",
        "mps": "MPS needs macOS on Apple silicon and torch's build for it; else use device=cpu, or run: mptrain doctor",
    }
    return needs[kind]


def supports(policy: Policy, device: torch.device) -> Support:
    """Whether a device can run a policy, why, and what to choose instead."""
    if device.type == "cuda" and not is_rocm():
        return cuda_support(policy, compute_capability(device), built_for())
    if device.type != "cpu":
        return _untried_support(policy, "ROCm" if device.type == "cuda" else NAMES[device.type], capabilities(device))
    if policy.tf32:
        return Support(False, "a CPU has no TF32", "use precision=fp32")
    if not policy.half:
        return Support(True, "FP32 is native")
    if uses_upcast(policy, device):
        why = (
            "precision.cpu_kernels=upcast"
            if has_native_half(policy.compute)
            else f"this CPU has no {policy.compute} arithmetic"
        )
        return Support(
            True,
            f"{why}; products compute in FP32 and round once to {policy.compute}",
            "the numerics are those of tensor cores, but no faster than FP32",
        )
    if not has_native_half(policy.compute):
        return Support(
            True,
            f"this CPU has no {policy.compute} arithmetic, and native kernels were asked for",
            "expect steps 10 to 80 times slower than FP32; precision.cpu_kernels=auto avoids it",
        )
    if policy.compute == "float16" and policy.cpu_kernels == "auto":
        return Support(
            True, "float16 is native; gradients of convolutions, and LSTM layers, compute in FP32 and round once"
        )
    return Support(True, f"{policy.compute} is native")


def cuda_support(policy: Policy, capability: tuple[int, int], built: tuple[str, ...] = ()) -> Support:
    """As `supports`, for an NVIDIA device.

    Args:
        policy: The mode.
        capability: Compute capability of the device.
        built: What this torch has kernels for (`mptrain.device.built_for`); nothing is said of that where it is empty.
    """
    sm = f"compute capability {capability[0]}.{capability[1]}"
    if built and not has_kernels(capability, built):
        return Support(
            False,
            f"this torch has no kernels for {sm}; it has those for {', '.join(built)}",
            "install a build of torch for it (https://pytorch.org/get-started/locally), or use device=cpu",
            forcible=False,
        )
    if policy.compute == "bfloat16" and capability < (8, 0):
        instead = "precision=amp_dynamic" if capability >= (7, 0) else "precision=fp32"
        return Support(False, f"{sm} has no BF16 arithmetic (8.0 and later have)", f"use {instead}")
    if policy.tf32 and capability < (8, 0):
        return Support(False, f"{sm} has no TF32 (8.0 and later have)", "use precision=fp32 or precision=amp_dynamic")
    if policy.compute == "float16" and capability < (7, 0):
        return Support(False, f"{sm} has no FP16 tensor cores (7.0 and later have)", "use precision=fp32")
    if not policy.half:
        return Support(True, f"{sm} runs {'TF32' if policy.tf32 else 'FP32'} natively")
    return Support(True, f"{sm} has {policy.compute} tensor cores")


def _untried_support(policy: Policy, name: str, has: Capabilities) -> Support:
    """Return the support of an accelerator that was only read about, by what it says of itself."""
    if policy.tf32 and not has.tf32:
        return Support(False, f"{name} has no TF32 that torch switches", "use precision=fp32")
    if not policy.half:
        return Support(True, f"{name} has FP32; untried")
    if not (has.fp16 if policy.compute == "float16" else has.bf16):
        return Support(False, f"{name} has no {policy.compute} here", "use precision=fp32")
    return Support(True, f"{name} has {policy.compute}; untried")


def require_support(policy: Policy, device: torch.device) -> Support:
    """The support of a mode on a device; a mode is never replaced by another.

    Raises:
        EnvironmentRefused: The device cannot run the mode well and ``precision.force`` is not set.
    """
    support = supports(policy, device)
    if not support.ok and not support.forcible:
        raise EnvironmentRefused(f"device={device}: {support.reason}", support.advice)
    if not support.ok and not policy.force:
        raise EnvironmentRefused(
            f"precision={policy.name} on {device}: {support.reason}",
            f"{support.advice}, or precision.force=true to run it all the same",
        )
    return support
