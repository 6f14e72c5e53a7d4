"""Points of a sweep: expansion of overrides with several values to one point (one run) each, and checks of all points.

Every point is composed and checked before the first job starts: its overrides, its device, and whether its parts fit
together. Each data set is loaded once, in a separate process (`mptrain.study.sweep.processes.run_in_fork`), so that the
sweep keeps neither its memory nor side effects of loading. Downloads are then complete before concurrent jobs need
them.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
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
from mptrain.run.tracking import require_logger
from mptrain.study.sweep.executor import Program
from mptrain.study.sweep.processes import run_in_fork, warm_up
from mptrain.study.sweep.worker import one_line
from mptrain.system.errors import CheckpointError, ConfigError, DataError, EnvironmentRefused, MptrainError, Problem
from mptrain.system.files import expanded

if TYPE_CHECKING:
    from mptrain.workloads.base.dataset import Dataset

_Checked = TypeVar("_Checked")

#: Maximum number of points; it catches mistyped ranges, which may have millions.
MOST_POINTS = 10_000

#: Keys of the run directory; the sweep sets them for each run.
NOT_SWEPT = ("run.name", "run.root", "run.resume")

#: Hydra keys that would let another program expand or run the points.
_NOT_OURS = ("hydra/sweeper", "hydra/launcher", "hydra.sweeper", "hydra.launcher")


@dataclass(frozen=True)
class Point:
    """One point of a sweep: a combination of override values, trained as one run.

    Attributes:
        number: Index of the point in the sweep, from 0.
        overrides: All ``KEY=VALUE`` overrides of the point.
        varied: Those of the overrides in which the points of the sweep differ.
        warnings: Warnings for the user about the point's configuration; empty before `validate`.
        config: Resolved configuration of the point, without its own run directory; None before `validate`.
        arm: Name of the point's arm in a comparison; empty in a plain sweep.
        count: Number of points in the sweep.
    """

    number: int
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    config: Config | None = field(default=None, compare=False, repr=False)
    arm: str = ""
    count: int = 1

    @property
    def description(self) -> str:
        """Position and label of the point in its sweep, for messages, such as ``point 3/12 (seed=2)``."""
        return f"point {self.number + 1}/{self.count} ({self.label})"

    @property
    def label(self) -> str:
        """Short name of the point for messages and tables: the overrides in which points differ, such as ``seed=2``."""
        return " ".join(self.varied) or "(no overrides)"


def directory_name(point: Point) -> str:
    """Return the name of a point's run directory inside its sweep's folder, such as ``003-seed=1,precision=fp32``.

    The number is that of the point. Characters of the varied overrides that are unsafe in a path become ``_``.
    """
    text = re.sub(r"[^A-Za-z0-9._=+,-]+", "_", ",".join(point.varied))[:100].strip("_.")
    return f"{point.number:03d}-{text}" if text else f"{point.number:03d}"


def expand(words: Sequence[str], catalogue: Catalogue) -> list[Point]:
    """Expand overrides to the points of a sweep, one for each combination of values, neither composed nor checked.

    The values of the last override vary fastest: ``seed=0,1 precision=fp32,tf32`` gives four points, of which the first
    two have ``seed=0``. The overrides are in Hydra's grammar, with choices (``a,b``), ``range()`` and ``glob()`` over
    the options in the catalogue. Raise one ConfigError with all problems: an override has no values or too many, its
    key cannot be swept, it selects a sweeper or launcher of Hydra, or the sweep has more than `MOST_POINTS` points.
    """
    problems: list[Problem] = []
    axes: list[list[str]] = []
    swept = set()
    for word in words:
        override, _ = parse(word)
        key = override.key_or_group if override is not None else ""
        if any(key == name or key.startswith(f"{name}.") for name in _NOT_OURS):
            hint = "write KEY=A,B or KEY=range(1,4), and --jobs N"
            problems.append(Problem(f"{word}: mptrain expands and runs sweeps itself", hint))
        if override is None or not override.is_sweep_override():
            axes.append([word])  # composing reports overrides that cannot be parsed
        else:
            swept.add(len(axes))
            axes.append(_values(word, override, catalogue, problems))
    count = math.prod(max(len(axis), 1) for axis in axes)
    if count > MOST_POINTS:
        hint = "check the ranges, or split the sweep"
        problems.append(Problem(f"the sweep has more than {MOST_POINTS:,} points", hint))
    if problems:
        raise ConfigError(problems)
    return [
        Point(number, combination, tuple(combination[index] for index in sorted(swept)), count=count)
        for number, combination in enumerate(itertools.product(*axes))
    ]


def validate(points: Sequence[Point], composer: Composer) -> list[Point]:
    """Return the points of `expand` with their configurations, composed and checked without loading data, and warnings.

    Raise one ConfigError with the problems of all points. A problem names its first point unless all points have it.
    """

    def composed(point: Point) -> Point:
        config = composer.compose(point.overrides)
        require_logger(config)
        return replace(point, warnings=config.warnings, config=config)

    return _each(points, composed)


def require_keys(points: Sequence[Point], composer: Composer) -> None:
    """Check every point, as `validate` does, for unknown keys and invalid values, as far as possible without torch."""
    _each(points, lambda point: composer.require_keys(point.overrides))


def _each(points: Sequence[Point], check: Callable[[Point], _Checked]) -> list[_Checked]:
    """Apply a check to every point and return its results, or raise one ConfigError with the problems of all points."""
    first: dict[str, Problem] = {}  # by message only: hints may contain a point's value
    points_by_message: dict[str, list[Point]] = {}
    checked = []
    for point in points:
        try:
            checked.append(check(point))
        except ConfigError as error:
            for problem in error.problems:
                points_by_message.setdefault(first.setdefault(problem.what, problem).what, []).append(point)
    if points_by_message:
        raise ConfigError([named(first[what], bad, len(points)) for what, bad in points_by_message.items()])
    return checked


def require_devices(points: Sequence[Point]) -> None:
    """Check that this machine has the device of every point, and that the device supports the point's precision mode.

    The sweep would otherwise fail half-way. The function imports torch. Raise EnvironmentRefused, which names the
    point, for a missing device or support.
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
            where = f"{point.description}: " if point.count > 1 else ""
            raise EnvironmentRefused(f"{where}{error}", error.hint) from error
        fine.add((config.precision, config.device))


