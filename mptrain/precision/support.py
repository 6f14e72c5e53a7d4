"""What a device can do, and which precision suits it.

Facts: NVIDIA tensor cores take FP16 from compute capability 7.0 (Volta), BF16 and TF32 from 8.0 (Ampere). torch's own
`is_bf16_supported` counts emulation and says yes on a T4, so it is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.errors import EnvironmentRefused
from mptrain.precision.widened import has_native_half, widens

if TYPE_CHECKING:
    from mptrain.precision.policy import Policy


@dataclass(frozen=True)
class Support:
    """Whether a device can run a mode.

    Attributes:
        ok: It can be run without ``precision.force``.
        reason: What the device has or lacks.
        advice: What to choose instead, or what to expect; empty when there is nothing to say.
    """

    ok: bool
    reason: str
    advice: str = ""


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` stands for.

    Raises:
        EnvironmentRefused: CUDA was asked for and is not there, or has fewer devices.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise EnvironmentRefused(
                f"device={name}: torch sees no CUDA device", "use device=cpu or run: mptrain doctor"
            )
        if (device.index or 0) >= count:
            raise EnvironmentRefused(
                f"device={name}: there are {count} CUDA devices", f"use cuda:0 to cuda:{count - 1}"
            )
        return torch.device("cuda", device.index or 0)
    return device


def supports(policy: Policy, device: torch.device) -> Support:
    """Whether a device can run a policy, why, and what to choose instead."""
    if device.type == "cuda":
        return cuda_support(policy, torch.cuda.get_device_capability(device))
    if policy.tf32:
        return Support(False, "a CPU has no TF32", "use precision=fp32")
    if not policy.half:
        return Support(True, "FP32 is native")
    if widens(policy, device):
        return Support(
            True,
            f"this CPU has no {policy.compute} arithmetic; products compute in FP32 and round once to {policy.compute}",
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


def cuda_support(policy: Policy, capability: tuple[int, int]) -> Support:
    """As `supports`, for a CUDA device of a given compute capability."""
    sm = f"compute capability {capability[0]}.{capability[1]}"
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


def require_support(policy: Policy, device: torch.device) -> Support:
    """The support of a mode on a device; a mode is never replaced by another.

    Raises:
        EnvironmentRefused: The device cannot run the mode well and ``precision.force`` is not set.
    """
    support = supports(policy, device)
    if not support.ok and not policy.force:
        raise EnvironmentRefused(
            f"precision={policy.name} on {device}: {support.reason}",
            f"{support.advice}, or precision.force=true to run it all the same",
        )
    return support
