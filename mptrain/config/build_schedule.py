"""Construction of a learner's learning rate schedule from its target, which may be a scheduler of torch or timm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mptrain.config.schema import Config
from mptrain.config.targets import Target, parameters
from mptrain.errors import ConfigError
from mptrain.schedule.shapes import Schedule, TabulatedSchedule
from mptrain.schedule.stepped import LENGTHS, SteppedSchedule
from mptrain.workloads.base.task import Objective


def build_schedule(target: Target) -> Schedule | TabulatedSchedule:
    """Build the learning rate schedule of a learner.

    Args:
        target: Checked target of the group ``schedule``. If it has a parameter ``optimizer``, it returns a scheduler
            with the interface of torch or timm; otherwise it returns a schedule of mptrain.

    Raises:
        ConfigError: The target cannot be built, or returns something else.
    """
    accepted, _ = parameters(target.resolve())
    if "optimizer" in accepted:
        return _stepped(target, set(accepted))
    schedule: Schedule | TabulatedSchedule = target.build()
    if not isinstance(schedule, Schedule | TabulatedSchedule):
        raise ConfigError(
            f"{target.path} is not a schedule: it has no factor(), no rates() and no parameter optimizer",
            "choose one that mptrain list schedule shows",
        )
    return schedule


def _stepped(target: Target, accepted: set[str]) -> SteppedSchedule:
    given = {name: value for name, value in target.arguments.items() if name != "interval" or name in accepted}
    lengths = [name for name in LENGTHS if name in accepted and name not in given]
    if "epochs" in given:  # OneCycleLR computes the length from epochs and steps_per_epoch
        lengths = [name for name in lengths if name != "total_steps"]
    # timm's schedulers without warmup_prefix, and those where it is true, begin after the warm-up.
    shift = given.get("warmup_t", 0) if given.get("warmup_prefix", "warmup_prefix" not in accepted) else 0

    def make(*, length: int, **facts: Any) -> Any:
        facts |= {name: max(1, length - shift * (name == "t_initial")) for name in lengths}
        return dataclasses.replace(target, arguments=given).build(**facts, cycle_momentum=False)

    interval = target.arguments.get("interval", "update")
    notes = [f"schedule: {' and '.join(lengths)} is the number of {interval}s of the run"] if lengths else []
    if "cycle_momentum" in accepted - given.keys():
        notes.append("schedule: the momentum stays constant, cycle_momentum=false")
    return SteppedSchedule(target.path, make, interval, tuple(notes))


def schedule_notes(config: Config, objectives: Iterable[Objective]) -> tuple[str, ...]:
    """Return the notes for the user about arguments of schedulers that mptrain sets, each once.

    Args:
        config: Checked configuration.
        objectives: Losses of the task; each names its learner.
    """
    schedules = [build_schedule(config.for_learner(objective.learner).schedule) for objective in objectives]
    return tuple(dict.fromkeys(note for one in schedules for note in getattr(one, "notes", ())))
