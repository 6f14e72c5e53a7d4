"""Recipes as work: finds them, lists them, and makes the points of a sweep of one.

Runs nothing and imports no torch; how a recipe is run and judged is in `mptrain.recipe.reproduction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.config import location
from mptrain.config.overrides import parse
from mptrain.config.value_checks import show
from mptrain.errors import ConfigError, Problem, UsageError, did_you_mean
from mptrain.recipe.recipe import RESERVED, read_recipe
from mptrain.sweep.points import Point

if TYPE_CHECKING:
    from mptrain.recipe.recipe import Recipe
    from mptrain.runlog.sweeps import Sweep

RECIPE_YAML = "recipe.yaml"


def recipe_names() -> list[str]:
    """The recipes that come with mptrain, by name; none is read."""
    return sorted(path.parent.name for path in location.recipes().glob(f"*/{RECIPE_YAML}"))


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or by the path of its folder or file.

    Raises:
        UsageError: There is none.
        ConfigError: It is wrong; with all problems.
    """
    path = Path(name).expanduser()
    if "/" not in name and name in recipe_names():
        return read_recipe(location.recipes() / name / RECIPE_YAML)
    for candidate in (path / RECIPE_YAML, path):
        if candidate.is_file():
            return read_recipe(candidate.absolute())
    if path.is_dir():
        raise UsageError(f"{name} is a folder without a {RECIPE_YAML}", "name the folder of a recipe, or its file")
    guess = did_you_mean(name, recipe_names())
    hint = f"did you mean {guess}?" if guess else "mptrain list recipes shows them; or give the path of your own"
    raise UsageError(f"there is no recipe '{show(name)}'", hint)


def check_own_words(recipe: Recipe, words: Sequence[str]) -> tuple[list[str], str]:
    """Return what the user changes in every run of a recipe, and where it is run.

    Args:
        recipe: Of which.
        words: Of the command line.

    Returns:
        The words without ``run.root``, and its value; ``outputs`` where it is not among them.

    Raises:
        ConfigError: A word has several values, or sets what the recipe itself decides or varies.
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
            problems.append(Problem(f"{show(word)}: several values for one key", "a recipe varies what its arms vary"))
        elif override.key_or_group == "run.root":
            root = str(override.value())
        elif (key := override.key_or_group.split(".")[0]) in ("run", "seed", "hydra"):
            hint = "choose run.root=DIR for another place" if key == "run" else "copy the recipe to change them"
            problems.append(Problem(f"'{show(word)}' has no effect here: {RESERVED[key]}", hint))
        elif override.key_or_group in varied:
            problems.append(
                Problem(
                    f"'{show(word)}': {override.key_or_group} is what {recipe.name} varies",
                    "copy the recipe to change its arms",
                )
            )
        else:
            kept.append(word)
    if problems:
        raise ConfigError(problems)
    return kept, root


def _varied(recipe: Recipe) -> set[str]:
    """The keys and groups that arms or groups of arms set."""
    words = [word for own in recipe.full_arms.values() for word in own]
    return {override.key_or_group for word in words if (override := parse(word)[0]) is not None}


def recipe_points(recipe: Recipe, words: Sequence[str] = (), *, smoke: bool = False) -> list[Point]:
    """Every run of a recipe: each arm of each group, seed by seed.

    Args:
        recipe: Of which.
        words: Further words of every run; they have the last word.
        smoke: Short runs of one seed.
    """
    short = recipe.smoke if smoke else ()
    seeds = recipe.seeds[:1] if smoke else recipe.seeds
    runs = [(arm, own, f"seed={seed}") for arm, own in recipe.full_arms.items() for seed in seeds]
    return [
        Point(number, (*recipe.base, *own, *short, seed, *words), (*own, seed), arm=arm, count=len(runs))
        for number, (arm, own, seed) in enumerate(runs)
    ]


def require_same_arms(sweep: Sweep, points: Sequence[Point]) -> None:
    """Refuse to go on with runs of another version of a recipe, or of other words.

    Args:
        sweep: What the folder holds.
        points: What is to be run there.

    Raises:
        ConfigError: Names the arms that are new, gone or changed.
    """
    before, now = _arms((job.arm, job.overrides) for job in sweep.jobs), _arms((p.arm, p.overrides) for p in points)
    changes = [f"{arm} is new" for arm in now if arm not in before]
    changes += [f"{arm} is gone" for arm in before if arm not in now]
    changes += [f"{arm} has other words or seeds" for arm in now if arm in before and before[arm] != now[arm]]
    if changes:
        raise ConfigError(
            f"{sweep.folder} holds runs of this recipe as it was, or with other words: {'; '.join(changes)}",
            f"to start anew: remove or rename {sweep.folder}, or add run.root=DIR",
        )


def _arms(jobs: Any) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for arm, words in jobs:
        found.setdefault(arm, []).append(tuple(words))
    return found
