"""Checks of an optimizer's keys: of mptrain's update rules, and of any class or function with torch's interface.

``groups`` and ``layer_decay`` are for every optimizer and no arguments of it. Neither are ``name`` and
``decay_norms_and_biases`` for one with torch's interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mptrain.config.allowed_targets import is_allowed
from mptrain.config.catalogue import SHARED
from mptrain.config.targets import Target, parameters
from mptrain.config.value_checks import UNRESOLVED, check_field, check_section, show
from mptrain.optimizer.parameter_groups import LayerDecay, ParameterGroup
from mptrain.optimizer.torch_rule import TorchRule, adapt, public_name, timm_optimizer, torch_optimizer
from mptrain.system.errors import ConfigError, Problem

#: Keys of every optimizer.
GROUP_KEYS = tuple(entry.key.partition(".")[2] for entry in SHARED["optimizer"])

#: Packages with optimizers of torch's interface only.
_PACKAGES = ("torch.optim", "timm.optim")

#: Functions that find a class by its name.
_FINDERS = (torch_optimizer, timm_optimizer)


def check_optimizer(target: Target, place: str) -> Target:
    """Check the keys of an optimizer, and return its target with converted arguments and the optimizer as ``instance``.

    The target has all its keys as arguments. ``place`` is its key, such as ``learners.generator.optimizer``.
    """
    problems: list[Problem] = []
    found = target.resolve()
    adapted = found in _FINDERS or "params" in parameters(found)[0]
    if not adapted and is_allowed(target.path, _PACKAGES):
        raise ConfigError(f"{target.path} is no optimizer: it takes no params", "name a class that does")
    apart = {key: value for key, value in target.arguments.items() if key in GROUP_KEYS}
    grouping = _grouping(place, apart, problems)
    alone = dataclasses.replace(target, arguments={k: v for k, v in target.arguments.items() if k not in apart})
    try:
        checked = _check_adapted(alone, place) if adapted else alone.check(place)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    if isinstance(checked.instance, TorchRule) and not checked.instance.decays:
        problems += [
            Problem(
                f"{place}.groups.{index}.weight_decay={group.weight_decay}: {checked.instance.name} has no weight decay"
            )
            for index, group in enumerate(grouping.get("groups", ()))
            if isinstance(group, ParameterGroup) and group.weight_decay
        ]
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(checked, options=grouping)


def _check_adapted(target: Target, place: str) -> Target:
    """Check an optimizer with torch's interface; its arguments are those that its class accepts."""
    problems: list[Problem] = []
    arguments = dict(target.arguments)
    kind, implied = target.resolve(), dict[str, Any]()
    every = arguments.pop("decay_norms_and_biases", None) or False
    check_field(f"{place}.decay_norms_and_biases", every, bool, problems)
    path, allow = target.path, target.allow
    if kind in _FINDERS:
        name = arguments.pop("name", "")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{place}.name={show(name)}: must be the name of an optimizer", f"set {place}.name=AdamW")
        kind, implied = kind(name)
        path, allow = public_name(kind), _PACKAGES
    elif "name" not in parameters(kind)[0]:
        arguments.pop("name", None)
    given = {key: value for key, value in arguments.items() if value is not None or key not in ("lr", "weight_decay")}
    try:
        given = dict(Target(path, given, allow).check(place).arguments)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    if problems:
        raise ConfigError(problems)
    if UNRESOLVED in given.values():  # and already reported
        return target
    rule = adapt(kind, {**implied, **given}, decay_norms_and_biases=every)
    return dataclasses.replace(target, arguments={**target.arguments, **given}, instance=rule)


def _grouping(place: str, keys: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Check ``groups`` and ``layer_decay``; return those that are set."""
    found: dict[str, Any] = {}
    groups, decay = keys.get("groups"), keys.get("layer_decay")
    if groups not in (None, [], ()):
        entries = list(groups) if isinstance(groups, Sequence) and not isinstance(groups, str) else [groups]
        made = [_group(f"{place}.groups.{index}", entry, problems) for index, entry in enumerate(entries)]
        found["groups"] = tuple(made)
    if decay is not None:
        found["layer_decay"] = check_field(f"{place}.layer_decay", decay, LayerDecay, problems)
    return found


def _group(place: str, entry: Any, problems: list[Problem]) -> Any:
    if isinstance(entry, ParameterGroup) or entry is UNRESOLVED:  # of a learner that shares it
        return entry
    return check_section(place, entry, ParameterGroup, problems)
