"""The points of a sweep: command-line words with several values become command lines with one value each, all checked.

Every point is composed and checked before the first one starts: its words, its device, and parts that go together. Each data set
is loaded once, in a process of its own (`mptrain.sweep.processes.run_in_fork`): the sweep keeps neither its memory nor what loading it
did to the process, and what has to be downloaded is there before jobs ask for it side by side.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from mptrain.config.catalogue import Catalogue
from mptrain.config.compose import Composer
from mptrain.config.overrides import parse
from mptrain.config.schema import Config
from mptrain.config.targets import parameters
from mptrain.errors import CheckpointError, ConfigError, DataError, EnvironmentRefused, MptrainError, Problem
from mptrain.run.tracking import require_logger
from mptrain.sweep.executor import Program
from mptrain.sweep.processes import run_in_fork, warm_up
from mptrain.sweep.worker import one_line

if TYPE_CHECKING:
    from mptrain.workloads.base.dataset import Dataset

_Checked = TypeVar("_Checked")

#: More points than anybody means; a range with a slip in it has millions.
MOST_POINTS = 10_000

#: Keys that say where runs are; a sweep gives each run its own.
NOT_SWEPT = ("run.name", "run.root", "run.resume")

#: What would have another program expand or run the points.
_NOT_OURS = ("hydra/sweeper", "hydra/launcher", "hydra.sweeper", "hydra.launcher")


@dataclass(frozen=True)
class Point:
    """One job of a sweep.

    Attributes:
        number: From 0.
        overrides: Its whole command line.
        varied: The words in which points differ.
        warnings: What its configuration warns about.
        config: Its configuration, once it is checked; the run directory is not its own yet.
        arm: Which arm of a comparison it belongs to; empty in a plain sweep.
        count: How many points there are.
    """

    number: int
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    config: Config | None = field(default=None, compare=False, repr=False)
    arm: str = ""
    count: int = 1

    @property
    def place(self) -> str:
        """``point 3/12 (seed=2)``."""
        return f"point {self.number + 1}/{self.count} ({self.label})"

    @property
    def label(self) -> str:
        """The words in which points differ, for messages and tables."""
        return " ".join(self.varied) or "(no overrides)"


def expand(words: Sequence[str], catalogue: Catalogue) -> list[Point]:
    """All combinations of the words' values; the last word varies fastest.

    Args:
        words: Overrides in Hydra's grammar, with choices (``a,b``), ``range()`` and ``glob()`` over options.
        catalogue: The options that ``glob()`` chooses from.

    Raises:
        ConfigError: A sweep without end, without values, or over something that cannot be swept.
    """
    problems: list[Problem] = []
    axes: list[list[str]] = []
    swept = set()
    for word in words:
        override, _ = parse(word)
        key = override.key_or_group if override is not None else ""
        if any(key == name or key.startswith(f"{name}.") for name in _NOT_OURS):
            hint = "write KEY=A,B or KEY=range(1,4), and --jobs N"
            problems.append(Problem(f"{word}: sweeps are expanded and run by mptrain itself", hint))
        if override is None or not override.is_sweep_override():
            axes.append([word])  # what cannot be read is reported by composing
        else:
            swept.add(len(axes))
            axes.append(_values(word, override, catalogue, problems))
    count = math.prod(max(len(axis), 1) for axis in axes)
    if count > MOST_POINTS:
        problems.append(Problem(f"the sweep has more than {MOST_POINTS:,} points", "check its ranges, or split it"))
    if problems:
        raise ConfigError(problems)
    return [
        Point(number, combination, tuple(combination[place] for place in sorted(swept)), count=count)
        for number, combination in enumerate(itertools.product(*axes))
    ]


def validate(points: Sequence[Point], composer: Composer) -> list[Point]:
    """Checks every point; none is run.

    Returns:
        The same points with their warnings and configurations.

    Raises:
        ConfigError: With the problems of all points; each names the point where not every one has it.
    """

    def composed(point: Point) -> Point:
        config = composer.compose(point.overrides)
        require_logger(config)
        return replace(point, warnings=config.warnings, config=config)

    return _each(points, composed)


def require_keys(points: Sequence[Point], composer: Composer) -> None:
    """Refuse points with unknown keys or impossible values, as far as they are known without torch.

    Raises:
        ConfigError: As `validate`.
    """
    _each(points, lambda point: composer.require_keys(point.overrides))


def _each(points: Sequence[Point], check: Callable[[Point], _Checked]) -> list[_Checked]:
    """Return what a check gives for every point, or raise the problems of all of them."""
    first: dict[str, Problem] = {}  # hints differ where they repeat a point's value
    found: dict[str, list[Point]] = {}
    checked = []
    for point in points:
        try:
            checked.append(check(point))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(first.setdefault(problem.what, problem).what, []).append(point)
    if found:
        raise ConfigError([named(first[what], bad, len(points)) for what, bad in found.items()])
    return checked


def require_devices(points: Sequence[Point]) -> None:
    """Checks that this machine can run every point, so that a sweep does not fail half-way; imports torch.

    Args:
        points: As `validate` returned them.

    Raises:
        EnvironmentRefused: A device is missing, or cannot run a point's precision mode; names the first such point.
    """
    from mptrain.precision.support import require_support, resolve_device

    fine = set()
    for point in points:
        config = point.config
        if config is None or (config.precision, config.device) in fine:
            continue
        try:
            require_support(config.precision, resolve_device(config.device))
        except EnvironmentRefused as error:
            where = f"{point.place}: " if point.count > 1 else ""
            raise EnvironmentRefused(f"{where}{error}", error.hint) from error
        fine.add((config.precision, config.device))


def named(problem: Problem, bad: Sequence[Point], checked: int) -> Problem:
    """A problem with the first point that has it; as it is where all the points that were checked have it."""
    if len(bad) == checked:
        return problem
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return Problem(f"{bad[0].place}{more}: {problem.what}", problem.hint)


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
    warm_up(program.modules)  # imports what it will need while this process looks at words
    checked = validate(points, composer)
    if not elsewhere:
        require_devices(checked)
    require_agreement(checked, program)
    return checked


def require_agreement(points: Sequence[Point], program: Program) -> None:
    """Refuse points whose model, data set, task, learners and weights do not go together, before any starts.

    Args:
        points: As `validate` returned them.
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
    for number, error in run_in_fork(functools.partial(disagreements, configs), program.modules):
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
    from mptrain.config.build_workload import build_dataset

    try:
        return build_dataset(config)
    except MptrainError as error:
        return error
    except (Exception, SystemExit) as error:  # code of the user's may do anything
        return DataError(f"{config.dataset.path} cannot be made: {one_line(error)}")


