"""Whether every point can be run: its words, its device, and parts that go together.

Each data set is loaded once, in a process of its own (`mptrain.sweep.processes.ask`): the sweep keeps neither its memory
nor what loading it did to the process, and what has to be downloaded is there before jobs ask for it side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.config.targets import parameters
from mptrain.errors import CheckpointError, ConfigError, DataError, MptrainError, Problem
from mptrain.sweep.points import Point, named, require_devices, validate
from mptrain.sweep.processes import ask, warm_up
from mptrain.sweep.worker import Program, one_line

if TYPE_CHECKING:
    from mptrain.config.compose import Composer
    from mptrain.config.schema import Config
    from mptrain.workloads.base.source import Dataset


def check(points: Sequence[Point], composer: Composer, program: Program, *, elsewhere: bool = False) -> list[Point]:
    """Checks all that can be known of points before any of them is run.

    Args:
        points: As they were expanded.
        composer: Over the folders that hold groups and options.
        program: What jobs will run.
        elsewhere: They run on other machines, whose devices are not known.

    Returns:
        The same points with their warnings and configurations.

    Raises:
        MptrainError: Something is wrong with a point; it is named.
    """
    warm_up(program)  # imports what it will need while this process looks at words
    checked = validate(points, composer)
    if not elsewhere:
        require_devices(checked)
    require_agreement(checked, program)
    return checked


def require_agreement(points: Sequence[Point], program: Program) -> None:
    """Refuse points whose model, data set, task, learners and weights do not go together, before any starts.

    Args:
        points: As `mptrain.sweep.points.validate` returned them.
        program: What jobs will run.

    Raises:
        ConfigError: With the problems of all points, each with the first point that has it.
        DataError, StorageError, EnvironmentRefused: Data or weights are missing, with the first such point.
    """
    alike: dict[str, list[Point]] = {}
    for point in points:
        if point.config is not None:
            alike.setdefault(_what_it_is_made_of(point.config), []).append(point)
    groups = list(alike.values())
    configs = [group[0].config for group in groups if group[0].config is not None]
    found: dict[Problem, list[Point]] = {}
    for number, error in ask(functools.partial(disagreements, configs), program):
        if not isinstance(error, ConfigError):
            [problem] = [named(Problem(str(error), error.hint), groups[number], len(points))]
            raise type(error)(problem.what, problem.hint)
        for problem in error.problems:
            found.setdefault(problem, []).extend(groups[number])
    if found:
        raise ConfigError([named(problem, bad, len(points)) for problem, bad in found.items()])


def disagreements(configs: Sequence[Config]) -> list[tuple[int, MptrainError]]:
    """The configurations, by their places, whose parts cannot be had or do not go together, and why."""
    found: list[tuple[int, MptrainError]] = []
    held: tuple[str, Dataset | MptrainError] | None = None  # one data set at a time: they may be large
    for number, config in sorted(enumerate(configs), key=lambda item: _data_of(item[1])):
        if held is None or held[0] != _data_of(config):
            held = None
            held = (_data_of(config), _load(config))
        try:
            if isinstance(held[1], MptrainError):
                raise held[1]
            _require_together(config, held[1])
        except MptrainError as error:
            found.append((number, error.with_traceback(None)))
    return sorted(found, key=lambda item: item[0])


def _load(config: Config) -> Dataset | MptrainError:
    from mptrain.config.together import build_dataset

    try:
        return build_dataset(config)
    except MptrainError as error:
        return error
    except (Exception, SystemExit) as error:  # code of the user's may do anything
        return DataError(f"{config.dataset.path} cannot be made: {one_line(error)}")


def _require_together(config: Config, dataset: Dataset) -> None:
    from mptrain.config.together import build_task, require_facts

    require_facts(config, "model", config.model, dataset)
    try:
        task = build_task(config, dataset)
        learners = [objective.learner for objective in task.objectives()]
    except MptrainError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{config.task.path} cannot be made: {one_line(error)}") from None
    unknown = [name for name in config.learners if name not in learners]
    if unknown:
        hint = f"it has {', '.join(learners)}"
        raise ConfigError([Problem(f"learners.{name}: the task has no such learner", hint) for name in unknown])
    if config.weights is not None:
        path = config.weights.expanduser()
        if not path.exists():
            raise CheckpointError(f"model.weights={path}: there is no such file or run", "name one that exists")


def _what_it_is_made_of(config: Config) -> str:
    """Configurations with the same answer go together, or do not, for the same reasons."""
    parts = (config.model, config.task, sorted(config.learners), config.weights)
    return f"{_data_of(config)} {parts!r}"


def _data_of(config: Config) -> str:
    """What decides which data set it is: its arguments, and what it wants to know about the run."""
    target = config.dataset
    accepted, _ = parameters(target.resolve())
    facts = {"seed": config.seed, "batch_size": config.train.batch_size}
    wanted = {name: value for name, value in facts.items() if name in accepted}
    return f"{target.path} {dict(target.arguments)!r} {wanted!r}"
