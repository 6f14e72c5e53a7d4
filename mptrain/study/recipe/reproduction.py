"""Reproduction of a recipe: checks it, plans its runs in a folder, and judges its expectations.

A recipe is a published claim with the runs and the expected results that test it. `mptrain.study.sweep.runner` starts
the processes, and `mptrain.cli` prints the output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mptrain.config.catalogue import recipes_folder
from mptrain.config.compose import Composer
from mptrain.config.config_diff import describe_change, diff
from mptrain.config.schema import RunOptions
from mptrain.runlog.atomic_files import write_atomically
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_reader import read_run
from mptrain.runlog.sweeps import SCHEMA, Sweep, SweepPaths, is_sweep, read_sweep
from mptrain.study.comparison.results import BEST
from mptrain.study.comparison.run_measures import measure
from mptrain.study.comparison.sentences import unfair
from mptrain.study.recipe.catalogue import RECIPE_YAML, recipe_points, require_same_arms, start_of
from mptrain.study.recipe.expectations import ExpectationResult, judge_expectation, unknown_measures
from mptrain.study.sweep.comparisons import ComparisonOptions, claimed_by
from mptrain.study.sweep.points import check, directory_name
from mptrain.study.sweep.runner import plan_sweep, refresh_status, sweep_folder
from mptrain.system.errors import ConfigError, EnvironmentRefused, Problem
from mptrain.system.files import read_bytes
from mptrain.system.process_state import versions_now
from mptrain.system.records import as_json

if TYPE_CHECKING:
    from mptrain.study.comparison.results import Comparison, RunMeasures
    from mptrain.study.recipe.recipe import Recipe
    from mptrain.study.sweep.executor import Program
    from mptrain.study.sweep.points import Point


@dataclass(frozen=True)
class Reproduction:
    """A recipe that is checked and ready to run, with its folder and all its runs.

    Attributes:
        recipe: The recipe.
        smoke: Whether to make short runs that only check that everything works.
        words: The user's overrides for every run.
        folder: The folder that holds the run directories.
        points: The runs, as points of a sweep with checked configurations.
        start: Folder of the run that has to end before them, because they start from its weights, and its point; None
            if it has ended, or the recipe has none.
        composer: The composer that made the configurations.
        config_dirs: The user's config folders.
    """

    recipe: Recipe
    smoke: bool
    words: tuple[str, ...]
    folder: Path
    points: tuple[Point, ...]
    composer: Composer
    config_dirs: tuple[str, ...] = ()
    start: tuple[Path, Point] | None = None


@dataclass(frozen=True)
class RecipeVerdict:
    """Outcome of a whole recipe.

    Attributes:
        findings: The outcome of each expectation, in the recipe's order.
    """

    findings: tuple[ExpectationResult, ...]

    @property
    def word(self) -> Literal["REPRODUCED", "NOT REPRODUCED", ""]:
        """``REPRODUCED`` if every expectation is met, else ``NOT REPRODUCED``; empty without expectations."""
        if not self.findings:
            return ""
        return "REPRODUCED" if all(finding.outcome == "met" for finding in self.findings) else "NOT REPRODUCED"

    def count(self, outcome: str) -> int:
        """Return the number of expectations with an outcome: ``met``, ``not met`` or ``undecided``."""
        return sum(finding.outcome == outcome for finding in self.findings)


def folder_of(recipe: Recipe, root: str, *, smoke: bool) -> Path:
    """Return the folder that holds a recipe's run directories: ``ROOT/recipes/NAME``.

    Args:
        recipe: The recipe.
        root: The folder ``ROOT``, the user's ``run.root``.
        smoke: Whether the runs are short ones, which have a folder ``NAME-smoke`` of their own.
    """
    return Path(root) / "recipes" / (f"{recipe.name}-smoke" if smoke else recipe.name)


def prepare(
    recipe: Recipe, words: Sequence[str], root: str, program: Program, *, smoke: bool, config_dirs: Sequence[str] = ()
) -> Reproduction:
    """Check all that can be checked of a recipe before its first run, without writing anything.

    Args:
        recipe: The recipe to run.
        words: Further overrides of every run, from the command line.
        root: The folder in which ``recipes/NAME`` is created.
        program: The program that each run starts.
        smoke: Whether to make short runs of one seed.
        config_dirs: Further config folders.

    Returns:
        The recipe with its folder and all its runs, ready to run. Their configurations have no weights of the run that
        they start from.

    Raises:
        ConfigError: If an override or a point (one run) is invalid, or the folder holds other
            runs.
        EnvironmentRefused: If a GPU is missing, or a point cannot run on this machine.
        DataError: If data is missing.
    """
    _require_gpu(recipe, smoke=smoke)
    folder = folder_of(recipe, root, smoke=smoke)
    first = start_of(recipe, words, smoke=smoke)
    place = folder.with_name(f"{folder.name}-start")
    weights = (place / directory_name(first)).absolute()
    points = recipe_points(recipe, words, weights=weights, smoke=smoke)
    begun = False
    if is_sweep(folder):
        sweep = refresh_status(read_sweep(folder))
        require_same_arms(sweep, points)
        begun = any(sweep.has_ended(job) for job in sweep.jobs)
        _require_same_start(recipe, sweep, first)
    start = None
    if recipe.start and not (begun and all(map(sweep.has_ended, sweep.jobs))):
        if is_sweep(place):
            require_same_arms(read_sweep(place), [first])
        if not _has_ended(place):
            if begun:
                raise _other_start(folder, f"runs that started from weights which are not there any more ({place})")
            start = place, first
    comes_along = recipe.path.is_relative_to(recipes_folder())
    composer = Composer(config_dirs, typed=None if comes_along else words)
    bare = recipe_points(recipe, words, smoke=smoke)  # weights that are not there yet cannot be checked
    checked = check([*bare, *([first] if start else [])], composer, program)
    points = [replace(known, overrides=own.overrides) for known, own in zip(checked, points, strict=False)]
    _require_same_configurations(folder, points)
    return Reproduction(recipe, smoke, tuple(words), folder, tuple(points), composer, tuple(config_dirs), start)


def plan_start(reproduction: Reproduction) -> Sweep:
    """Write the plan of the run whose weights a recipe's other runs start from (``sweep.json``) to its folder.

    Raises:
        StorageError: If the folder holds something else or cannot be written to.
    """
    assert reproduction.start is not None
    folder, point = reproduction.start
    made = sweep_folder(RunOptions(root=str(folder.parent), name=folder.name, resume="auto"))
    return refresh_status(plan_sweep([point], made, words=point.overrides, config_dirs=reproduction.config_dirs))


def plan(reproduction: Reproduction, parallel: int) -> Sweep:
    """Write the plan of all runs (``sweep.json``) and a copy of the recipe to its folder. Earlier runs are kept.

    Args:
        reproduction: The checked recipe.
        parallel: Number of runs at the same time.

    Returns:
        The planned sweep, with the status of runs that already exist.

    Raises:
        StorageError: If the folder holds something else or cannot be written to.
    """
    recipe, points = reproduction.recipe, reproduction.points
    options = ComparisonOptions(
        recipe.reference, recipe.margin, recipe.metric, claimed_by(points), recipe.compares_best
    )
    first = start_of(recipe, reproduction.words, smoke=reproduction.smoke)
    start = {"start": list(first.overrides)} if recipe.start else {}
    root, name = reproduction.folder.parent.parent, reproduction.folder.name
    folder = sweep_folder(RunOptions(root=str(root), name=f"recipes/{name}", resume="auto"))
    sweep = plan_sweep(
        points,
        folder,
        words=(*recipe.base, *reproduction.words),
        config_dirs=reproduction.config_dirs,
        parallel=parallel,
        kind="recipe",
        plan={**options.as_plan(), "recipe": recipe.name, "smoke": reproduction.smoke, **start},
    )
    write_atomically(folder / RECIPE_YAML, recipe.path.read_bytes())
    return refresh_status(sweep)


def require_measures(recipe: Recipe, runs: dict[str, list[RunMeasures]]) -> None:
    """Check that every measure that a recipe's expectations name exists in the result of `measured`.

    Raises:
        ConfigError: If measures are unknown. The error lists all of them.
    """
    if problems := unknown_measures(recipe.expectations, runs):
        raise ConfigError([Problem(f"{recipe.path}: {problem.what}", problem.hint) for problem in problems])


def measured(sweep: Sweep) -> dict[str, list[RunMeasures]]:
    """Read the measures (metric, skip rate, speed ...) of all runs of a recipe.

    Returns:
        Full name of each arm (configuration), such as ``sgd/fp32``, to its runs.

    Raises:
        StorageError: If the records of a run are missing or damaged.
    """
    runs: dict[str, list[RunMeasures]] = {}
    for job in sweep.jobs:
        runs.setdefault(job.arm, []).append(measure(read_run(sweep.paths.run(job.name))))
    return runs


def decide_recipe(
    recipe: Recipe,
    runs: dict[str, list[RunMeasures]],
    comparisons: Mapping[str, Comparison] | None = None,
) -> RecipeVerdict:
    """Judge every expectation of a recipe from its runs. All are undecided if a comparison is unfair.

    Args:
        recipe: The recipe.
        runs: Full name of an arm (configuration) to its runs.
        comparisons: Name of each group to the comparison of its arms.
    """
    if best := (comparisons or {}).get(BEST):
        runs = {**runs, **{f"{BEST}/{arm.name}": [*arm.runs] for arm in best.arms}}
    findings = [judge_expectation(expectation, runs) for expectation in recipe.expectations]
    objections = [
        objection.what
        for comparison in (comparisons or {}).values()
        for objection in comparison.objections
        if objection.fatal
    ]
    if objections:
        findings = [replace(finding, outcome="undecided", numbers=unfair(objections[0])) for finding in findings]
    return RecipeVerdict(tuple(findings))


def other_circumstances(sweep: Sweep) -> list[str]:
    """Return sentences about runs of a recipe that were made with other versions of software than the current ones.

    Args:
        sweep: The runs of the recipe; only ended ones are checked.

    Returns:
        One sentence for each set of differing versions.
    """
    now = versions_now()
    sentences: dict[str, None] = {}
    for job in sweep.jobs:
        if not sweep.has_ended(job):
            continue
        then = read_run(sweep.paths.run(job.name)).state.versions
        changes = [f"{name} {then[name]} (now {now[name]})" for name in now if name in then and then[name] != now[name]]
        if changes:
            sentences[f"earlier runs are judged as they are; they were made with {', '.join(changes)}"] = None
    return list(sentences)


def write_verdict(reproduction: Reproduction, verdict: RecipeVerdict) -> Path:
    """Write the outcome of a recipe to ``verdict.json`` in its folder, as strict JSON.

    `mptrain.system.records.as_json` encodes non-finite numbers.

    Returns:
        The path of the file.

    Raises:
        StorageError: If the file cannot be written.
    """
    recipe = reproduction.recipe
    fields = {
        "schema": SCHEMA,
        "recipe": recipe.name,
        "title": recipe.title,
        "claim": recipe.claim,
        "source": recipe.source,
        "words": list(reproduction.words),
        "verdict": verdict.word or None,
        "expectations": [asdict(finding) for finding in verdict.findings],
    }
    path = SweepPaths(reproduction.folder).verdict
    write_atomically(path, json.dumps(json.loads(as_json(fields)), indent=1, allow_nan=False) + "\n")
    return path


def _require_same_start(recipe: Recipe, sweep: Sweep, first: Point) -> None:
    """Check that the runs in a folder started from weights of the run that a recipe names now."""
    if sweep.plan.get("start", []) != (list(first.overrides) if recipe.start else []):
        raise _other_start(sweep.folder, "runs that started from the weights of another run, or from none")


def _other_start(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{folder} has {what}", f"to start over: remove or rename {folder} and {folder}-start, or add run.root=DIR"
    )


def _has_ended(folder: Path) -> bool:
    """Return whether all runs of the sweep in a folder have ended; False without a sweep."""
    if not is_sweep(folder):
        return False
    sweep = refresh_status(read_sweep(folder))
    return all(map(sweep.has_ended, sweep.jobs))


def _require_gpu(recipe: Recipe, *, smoke: bool) -> None:
    if recipe.needs.gpu == "optional" or smoke:
        return
    from mptrain.system.device import count_of

    if not count_of("cuda"):
        raise EnvironmentRefused(
            f"{recipe.name} needs a GPU, and torch sees no CUDA device",
            "the same command with --smoke checks without a GPU that every run works",
        )


def _require_same_configurations(folder: Path, points: Sequence[Point]) -> None:
    """Check that the same overrides still give the configurations of the saved runs, as defaults may have changed.

    Raises:
        ConfigError: If a configuration differs. The message names the first arm and the keys.
    """
    if not is_sweep(folder):
        return
    for job, point in zip(read_sweep(folder).jobs, points, strict=True):
        saved = RunPaths(folder / job.name).config
        if point.config is None or not saved.is_file():
            continue
        changes = diff(read_bytes(saved).decode("utf-8", "replace"), point.config.yaml)
        if changes := [change for change in changes if change[0] != "model.weights"]:  # as its overrides say
            words = ", ".join(describe_change(*change) for change in changes[:3])
            raise ConfigError(
                f"{folder} holds runs of arm {job.arm} with other defaults: {words}",
                f"to start over: remove or rename {folder}, or add run.root=DIR",
            )