def named(problem: Problem, bad: Sequence[Point], checked: int) -> Problem:
    """Return a problem with the first point that has it named in its message, unless all checked points have it."""
    if len(bad) == checked:
        return problem
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return Problem(f"{bad[0].description}{more}: {problem.what}", problem.hint)


def check(points: Sequence[Point], composer: Composer, program: Program, *, elsewhere: bool = False) -> list[Point]:
    """Return the points of `expand` with configurations and warnings, after all checks possible before training.

    Each configuration is composed. Its device is checked, unless the jobs run ``elsewhere`` on machines whose
    devices are unknown, and its model, data set and task are checked to fit together. Raise an MptrainError that
    names an invalid point.
    """
    warm_up(program.modules)  # the fork server imports the modules while this process composes
    checked = validate(points, composer)
    if not elsewhere:
        require_devices(checked)
    require_agreement(checked, program)
    return checked


def require_agreement(points: Sequence[Point], program: Program) -> None:
    """Check that the model, data set, task, learners and weights of each point of a sweep fit together.

    Data sets and tasks are built in a separate process. Points that differ in none of these parts are checked once.

    Raises:
        ConfigError: Contains the problems of all points; each names its first point.
        DataError, StorageError, EnvironmentRefused: Data or weights are missing; the message names the first point.
    """
    alike: dict[str, list[Point]] = {}
    for point in points:
        if point.config is not None:
            alike.setdefault(_what_it_is_made_of(point.config), []).append(point)
    groups = list(alike.values())
    configs = [group[0].config for group in groups if group[0].config is not None]
    points_by_problem: dict[Problem, list[Point]] = {}
    for number, error in run_in_fork(functools.partial(disagreements, configs), program.modules):
        if not isinstance(error, ConfigError):
            [problem] = [named(Problem(str(error), error.hint), groups[number], len(points))]
            raise type(error)(problem.what, problem.hint)
        for problem in error.problems:
            points_by_problem.setdefault(problem, []).extend(groups[number])
    if points_by_problem:
        raise ConfigError([named(problem, bad, len(points)) for problem, bad in points_by_problem.items()])


def disagreements(configs: Sequence[Config]) -> list[tuple[int, MptrainError]]:
    """Find the configurations whose data set, task, learners or weights are missing or do not fit together.

    Return ``(index, error)`` for each, ordered by index. Data sets and tasks are built in the calling process, one data
    set at a time.
    """
    errors: list[tuple[int, MptrainError]] = []
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
            errors.append((number, error.with_traceback(None)))
    return sorted(errors, key=lambda item: item[0])


def _load(config: Config) -> Dataset | MptrainError:
    from mptrain.run.build.workload import build_dataset

    try:
        return build_dataset(config)
    except MptrainError as error:
        return error
    except (Exception, SystemExit) as error:  # user code may raise anything
        return DataError(f"{config.dataset.path} cannot be created: {one_line(error)}")


def _require_together(config: Config, dataset: Dataset) -> None:
    from mptrain.run.build.workload import build_task, require_facts, require_known_learners

    require_facts(config, "model", config.model, dataset)
    try:
        task = build_task(config, dataset)
        objectives = task.objectives()
    except MptrainError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{config.task.path} cannot be created: {one_line(error)}") from None
    require_known_learners(config, objectives)
    if config.weights is not None:
        path = expanded(config.weights)
        if not path.exists():
            raise CheckpointError(f"model.weights={path}: there is no such file or run", "give an existing file or run")


def _what_it_is_made_of(config: Config) -> str:
    """Return a key that is equal for configurations whose compatibility checks have the same result."""
    parts = (config.model, config.task, sorted(config.learners), config.weights)
    return f"{_data_of(config)} {parts!r}"


def _data_of(config: Config) -> str:
    """Return a key that identifies the data set: its target, arguments, and the facts of the run that it accepts."""
    target = config.dataset
    accepted, _ = parameters(target.resolve())
    wanted = {name: value for name, value in config.for_dataset().items() if name in accepted}
    return f"{target.path} {dict(target.arguments)!r} {wanted!r}"


def _values(word: str, override: Override, catalogue: Catalogue, problems: list[Problem]) -> list[str]:
    """Return a swept override as one override per value; without values, add the reason to ``problems``."""
    key = override.key_or_group
    if key in NOT_SWEPT:
        problems.append(Problem(f"{word}: {key} cannot be swept", "remove it: each point gets its own run directory"))
        return []
    value: Any = override.value()
    try:
        if isinstance(value, Glob):
            if key not in catalogue.groups:
                groups = ", ".join(catalogue.groups)
                problems.append(Problem(f"{word}: glob() only works for groups", f"the groups are {groups}"))
                return []
            values: Iterator[Any] = iter(value.filter(list(catalogue.groups[key])))
        elif not override.is_discrete_sweep():
            problems.append(Problem(f"{word}: interval() has infinitely many values", "write range(start,stop,step)"))
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
