"""Look-up of recipes by name or path, and expansion of a recipe to its runs.

A recipe is a published claim with the runs and the expected results that test it. This module runs nothing and must not
import torch. `mptrain.study.recipe.reproduction` runs and judges recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.config.catalogue import recipes_folder
from mptrain.config.overrides import parse, quoted
from mptrain.config.value_checks import show
from mptrain.study.recipe.recipe import RESERVED, read_recipe
from mptrain.study.sweep.points import Point
from mptrain.system.errors import ConfigError, Problem, UsageError, suggest
from mptrain.system.files import expanded

if TYPE_CHECKING:
    from mptrain.runlog.sweeps import Sweep
    from mptrain.study.recipe.recipe import Recipe

RECIPE_YAML = "recipe.yaml"


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with mptrain, without reading them."""
    return sorted(path.parent.name for path in recipes_folder().glob(f"*/{RECIPE_YAML}"))


def find_recipe(name: str) -> Recipe:
    """Read a recipe (a published claim with the runs that test it), given its name or its path.

    Args:
        name: Name of a recipe that comes with mptrain, or path of a recipe's folder or file.

    Raises:
        UsageError: If there is no such recipe.
        ConfigError: If the recipe is invalid. The error lists all problems.
    """
    path = expanded(name)
    if "/" not in name and name in recipe_names():
        return read_recipe(recipes_folder() / name / RECIPE_YAML)
    for candidate in (path / RECIPE_YAML, path):
        if candidate.is_file():
            return read_recipe(candidate.absolute())
    if path.is_dir():
        raise UsageError(f"{name} is a folder without a {RECIPE_YAML}", "give the folder of a recipe, or its file")
    hint = suggest(name, recipe_names(), "list them with mptrain list recipes, or give the path of your own")
    raise UsageError(f"there is no recipe '{show(name)}'", hint)


def check_own_words(recipe: Recipe, words: Sequence[str]) -> tuple[list[str], str]:
    """Check the overrides that the user adds on the command line to all runs of a recipe.

    Args:
        recipe: The recipe.
        words: The overrides of the command line, each ``KEY=VALUE``.

    Returns:
        The overrides without ``run.root``, and the value of ``run.root`` (default ``outputs``).

    Raises:
        ConfigError: If an override has several values, or sets a key that the recipe sets or varies.
    """
    kept: list[str] = []
    problems: list[Problem] = []
    root = "outputs"
    varied = _varied(recipe)
    for word in words:
        override, problem = parse(word)
        if override is None:
            problems.append(problem or Problem(f"'{show(word)}' cannot be read"))
        elif override.is_sweep_override():
            hint = "give one value: only the arms of a recipe vary keys"
            problems.append(Problem(f"{show(word)}: several values for one key", hint))
        elif override.key_or_group == "run.root":
            root = str(override.value())
        elif (key := override.key_or_group.split(".")[0]) in ("run", "seed", "hydra"):
            hint = "set run.root=DIR for another folder" if key == "run" else "copy the recipe to change them"
            problems.append(Problem(f"'{show(word)}' has no effect here: {RESERVED[key]}", hint))
        elif override.key_or_group in varied:
            problems.append(
                Problem(
                    f"'{show(word)}': {recipe.name} varies {override.key_or_group}",
                    "copy the recipe to change its arms",
                )
            )
        else:
            kept.append(word)
    if problems:
        raise ConfigError(problems)
    return kept, root


def _varied(recipe: Recipe) -> set[str]:
    """Return the keys and config groups that the arms or groups of a recipe set, or the run that they start from."""
    words = [word for own in (*recipe.full_arms.values(), recipe.start) for word in own]
    words += ["model.weights=start"] if recipe.start else []
    return {override.key_or_group for word in words if (override := parse(word)[0]) is not None}


def start_of(recipe: Recipe, words: Sequence[str] = (), *, smoke: bool = False) -> Point:
    """Return the run whose weights a recipe's other runs start from, the only point of a sweep.

    ``words`` and ``smoke`` are those of `recipe_points`.
    """
    short = recipe.smoke if smoke else ()
    return Point(0, (*recipe.base, *recipe.start, *short, f"seed={recipe.seeds[0]}", *words), ("start",))


def recipe_points(
    recipe: Recipe, words: Sequence[str] = (), *, weights: Path | None = None, smoke: bool = False
) -> list[Point]:
    """Return the runs of a recipe as points of a sweep: each arm (configuration) of each group with each seed.

    Args:
        recipe: The recipe.
        words: Further overrides of every run. They are applied last.
        weights: The run whose weights they start from, if the recipe has one (`start_of`); None to leave it out.
        smoke: Whether to make short runs of one seed, which only check that everything works.
    """
    short = recipe.smoke if smoke else ()
    seeds = recipe.seeds[:1] if smoke else recipe.seeds
    if recipe.start and weights is not None:
        words = [*words, f"model.weights={quoted(str(weights))}"]
    runs = [(arm, own, f"seed={seed}") for arm, own in recipe.full_arms.items() for seed in seeds]
    return [
        Point(number, (*recipe.base, *own, *short, seed, *words), (*own, seed), arm=arm, count=len(runs))
        for number, (arm, own, seed) in enumerate(runs)
    ]


def require_same_arms(sweep: Sweep, points: Sequence[Point]) -> None:
    """Check that the runs in a folder belong to the same version of a recipe with the same overrides.

    Args:
        sweep: The sweep in the folder.
        points: The points (one for each run) to run there.

    Raises:
        ConfigError: If arms (configurations) are new, removed or changed. The message names them.
    """
    before, now = _arms((job.arm, job.overrides) for job in sweep.jobs), _arms((p.arm, p.overrides) for p in points)
    changes = [f"{arm} is new" for arm in now if arm not in before]
    changes += [f"{arm} was removed" for arm in before if arm not in now]
    changes += [f"{arm} has other overrides or seeds" for arm in now if arm in before and before[arm] != now[arm]]
    if changes:
        raise ConfigError(
            f"{sweep.folder} holds runs of another version of this recipe or other overrides: {'; '.join(changes)}",
            f"to start over: remove or rename {sweep.folder}, or add run.root=DIR",
        )


def _arms(jobs: Any) -> dict[str, list[tuple[str, ...]]]:
    arms: dict[str, list[tuple[str, ...]]] = {}
    for arm, words in jobs:
        arms.setdefault(arm, []).append(tuple(words))
    return arms
