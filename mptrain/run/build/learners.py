"""Learners of a run: losses with their weights, optimizers, scalers and learning rates."""

from __future__ import annotations

import torch
from torch import nn

from mptrain.config.schedules import build_schedule
from mptrain.config.schema import Config
from mptrain.config.targets import Target
from mptrain.engine.step import Learner
from mptrain.optimizer.parameter_groups import ParameterGroup, layer_factors, parameter_options, require_matches
from mptrain.optimizer.rules import ParameterOptions, Rule
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.optimizer.weights import WeightAverage, Weights
from mptrain.parallel.strategy import ParallelStrategy
from mptrain.run.build.workload import require_known_learners
from mptrain.scaler import Scaler
from mptrain.schedule.plateau import Plateau, RateReduction
from mptrain.schedule.rate_table import rate_table
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.task import Objective


def build_learners(
    config: Config,
    objectives: tuple[Objective, ...],
    model: nn.Module,
    initial: dict[str, torch.Tensor],
    steps_per_epoch: int,
    strategy: ParallelStrategy | None = None,
) -> tuple[Learner, ...]:
    """Build a learner for each objective of the task, with its own optimizer, scaler and schedule.

    ``initial`` has FP32 values of half-precision parameters by name, and ``strategy`` None is that of one rank.

    Raises:
        ConfigError: A learner trains nothing, or what another one trains; or a part is of the wrong kind.
    """
    names = [objective.learner for objective in objectives]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"the task has two objectives of the learner {twice[0]}", "give each a name of its own")
    require_known_learners(config, objectives)
    parts = {objective.learner: _parameters(model, objective, config) for objective in objectives}
    refuse_shared(model, objectives)
    learners = []
    for objective in objectives:
        choices, trained = config.for_learner(objective.learner), parts[objective.learner]
        rule: Rule | TorchRule = choices.optimizer.build()
        if not isinstance(rule, TorchRule) and not hasattr(rule, "apply"):
            raise ConfigError(
                f"{choices.optimizer.path} is no optimizer: it takes no params, as a torch.optim.Optimizer does, and "
                "has no apply(), as an update rule of mptrain has",
                "choose one that mptrain list optimizer shows",
            )
        weights = Weights(
            trained,
            rule,
            master_weights=config.precision.master_weights,
            state_in_half=config.precision.optimizer_state == "parameters",
            clip_norm=choices.clip_norm,
            initial=initial,
            options=_options_of(choices.optimizer, rule, model, trained),
        )
        device, decay = next(iter(trained.values())).device, config.train.ema_decay
        schedule, planned = build_schedule(choices.schedule), config.train.planned(steps_per_epoch)
        rates = rate_table(schedule, rule.lr, planned, device, steps_per_epoch)
        reduction = RateReduction(schedule, rule.lr, rates) if isinstance(schedule, Plateau) else None
        average = WeightAverage(weights, decay) if decay is not None else None
        others = [p for name, p in model.named_parameters() if p.requires_grad and name not in trained]
        scaler = build_scaler(choices.scaler)
        learners.append(
            Learner(
                objective,
                weights,
                scaler,
                rates,
                device,
                average=average,
                others=others,
                strategy=strategy,
                reduction=reduction,
            )
        )
    return tuple(learners)


def build_scaler(target: Target) -> Scaler:
    """Build a loss scaling rule, or raise ConfigError if the target makes something else."""
    scaler = target.build()
    if not isinstance(scaler, Scaler):
        raise ConfigError(
            f"{target.path} is no loss scaling rule: it makes no mptrain.scaler.Scaler",
            "derive the class from mptrain.scaler.Scaler, or choose one that mptrain list scaler shows",
        )
    return scaler


def _options_of(
    optimizer: Target, rule: Rule | TorchRule, model: nn.Module, named: dict[str, nn.Parameter]
) -> dict[str, ParameterOptions]:
    """Return learning rate factor and weight decay of each parameter, by the groups and layer decay of an optimizer."""
    groups: tuple[ParameterGroup, ...] = optimizer.options.get("groups", ())
    for group in groups:
        require_matches("optimizer.groups", group.patterns, [name for name, _ in model.named_parameters()])
    decay = optimizer.options.get("layer_decay")
    factors = None if decay is None else layer_factors(model, list(named), decay)
    return parameter_options(named, rule, groups, factors)


def refuse_shared(model: nn.Module, objectives: tuple[Objective, ...]) -> None:
    """Refuse a parameter that two learners train: each would overwrite the other's updates from its master weights."""
    owners: dict[int, tuple[str, str]] = {}
    for objective in objectives:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad or not _is_in(name, objective.modules):
                continue
            first, learner = owners.setdefault(id(parameter), (name, objective.learner))
            if learner != objective.learner:
                also = name if name == first else f"{first}, which is also {name}"
                raise ConfigError(
                    f"the learners {learner} and {objective.learner} both train {also}",
                    "assign each parameter to one learner: the task's objectives list the modules of each learner",
                )


def _parameters(model: nn.Module, objective: Objective, config: Config) -> dict[str, nn.Parameter]:
    found = {name: parameter for name, parameter in model.named_parameters() if _is_in(name, objective.modules)}
    if not found:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ConfigError(
            f"the learner {objective.learner} trains {', '.join(objective.modules)}, but {config.model.path} has only "
            f"the modules {children}",
            "choose a model that works with this task, or choose only a model, and its file sets a task for it",
        )
    return found


def _is_in(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter belongs to one of the modules; ``layer1`` does not match ``layer10``."""
    return any(not module or parameter == module or parameter.startswith(f"{module}.") for module in modules)
