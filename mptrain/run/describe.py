"""Description of a run, its parts and its environment (command, versions, device), for the user and ``run.json``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mptrain.config.schema import Config
from mptrain.config.value_checks import show
from mptrain.engine.parts import Parts
from mptrain.engine.step import Learner
from mptrain.optimizer.parameter_groups import describe_options
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.runlog import RunDirectory, RunState
from mptrain.system.process_state import cuda_backends, device_in_words, git_commit, versions_now


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
        git_sha=git_commit(),
        versions=versions_now(),
        device=device_in_words(parts.device),
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
    members: dict[str, list[str]] = {}
    for learner in parts.learners:
        if config.for_learner(learner.name).optimizer.options:
            prefix = f"{learner.name}: " if len(parts.learners) > 1 else ""
            for name, (factor, decay) in zip(learner.weights.names, learner.weights.options, strict=True):
                members.setdefault(f"{prefix}learning rate x{factor:.3g}, weight decay {decay:.3g}", []).append(name)
    return members


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a class or function and its arguments as a call, such as ``Cosine(final=0, warmup=10)``."""
    return f"{name}({', '.join(f'{key}={show(value)}' for key, value in arguments.items() if value is not None)})"
