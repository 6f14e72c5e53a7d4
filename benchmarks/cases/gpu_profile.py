"""What a step of ResNet-50 spends its time on: kinds of kernels, the longest ones, and the time in which none runs."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import gpu_works
from benchmarks.cases.case import Case, Setting
from benchmarks.loops.ours import Ours
from benchmarks.results import Measurement, measured

#: Kinds of kernels by what their names contain; the first that fits. On a CPU the names are those of operators.
KINDS = {
    "the record, verdict and update": ("partial_squares", "norms", "update", "fused_sgd", "foreach", "amp_"),
    "copies": ("memcpy", "memset", "copy_"),
    "normalisation": ("batch_norm", "batchnorm", "bn_"),
    "convolutions and products": ("conv", "cudnn", "cutlass", "gemm", "xmma", "mm", "wgrad", "dgrad", "fprop", "nvjet"),
    "pooling": ("pool",),
    "element by element": ("elementwise", "relu", "threshold", "add", "mul", "fill", "zero_"),
}
STEPS = 5
LONGEST = 8


def step_profile(setting: Setting) -> list[Measurement]:
    """Shares of a step in fp16_dynamic; they belong to G3."""
    cuda = setting.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with contextlib.closing(Ours(gpu_works.resnet50(setting), "half")) as loop:
        loop.block(10)
        started = time.perf_counter()
        loop.block(STEPS)
        wall = time.perf_counter() - started
        with profile(activities=activities) as seen:
            loop.block(STEPS)
    spent = {event.key: _seconds(event, cuda=cuda) for event in seen.key_averages()}
    spent = {name: seconds for name, seconds in spent.items() if seconds > 0}
    busy, kinds = sum(spent.values()), dict.fromkeys([*KINDS, "others"], 0.0)
    for name, seconds in spent.items():
        kinds[kind_of(name)] += seconds
    longest = sorted(spent, key=lambda name: -spent[name])[:LONGEST]
    shares = {
        **{f"share of the device's time: {kind}": seconds / busy for kind, seconds in kinds.items()},
        **{f"share of the device's time, longest: {name[:80]}": spent[name] / busy for name in longest},
    }
    if cuda:  # the profiler slows the host down: so against a step that it did not watch
        shares["share of the step in which the device is idle"] = max(0.0, 1 - busy / wall)
    return [measured("G3", what, share, judged=False) for what, share in shares.items()]


def kind_of(kernel: str) -> str:
    """The kind of a kernel, or operator, by its name."""
    lower = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "others")


def _seconds(event: Any, *, cuda: bool) -> float:
    """The time of the kernels themselves; on a CPU, of the operators without those that they call."""
    if not cuda:
        return float(event.self_cpu_time_total) * 1e-6
    on_device = event.device_type.name == "CUDA"  # else an operator that launched some
    return float(event.self_device_time_total) * 1e-6 if on_device else 0.0


CASES = (Case("profile of a step", ("G3",), step_profile, 0.4),)
