"""Checks of the keys of optimizers and schedules: mptrain's own, those of torch or timm, and others like them.

``groups`` and ``layer_decay`` are for every optimizer and no arguments of it. Neither are ``name`` and
``decay_norms_and_biases`` for one with torch's interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from mptrain.config.allowed_targets import is_allowed
from mptrain.config.catalogue import SHARED
from mptrain.config.schema import Config
from mptrain.config.targets import Target, parameters
from mptrain.config.value_checks import UNRESOLVED, check_field, check_section, show
from mptrain.optimizer.parameter_groups import LayerDecay, ParameterGroup
from mptrain.optimizer.torch_rule import TorchRule, adapt, public_name, timm_optimizer, torch_optimizer
from mptrain.schedule.shapes import Schedule, TabulatedSchedule
from mptrain.schedule.stepped import LENGTHS, SteppedSchedule, refuse_scheduler, timm_scheduler, torch_scheduler
from mptrain.system.errors import ConfigError, Problem
from mptrain.workloads.base.task import Objective

#: Keys of every optimizer.
GROUP_KEYS = tuple(entry.key.partition(".")[2] for entry in SHARED["optimizer"])

#: Packages with optimizers of torch's interface only.
_PACKAGES = ("torch.optim", "timm.optim")

#: Functions that find a class by its name.
_OPTIMIZER_FINDERS = (torch_optimizer, timm_optimizer)


def check_optimizer(target: Target, target_key: str) -> Target:
    """Check the keys of an optimizer, and return its target with converted arguments and the optimizer as ``instance``.

    The target has all its keys as arguments. ``target_key`` is its key, such as ``learners.generator.optimizer``.
    """
    problems: list[Problem] = []
    kind = target.resolve()
    adapted = kind in _OPTIMIZER_FINDERS or "params" in parameters(kind)[0]
    if not adapted and is_allowed(target.path, _PACKAGES):
        raise ConfigError(f"{target.path} is no optimizer: it takes no params", "name a class that does")
    apart = {key: value for key, value in target.arguments.items() if key in GROUP_KEYS}
    grouping = _grouping(target_key, apart, problems)
    alone = dataclasses.replace(target, arguments={k: v for k, v in target.arguments.items() if k not in apart})
    try:
        checked = _check_adapted(alone, target_key) if adapted else alone.check(target_key)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    if isinstance(checked.instance, TorchRule) and not checked.instance.decays:
        problems += [
            Problem(
                f"{target_key}.groups.{index}.weight_decay={group.weight_decay}: "
                f"{checked.instance.name} has no weight decay"
            )
            for index, group in enumerate(grouping.get("groups", ()))
            if isinstance(group, ParameterGroup) and group.weight_decay
        ]
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(checked, options=grouping)


def _check_adapted(target: Target, target_key: str) -> Target:
    """Check an optimizer with torch's interface; its arguments are those that its class accepts."""
    problems: list[Problem] = []
    arguments = dict(target.arguments)
    kind, implied = target.resolve(), dict[str, Any]()
    every = arguments.pop("decay_norms_and_biases", None) or False
    check_field(f"{target_key}.decay_norms_and_biases", every, bool, problems)
    path, allow = target.path, target.allow
    if kind in _OPTIMIZER_FINDERS:
        name = arguments.pop("name", "")
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{target_key}.name={show(name)}: must be the name of an optimizer", f"set {target_key}.name=AdamW"
            )
        kind, implied = kind(name)
        path, allow = public_name(kind), _PACKAGES
    elif "name" not in parameters(kind)[0]:
        arguments.pop("name", None)
    given = {key: value for key, value in arguments.items() if value is not None or key not in ("lr", "weight_decay")}
    try:
        given = dict(Target(path, given, allow).check(target_key).arguments)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    if problems:
        raise ConfigError(problems)
    if UNRESOLVED in given.values():  # and already reported
        return target
    rule = adapt(kind, {**implied, **given}, decay_norms_and_biases=every)
    return dataclasses.replace(target, arguments={**target.arguments, **given}, instance=rule)


