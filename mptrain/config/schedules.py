"""Checks of a schedule's keys and its construction; it may be a scheduler of torch or timm, or one like them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from mptrain.config.schema import Config
from mptrain.config.targets import Target, parameters
from mptrain.config.value_checks import UNRESOLVED, check_field, show
from mptrain.schedule.shapes import Schedule, TabulatedSchedule
from mptrain.schedule.stepped import LENGTHS, SteppedSchedule, refuse_scheduler, timm_scheduler, torch_scheduler
from mptrain.system.errors import ConfigError, Problem
from mptrain.workloads.base.task import Objective

#: Functions that find a class by its name, and the package that it is in.
_FINDERS = {torch_scheduler: "torch.optim.lr_scheduler", timm_scheduler: "timm.scheduler"}


def check_schedule(target: Target, place: str) -> Target:
    """Check the keys of a schedule, and return its target with converted arguments.

    The target has all its keys as arguments. If it has a parameter ``optimizer``, it makes a scheduler
    with the interface of torch or timm; otherwise it makes a schedule of mptrain. ``place`` is its key,
    such as ``learners.generator.schedule``.
    """
    found, arguments = target.resolve(), dict(target.arguments)
    stepped = target
    if package := _FINDERS.get(found):
        name = arguments.pop("name", "")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{place}.name={show(name)}: must be the name of a scheduler", f"set {place}.name=StepLR")
        found = found(name)
        stepped = dataclasses.replace(target, path=f"{package}.{name}", allow=(package,))
    accepted, _ = parameters(found)
    if "optimizer" not in accepted:
        return target.check(place)
    refuse_scheduler(found)
    problems: list[Problem] = []
    interval = arguments["interval"] if "interval" in accepted else arguments.pop("interval", "update")
    interval = check_field(f"{place}.interval", interval, Literal["update", "epoch"], problems)
    if arguments.get("cycle_momentum"):
        what = f"{place}.cycle_momentum={show(arguments['cycle_momentum'])}: mptrain keeps the momentum constant"
        problems.append(Problem(what, "leave it out: the learning rate is cycled without it"))
    try:
        stepped = dataclasses.replace(stepped, arguments=arguments).check(place)
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
    notes = [note for one in schedules for note in getattr(one, "notes", ())]
    for warmup in {getattr(one, "warmup", 0) for one in schedules}:
        if isinstance(warmup, int) and warmup > planned:
            notes.append(f"schedule.warmup={warmup} is longer than the {planned} planned updates: the rate only rises")
    return tuple(dict.fromkeys(notes))
