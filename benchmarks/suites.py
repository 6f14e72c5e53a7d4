"""Which cases belong to which suite, the most valuable first."""

from __future__ import annotations

from benchmarks.cases import checkpoint, commands, cpu_steps, gpu, gpu_profile, resnet_cpu, startup, update, watched
from benchmarks.cases.case import Case


def cases_of(suite: str) -> tuple[Case, ...]:
    """The cases of ``smoke``, ``cpu`` or ``gpu``."""
    cpu = (
        *cpu_steps.CASES,
        *update.CASES,
        *watched.CASES,
        *checkpoint.CASES,
        *startup.CASES,
        *commands.CASES,
        *resnet_cpu.CASES,
    )
    return {
        "smoke": cpu_steps.CASES,
        "cpu": cpu,
        "gpu": (*gpu.CASES, *watched.GPU_CASES, *gpu_profile.CASES, *gpu.COMPILING),
    }[suite]
