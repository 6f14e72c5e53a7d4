"""Schedulers of torch and timm, and others with their interface, as tables of learning rates.

Such a scheduler changes the rate of an optimizer whenever it is stepped. Here it steps an optimizer without weights
before the run begins, and the rates are written down. During the run only applied updates count, as for every schedule.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mptrain.system.errors import ConfigError, either, instance, near_names
from mptrain.system.machine import load_extra

#: Arguments of schedulers that are the length of the run, in steps of the scheduler, unless the user gives them.
LENGTHS = ("T_max", "total_iters", "total_steps", "t_initial")

_PLATEAU = "set schedule=plateau, which keeps its state in checkpoints"
_FUNCTION = (
    "write a function(optimizer) that returns one, and name it as _target_; see docs/optimizers-and-schedules.md"
)

#: Classes that cannot be built from a configuration, with the reason and what to do.
_REFUSED = {
    "ReduceLROnPlateau": ("needs the metric of each validation", _PLATEAU),
    "PlateauLRScheduler": ("needs the metric of each validation", _PLATEAU),
    "LambdaLR": ("needs a function, which a configuration cannot hold", _FUNCTION),
    "MultiplicativeLR": ("needs a function, which a configuration cannot hold", _FUNCTION),
    "SequentialLR": ("needs other schedulers, which a configuration cannot hold", _FUNCTION),
    "ChainedScheduler": ("needs other schedulers, which a configuration cannot hold", _FUNCTION),
}

#: Settings of the optimizer that a scheduler must leave as they are, because only the learning rate is tabulated.
_FIXED = {"momentum": 0.9, "weight_decay": 0.0}


def torch_scheduler(name: str) -> type[Any]:
    """Return a scheduler class of torch.optim.lr_scheduler by name; without one, ConfigError names the nearest."""
    return _named(torch.optim.lr_scheduler, name)


def timm_scheduler(name: str) -> type[Any]:
    """Return a scheduler class of timm.scheduler by name, or raise ConfigError; EnvironmentRefused without timm."""
    return _named(load_extra("timm.scheduler", "timm", "schedule=timm"), name)


def _named(package: Any, name: str) -> type[Any]:
    kinds = {word: kind for word, kind in vars(package).items() if inspect.isclass(kind) and hasattr(kind, "step")}
    if scheduler_class := kinds.get(name):
        return scheduler_class
    guesses = [f"schedule.name={guess}" for guess in near_names(name, [*kinds])]
    hint = f"did you mean {either(guesses)}?" if guesses else f"its schedulers are {', '.join(sorted(kinds))}"
    raise ConfigError(f"{package.__name__} has no scheduler {name}", hint)


def refuse_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for a scheduler class that needs metrics, functions or other schedulers; functions may pass."""
    name = getattr(scheduler, "__name__", "")
    if isinstance(scheduler, type) and name in _REFUSED and scheduler.__module__.startswith(("torch.", "timm.")):
        reason, hint = _REFUSED[name]
        raise ConfigError(f"schedule: {name} {reason}", hint)


@dataclass(frozen=True)
class SteppedSchedule:
    """Schedule with the learning rates that a scheduler of torch or timm, or one like them, gives to an optimizer.

    ``make`` returns the scheduler object. Its keyword arguments are ``optimizer``, ``max_lr`` (the base learning rate),
    ``length`` (steps of the scheduler in the run) and ``steps_per_epoch`` (steps of it in one epoch). ``interval`` is
    the time between two of its steps. ``notes`` tell the user of arguments that mptrain sets.
    """

    name: str
    make: Callable[..., Any]
    interval: Literal["update", "epoch"] = "update"
    notes: tuple[str, ...] = ()

    def rates(self, lr: float, planned: int, steps_per_epoch: int) -> list[float]:
        """Return the learning rates of a run.

        The entry after the last update repeats the one before it, because some schedulers refuse a further step. Raises
        ConfigError if the scheduler cannot be built or stepped, or changes other settings than the learning rate.
        """
        every = steps_per_epoch if self.interval == "epoch" else 1
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([{"params": [weight], **_FIXED}], lr=lr)
        scheduler = self._made(optimizer, lr, planned, every, steps_per_epoch // every)
        (group,), rates, changed = optimizer.param_groups, list[float](), set[str]()
        optimizer.step()  # of no gradient, because schedulers of torch warn if the optimizer was never stepped
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for update in range(planned):
                    if update and update % every == 0:
                        _step(scheduler, update // every)
                    rates.append(float(group["lr"]))
                    changed |= {name for name, value in _FIXED.items() if group[name] != value}
        except Exception as error:  # schedulers of users may raise anything
            raise ConfigError(
                f"schedule: {self.name} fails in step {len(rates) // every} of {-(-planned // every)}: {error}",
                "give it the length of the run, or leave its length out",
            ) from error
        if changed:
            what = " and ".join(sorted(changed))
            raise ConfigError(
                f"schedule: {self.name} changes the optimizer's {what}, which mptrain keeps constant",
                "let it change the learning rate only",
            )
        return [*rates, rates[-1]]

    def _made(self, optimizer: Any, lr: float, planned: int, every: int, per_epoch: int) -> Any:
        scheduler = self.make(optimizer=optimizer, max_lr=lr, steps_per_epoch=per_epoch, length=-(-planned // every))
        if isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "PlateauLRScheduler":
            refuse_scheduler(type(scheduler))
        if not hasattr(scheduler, "step") or getattr(scheduler, "optimizer", None) is not optimizer:
            raise ConfigError(
                f"schedule: {self.name} returned {instance(scheduler)}, not a scheduler of the given optimizer",
                "return an LRScheduler of torch or a Scheduler of timm",
            )
        return scheduler


def _step(scheduler: Any, number: int) -> None:
    """Step a scheduler. One of timm takes the number of the step, as updates or epochs, and ignores the other call."""
    if hasattr(scheduler, "step_update"):
        scheduler.step(number)
        scheduler.step_update(number)
    else:
        scheduler.step()