def _require_together(config: Config, dataset: Dataset) -> None:
    from mptrain.config.build_workload import build_task, require_facts, require_known_learners

    require_facts(config, "model", config.model, dataset)
    try:
        task = build_task(config, dataset)
        objectives = task.objectives()
    except MptrainError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{config.task.path} cannot be made: {one_line(error)}") from None
    require_known_learners(config, objectives)
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
    wanted = {name: value for name, value in config.for_dataset().items() if name in accepted}
    return f"{target.path} {dict(target.arguments)!r} {wanted!r}"


def _values(word: str, override: Override, catalogue: Catalogue, problems: list[Problem]) -> list[str]:
    key = override.key_or_group
    if key in NOT_SWEPT:
        problems.append(Problem(f"{word}: {key} cannot be swept", "each point gets a directory of its own"))
        return []
    value: Any = override.value()
    try:
        if isinstance(value, Glob):
            if key not in catalogue.groups:
                groups = ", ".join(catalogue.groups)
                problems.append(Problem(f"{word}: glob() chooses options of a group", f"groups are {groups}"))
                return []
            values: Iterator[Any] = iter(value.filter(list(catalogue.groups[key])))
        elif not override.is_discrete_sweep():
            problems.append(Problem(f"{word}: interval() has no end of values", "write range(start,stop,step)"))
            return []
        else:
            values = override.sweep_string_iterator()
        prefix = word.split("=", 1)[0]
        words = [f"{prefix}={item}" for item in itertools.islice(values, MOST_POINTS + 1)]
    except (HydraException, ValueError, TypeError, ArithmeticError) as error:
        problems.append(Problem(f"{word}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"))
        return []
    if not words:
        problems.append(Problem(f"{word} has no values"))
    return words
