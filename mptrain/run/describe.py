"""Description of a run, its parts and its environment (command, versions, device), for the user and ``run.json``."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mptrain import __version__
from mptrain.config.schema import Config
from mptrain.config.value_checks import show
from mptrain.engine.parts import Parts
from mptrain.engine.step import Learner
from mptrain.optimizer.parameter_groups import describe_options
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.runlog import RunDirectory, RunState
from mptrain.system.device import compute_capability, name_of

#: File in which NVIDIA's driver for Linux says its version.
_DRIVER = Path("/proc/driver/nvidia/version")


def describe(directory: RunDirectory, config: Config, parts: Parts, before: RunState | None) -> RunState:
    """Return the content of ``run.json`` for a run that is about to start or resume: command, versions, device etc.

    The attempts of the previous state ``before`` are kept; None for a new run.
    """
    flags = config.flags or (before.flags if before else ())
    state = RunState(
        id=os.path.relpath(directory.root, config.run.root),
        argv=tuple(sys.argv[1:]),
        command=shlex.join(["mptrain", *flags, *config.overrides]),
        flags=flags,
        git_sha=_git_sha(),
        versions=versions_now(),
        device=_device_in_words(parts.device),
        backends=cuda_backends(parts.device),
        parts=describe_parts(config, parts),
        ranks=parts.comm.world_size,
    )
    return replace(state, attempts=before.attempts) if before else state


def describe_parts(config: Config, parts: Parts) -> dict[str, str]:
    """Return one line for each part of a run: model, dataset, precision, scaler, optimizer, schedule and groups.

    ``groups`` are the learning rates and weight decays of parameter groups; empty if none are configured.
    """
    trained = sum(own.numel() for learner in parts.learners for own in learner.weights.params)
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    title = f"{config.model_title}, {total:,} parameters"
    splits = ", ".join(f"{len(loader.split):,} {name}" for name, loader in parts.loaders.items())
    many = len(parts.learners) > 1

    def each(describe: Callable[[Learner], str]) -> str:
        words = {learner.name: describe(learner) for learner in parts.learners}
        if len({*words.values()}) == 1:
            return next(iter(words.values()))
        return "; ".join(f"{name}: {text}" for name, text in words.items() if text)

    def optimizer(learner: Learner) -> str:
        rule, words = learner.weights.rule, learner.weights.updater.describe()
        if isinstance(rule, TorchRule):
            decay = {"weight_decay": rule.weight_decay} if rule.decays else {}
            return _call(rule.name, {"lr": rule.lr, **decay, **rule.arguments}) + words.removeprefix(rule.name)
        chosen = config.for_learner(learner.name).optimizer
        return _call(chosen.path.rpartition(".")[2], chosen.arguments)

    def schedule(learner: Learner) -> str:
        chosen = config.for_learner(learner.name).schedule
        return _call(chosen.path.rpartition(".")[2], chosen.arguments)

    def groups(learner: Learner) -> str:
        configured = config.for_learner(learner.name).optimizer.options
        return describe_options(learner.weights.options) if configured else ""

    scaler = each(lambda learner: learner.scaler.describe())
    return {
        "model": title + (f", {trained:,} trainable" if trained != total else ""),
        "dataset": f"{parts.dataset.name}, {splits}, {parts.dataset.describe()}",
        "precision": f"{config.precision.name}: {config.precision.describe()}",
        "scaler": f"{len(parts.learners)} scales, each {scaler}" if many and ": " not in scaler else scaler,
        "optimizer": each(optimizer),
        "schedule": each(schedule),
        "groups": each(groups),
    }


def group_members(config: Config, parts: Parts) -> dict[str, list[str]]:
    """Return the names of trained parameters by learning rate and weight decay; empty without parameter groups."""
    found: dict[str, list[str]] = {}
    for learner in parts.learners:
        if config.for_learner(learner.name).optimizer.options:
            prefix = f"{learner.name}: " if len(parts.learners) > 1 else ""
            for name, (factor, decay) in zip(learner.weights.names, learner.weights.options, strict=True):
                found.setdefault(f"{prefix}learning rate x{factor:.3g}, weight decay {decay:.3g}", []).append(name)
    return found


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a class or function and its arguments as a call, such as ``Cosine(final=0, warmup=10)``."""
    return f"{name}({', '.join(f'{key}={show(value)}' for key, value in arguments.items() if value is not None)})"


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


def _device_in_words(device: torch.device) -> str:
    if device.type != "cpu":
        return f"{device} ({name_of(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads != 1)}, {torch.backends.cpu.get_cpu_capability()})"


def _git_sha() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
