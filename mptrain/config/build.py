"""Makes the parts of a run out of a checked configuration."""

from __future__ import annotations

import copy
import functools
import random
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mptrain.config.assemble import first_line
from mptrain.config.ranges import show
from mptrain.dataset.loader import Loader
from mptrain.engine.guard import BufferGuard
from mptrain.engine.job import Options, Parts
from mptrain.engine.learner import Learner, Plan
from mptrain.errors import ConfigError, Problem
from mptrain.optimizer.weights import Weights
from mptrain.precision.apply import autocast, cast_model, input_dtype, set_products
from mptrain.precision.support import require_support, resolve_device
from mptrain.precision.widened import products
from mptrain.schedule.table import rate_table

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.dataset.source import Dataset
    from mptrain.optimizer.rules import Rule
    from mptrain.task.base import Objective, Task


def build(config: Config) -> tuple[Parts, Options]:
    """Build everything that trains, in the order that makes a seed mean the same in every precision mode.

    Initial weights are drawn in FP32 on the CPU from the seed alone, then moved and cast; the generators are seeded
    again afterwards, so that dropout draws the same whatever the model's construction drew.

    Raises:
        EnvironmentRefused: The device cannot do what the precision asks for.
        DataError: The data is missing or unusable.
        ConfigError: Parts do not fit each other.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    policy, device = config.precision, resolve_device(config.device)
    require_support(policy, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # page-locked memory, streams and compiled kernels belong to the current one
    set_products(policy)
    dataset: Dataset = config.dataset.build(seed=config.seed)
    model, initial = build_model(config, dataset)
    model.to(device)
    kept = cast_model(model, policy)
    memory_format = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)
    loaders = build_loaders(config, dataset, device)
    _refuse_single_samples(config, model, dataset, loaders["train"])
    plan = Plan(
        accumulate=config.train.accumulate,
        products=products(policy, device),
        autocast=functools.partial(autocast, policy, device),
        guard=BufferGuard(model),
    )
    task: Task = config.task.build(num_classes=len(dataset.class_names))
    learners = tuple(
        _build_learner(config, objective, model, initial, loaders["train"].steps_per_epoch)
        for objective in task.objectives()
    )
    seed_everything(config.seed)
    parts = Parts(model, kept, task, dataset, policy, device, learners, plan, memory_format, loaders)
    return parts, Options(config.train, config.checkpoint, config.log)


def build_model(config: Config, dataset: Dataset) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The network in FP32 on the CPU, and the values its parameters start from, by name."""
    seed_everything(config.seed)
    try:
        model = config.model.build(
            num_classes=len(dataset.class_names), in_channels=dataset.channels, image_size=dataset.image_size
        )
    except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
        given = ", ".join(f"model.{name}={show(value)}" for name, value in config.model.arguments.items())
        raise ConfigError(
            f"{config.model.path} cannot be built with {given or 'its defaults'}: {first_line(error)}",
            "--traceback shows where it failed",
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{config.model.path} made a {type(model).__name__}, not a torch.nn.Module")
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ConfigError(
            f"{config.model.path} made a model whose parameter {lazy[0]} has no shape yet",
            "give lazy modules their input size: a seed could not draw the same weights in every mode",
        )
    model.float()
    initial = {}
    if config.precision.parameters != "float32":
        initial = {name: value.detach().clone() for name, value in model.named_parameters()}
    return model, initial


def build_loaders(config: Config, dataset: Dataset, device: torch.device) -> dict[str, Loader]:
    """``train``, and ``val`` and ``test`` where the data set has them."""
    make = functools.partial(
        Loader,
        batch_size=config.train.batch_size,
        seed=config.seed,
        workers=dataset.workers,
        pin=device.type == "cuda",
    )
    loaders = {"train": make(dataset.train, shuffle=True)}
    loaders |= {
        name: make(split, shuffle=False) for name, split in (("val", dataset.val), ("test", dataset.test)) if split
    }
    return loaders


def seed_everything(seed: int) -> None:
    """Seed the generators of Python and torch, on every device."""
    random.seed(seed)
    torch.manual_seed(seed)


def _build_learner(
    config: Config,
    objective: Objective,
    model: nn.Module,
    initial: dict[str, torch.Tensor],
    steps_per_epoch: int,
) -> Learner:
    rule: Rule = config.optimizer.build()
    if not hasattr(rule, "apply"):
        raise ConfigError(
            f"{config.optimizer.path} is not an update rule of mptrain: it has no apply()",
            "choose one of mptrain list optimizer",
        )
    policy = config.precision
    weights = Weights(
        {name: p for name, p in model.named_parameters() if _is_in(name, objective.modules)},
        rule,
        master_weights=policy.master_weights,
        state_in_half=policy.optimizer_state == "parameters",
        clip_norm=config.train.clip_norm,
        initial=initial,
    )
    device = next(model.parameters()).device
    planned = config.train.epochs * steps_per_epoch
    planned = min(planned, config.train.max_steps or planned)
    rates = rate_table(config.schedule.build(), rule.lr, planned, device)
    return Learner(objective, weights, config.scaler.build(), rates, device)


def _is_in(parameter: str, modules: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to one of some modules; ``layer1`` does not mean ``layer10``."""
    return any(not module or parameter == module or parameter.startswith(f"{module}.") for module in modules)


def _refuse_single_samples(config: Config, model: nn.Module, dataset: Dataset, loader: Loader) -> None:
    """Refuse sizes that leave a micro-batch of one sample to a BatchNorm that then has one value per channel.

    torch would notice at the end of the first epoch.
    """
    size, rest = config.train.batch_size, len(loader.split) % config.train.batch_size
    sizes = {min(size, len(loader.split)), rest} - {0}
    if all(n // min(n, config.train.accumulate) > 1 for n in sizes):
        return
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return
    trial = cast("Any", copy.deepcopy(model)).train()
    device = next(model.parameters()).device
    sample = torch.zeros(1, dataset.channels, dataset.image_size, dataset.image_size, device=device)
    try:
        with torch.no_grad(), autocast(config.precision, device):
            trial(sample.to(input_dtype(config.precision)))
    except ValueError as error:
        raise ConfigError(
            Problem(
                f"train.batch_size={size} with train.accumulate={config.train.accumulate} leaves a micro-batch of one of "
                f"{len(loader.split)} samples, and BatchNorm cannot normalise one value per channel ({error})",
                "choose a batch size that divides differently, or accumulate less",
            )
        ) from error
