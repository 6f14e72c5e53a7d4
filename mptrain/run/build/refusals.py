"""Refusals of parts that are valid alone but do not work together, found before the first step."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.config.value_checks import first_line
from mptrain.engine.evaluate import gather_model
from mptrain.engine.parts import Parts
from mptrain.system.errors import ConfigError, Problem
from mptrain.system.torch_private import BatchNorm, storage_key


def refuse_hooks_in_compiled(config: Config, parts: Parts) -> None:
    """Refuse diagnostics and fault injection that hook into modules if ``train.compile`` is on."""
    asked = {"diagnostics": parts.probe.sees_modules, "inject.tensor": parts.fault.in_modules}
    problems = [
        Problem(
            f"{key} needs hooks on single modules, which train.compile=true compiles into one graph",
            "set train.compile=false",
        )
        for key, needed in asked.items()
        if needed and config.train.compile
    ]
    if problems:
        raise ConfigError(problems)


def refuse_single_samples(config: Config, parts: Parts, *, trains: bool) -> None:
    """Refuse batch sizes that leave a micro-batch of one sample if a BatchNorm then has one value per channel.

    Without this check, torch raises only at the end of the first epoch.
    """
    size, world_size = config.train.batch_size, parts.comm.world_size
    accumulate = parts.plan.accumulate * world_size
    single = [
        (name, loader.split)
        for name, loader in parts.loaders.items()
        if trains or name != "train"
        for rest in {min(size, len(loader.split)), len(loader.split) % size} - {0}
        if rest // min(rest, accumulate if name == "train" else world_size) == 1
    ]
    if not single or not any(isinstance(module, BatchNorm) for module in parts.model.modules()):
        return
    model = gather_model(parts)
    if _no_copy(model):  # torch raises at that batch, then
        return
    for name, split in single:
        trial = cast("Any", copy.deepcopy(model)).train(name == "train")
        sample = parts.prepare(split.fetch([0], 0, config.seed))
        try:
            with torch.no_grad(), parts.plan.products.context, parts.plan.autocast:
                for learner in parts.learners if name == "train" else ():
                    learner.objective.loss(trial, sample)
                if name != "train":
                    parts.task.measure(trial, sample)
        except ValueError as error:
            with_accumulation = f" in {accumulate} micro-batches" if name == "train" and accumulate > 1 else ""
            what = "micro-batch" if name == "train" else "batch"
            raise ConfigError(
                f"train.batch_size={size}{with_accumulation} leaves a {what} of one sample out of {len(split)} in "
                f"{name}, and BatchNorm cannot normalise one value per channel ({error})",
                "choose a batch size that divides differently, or accumulate less",
            ) from error


def sharing_memory(model: nn.Module) -> list[tuple[str, nn.Parameter, str, nn.Parameter]]:
    """Return the pairs of parameters, with their names, that are different objects and have elements in common."""
    pairs = []
    held: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, one in model.named_parameters():
        others = held.setdefault(storage_key(one.untyped_storage()), [])
        pairs += [(first, other, name, one) for first, other in others if _overlap(one, other)]
        others.append((name, one))
    return pairs


def require_still_shared(pairs: list[tuple[str, nn.Parameter, str, nn.Parameter]], *, sharded: bool) -> None:
    """Refuse pairs of `sharing_memory` that a cast, a device or shards have given memory of their own."""
    for first, other, name, one in pairs:
        keys = {storage_key(parameter.untyped_storage()) for parameter in (other, one)}
        if sharded or len(keys) > 1:
            raise ConfigError(
                f"the parameters {first} and {name} share memory without being the same parameter, and training here "
                "gives each its own",
                "assign the same nn.Parameter to both, or train in one process on a CPU with FP32 parameters",
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors in the same memory have elements in common."""
    places = torch.zeros(one.untyped_storage().nbytes() // one.itemsize, dtype=torch.bool)
    for each in (one, other):
        own = places.as_strided(
            [1 if s == 0 else n for s, n in zip(each.stride(), each.shape, strict=True)],
            each.stride(),
            each.storage_offset(),
        )
        if own.any():
            return True
        own.fill_(True)
    return False


def require_copies(config: Config, model: nn.Module, *, sharded: bool) -> None:
    """Refuse a model that is to be sharded and cannot be copied; must run before.

    Such models hold tensors computed from parameters, as the older weight and spectral norms do.
    """
    if sharded and (why := _no_copy(model)):
        raise ConfigError(
            f"distributed=fsdp2 evaluates a copy of the model, and {config.model.path} cannot be copied: {why}",
            "use torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm, or choose "
            "distributed=ddp",
        )


def _no_copy(model: nn.Module) -> str:
    """Return why a model cannot be copied; empty if it can."""
    try:
        copy.deepcopy(model)
    except Exception as error:  # a model of a user may hold anything
        return f"{type(error).__name__}: {first_line(error)}"
    return ""