def _grouping(target_key: str, keys: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Check ``groups`` and ``layer_decay``; return those that are set."""
    grouping: dict[str, Any] = {}
    groups, decay = keys.get("groups"), keys.get("layer_decay")
    if groups not in (None, [], ()):
        entries = list(groups) if isinstance(groups, Sequence) and not isinstance(groups, str) else [groups]
        made = [_group(f"{target_key}.groups.{index}", entry, problems) for index, entry in enumerate(entries)]
        grouping["groups"] = tuple(made)
    if decay is not None:
        grouping["layer_decay"] = check_field(f"{target_key}.layer_decay", decay, LayerDecay, problems)
    return grouping


def _group(key: str, entry: Any, problems: list[Problem]) -> Any:
    if isinstance(entry, ParameterGroup) or entry is UNRESOLVED:  # of a learner that shares it
        return entry
    return check_section(key, entry, ParameterGroup, problems)


#: Functions that find a class by its name, and the package that it is in.
_SCHEDULE_FINDERS = {torch_scheduler: "torch.optim.lr_scheduler", timm_scheduler: "timm.scheduler"}


def check_schedule(target: Target, target_key: str) -> Target:
    """Check the keys of a schedule, and return its target with converted arguments.

    The target has all its keys as arguments. If it has a parameter ``optimizer``, it makes a scheduler
    with the interface of torch or timm; otherwise it makes a schedule of mptrain. ``target_key`` is its key,
    such as ``learners.generator.schedule``.
    """
    kind, arguments = target.resolve(), dict(target.arguments)
    stepped = target
    if package := _SCHEDULE_FINDERS.get(kind):
        name = arguments.pop("name", "")
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{target_key}.name={show(name)}: must be the name of a scheduler", f"set {target_key}.name=StepLR"
            )
        kind = kind(name)
        stepped = dataclasses.replace(target, path=f"{package}.{name}", allow=(package,))
    accepted, _ = parameters(kind)
    if "optimizer" not in accepted:
        return target.check(target_key)
    refuse_scheduler(kind)
    problems: list[Problem] = []
    interval = arguments["interval"] if "interval" in accepted else arguments.pop("interval", "update")
    interval = check_field(f"{target_key}.interval", interval, Literal["update", "epoch"], problems)
    if arguments.get("cycle_momentum"):
        what = f"{target_key}.cycle_momentum={show(arguments['cycle_momentum'])}: mptrain keeps the momentum constant"
        problems.append(Problem(what, "leave it out: the learning rate is cycled without it"))
    try:
        stepped = dataclasses.replace(stepped, arguments=arguments).check(target_key)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    if problems:
        raise ConfigError(problems)
    checked = dataclasses.replace(target, arguments={**target.arguments, **stepped.arguments})
    if UNRESOLVED in stepped.arguments.values():  # and already reported
        return checked
    return dataclasses.replace(checked, instance=_stepped(stepped, set(accepted), interval))


def build_schedule(target: Target) -> Schedule | TabulatedSchedule:
    """Build the learning rate schedule of a learner from a target that `check_schedule` has checked.

    Raise ConfigError if the target cannot be built, or returns something else.
    """
    schedule: Schedule | TabulatedSchedule = target.build()
    if not isinstance(schedule, Schedule | TabulatedSchedule):
        raise ConfigError(
            f"{target.path} is not a schedule: it has no factor(), no rates() and no parameter optimizer",
            "choose one that mptrain list schedule shows",
        )
    return schedule


def _stepped(target: Target, accepted: set[str], interval: Any) -> SteppedSchedule:
    given = target.arguments
    lengths = [name for name in LENGTHS if name in accepted and name not in given]
    if "epochs" in given:  # OneCycleLR computes the length from epochs and steps_per_epoch
        lengths = [name for name in lengths if name != "total_steps"]
    # timm's schedulers without warmup_prefix, and those where it is true, begin after the warm-up.
    shift = given.get("warmup_t", 0) if given.get("warmup_prefix", "warmup_prefix" not in accepted) else 0

    def make(*, length: int, **facts: Any) -> Any:
        facts |= {name: max(1, length - shift * (name == "t_initial")) for name in lengths}
        return target.build(**facts, cycle_momentum=False)

    notes = [f"schedule: {' and '.join(lengths)} is the number of {interval}s of the run"] if lengths else []
    if "cycle_momentum" in accepted - given.keys():
        notes.append("schedule: the momentum stays constant, cycle_momentum=false")
    return SteppedSchedule(target.path, make, interval, tuple(notes))


def schedule_notes(config: Config, objectives: Iterable[Objective], planned: int) -> tuple[str, ...]:
    """Return notes for the user about schedules, each once: arguments that mptrain sets, and a warm-up without end."""
    schedules = [build_schedule(config.for_learner(objective.learner).schedule) for objective in objectives]
    notes = [note for schedule in schedules for note in getattr(schedule, "notes", ())]
    for warmup in {getattr(schedule, "warmup", 0) for schedule in schedules}:
        if isinstance(warmup, int) and warmup > planned:
            notes.append(f"schedule.warmup={warmup} is longer than the {planned} planned updates: the rate only rises")
    return tuple(dict.fromkeys(notes))
