"""``mptrain reproduce NAME``: runs a recipe (a published result), prints its results, and checks its claim."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.messages import each_warning_once, print_rows, printable, say, supports_colour, waiting, warn, wrapped
from mptrain.config.catalogue import recipes_folder
from mptrain.study.recipe.catalogue import (
    RECIPE_YAML,
    check_own_words,
    find_recipe,
    recipe_points,
    start_of,
)
from mptrain.system.errors import EXIT_EXPECTATION, EXIT_OK, EXIT_SWEEP
from mptrain.system.words import counted

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.compose import Composer
    from mptrain.runlog.sweeps import Sweep
    from mptrain.study.comparison.results import RunMeasures
    from mptrain.study.recipe.recipe import Recipe
    from mptrain.study.recipe.reproduction import RecipeVerdict, Reproduction
    from mptrain.study.sweep.points import Point

_COLOURS = {"met": "32", "not met": "31", "undecided": "33", "REPRODUCED": "32", "NOT REPRODUCED": "31"}

#: Indentation of the numbers below the text of an expectation.
_BELOW = " " * 13


def reproduce(arguments: Namespace) -> int:
    """Run a recipe (the training runs that reproduce a published result) and check its claim, or print its commands.

    Args:
        arguments: Parsed command line: name of the recipe, overrides, and options such as ``--dry-run``.

    Returns:
        0 if all expectations are met or nothing is judged; 5 if an expectation is not met or undecided; 7 if a run
        failed for a reason other than numerics; 130 or 75 if a signal ended it.

    Raises:
        MptrainError: The command line, the recipe or one of its runs is invalid, or cannot be run on this machine.
            Nothing is run then.
    """
    smoke, config_dirs = arguments.smoke, tuple(arguments.config_dir)
    recipe = find_recipe(arguments.words[0])
    own, root = check_own_words(recipe, arguments.overrides)
    name = f"{recipe.name}-start"
    points = recipe_points(recipe, own, weights=Path(root) / name, smoke=smoke)
    if arguments.dry_run:
        if recipe.start:
            first = start_of(recipe, own, smoke=smoke)
            points.insert(0, replace(first, overrides=(*first.overrides, f"run.name={name}")))
        if own or config_dirs or not _is_ours(recipe):
            _require_keys(points, config_dirs)
        _print_plan(recipe, points, root, config_dirs, smoke=smoke)
        return EXIT_OK
    from mptrain.study.commands.sweep import PROGRAM
    from mptrain.study.recipe.reproduction import plan_start, prepare

    with each_warning_once():
        with waiting() as tell:
            tell(f"checking {counted(len(points), 'point')}")
            ready = prepare(recipe, own, root, PROGRAM, smoke=smoke, config_dirs=config_dirs)
        if ready.start is not None:
            say(f"first the run whose weights the others start from, in {ready.start[0]}")
            sweep, code = _run(plan_start(ready), ready.composer)
            if not all(map(sweep.has_ended, sweep.jobs)):
                return _unfinished(ready, sweep, code)
        warn(sentence for point in ready.points for sentence in point.warnings)
        return _reproduce(ready, arguments.jobs or 1)


def cost(recipe: Recipe) -> str:
    """Describe the cost of running a recipe: ``about 5 minutes on 2 CPU cores; data: CIFAR-10``."""
    needs = recipe.needs
    minutes = f"about {needs.minutes:g} minute{'s' if needs.minutes > 1 else ''}"
    if needs.minutes < 1:
        minutes = "under a minute"
    elif needs.minutes > 120:
        minutes = f"about {needs.minutes / 60:,.0f} hours"
    where = "on the GPU that it needs" if needs.gpu == "required" else "on 2 CPU cores"
    return f"{minutes} {where}" + ("" if needs.data == "none" else f"; data: {needs.data}")


def _require_keys(points: Sequence[Point], config_dirs: Sequence[str]) -> None:
    """Reject unknown keys of the command line and of a user's recipe, without importing torch.

    Raises:
        ConfigError: There are unknown keys; the error lists the problems of all arms.
    """
    from mptrain.config.compose import Composer
    from mptrain.study.sweep.points import require_keys

    arms = {point.arm: point for point in points}  # one point of each arm; the others differ only in their seeds
    require_keys(list(arms.values()), Composer(config_dirs))


def _print_plan(recipe: Recipe, points: Sequence[Point], root: str, config_dirs: Sequence[str], *, smoke: bool) -> None:
    """Print the recipe and the plain commands that it consists of."""
    root_override = [f"run.root={root}"] if root != "outputs" else []
    folders = [f"--config-dir={config_dir}" for config_dir in config_dirs]
    commands = [shlex.join(["mptrain", *folders, *point.overrides, *root_override]) for point in points]
    print_recipe(recipe, smoke=smoke)
    expected = [f"  {expectation.text}" for expectation in recipe.expectations]
    say("\n".join(["", *commands, *(["", "expectations", *expected] if expected else [])]))


def print_recipe(recipe: Recipe, *, smoke: bool = False, remark: str = "") -> None:
    """Print the claim, the source (publication) and the cost of a recipe.

    Args:
        recipe: The recipe.
        smoke: Whether its runs are shortened to a smoke test; changes their number.
        remark: Text after the number of runs; may be empty.

    Raises:
        StorageError: Standard output cannot be written.
    """
    runs = counted(len(recipe_points(recipe, smoke=smoke)), "run")
    runs += " and one whose weights they start from" if recipe.start else ""
    rows = [("claim", recipe.claim), ("source", recipe.source), ("cost", f"{runs}{remark}; {cost(recipe)}")]
    print_rows(f"{recipe.name}: {recipe.title}", rows)


def _reproduce(ready: Reproduction, jobs: int) -> int:
    from mptrain.study.recipe.reproduction import measured, other_circumstances, plan, require_measures

    recipe = ready.recipe
    sweep = plan(ready, jobs)
    before = sum(map(sweep.has_ended, sweep.jobs))
    print_recipe(recipe, smoke=ready.smoke, remark=f", {before} of them already finished" if before else "")
    say(f"recipe={sweep.folder}")
    if before:
        warn(other_circumstances(sweep))
    if before < len(sweep.jobs):
        sweep, code = _run(sweep, ready.composer)
        if not all(map(sweep.has_ended, sweep.jobs)):
            return _unfinished(ready, sweep, code)
    runs = measured(sweep)
    require_measures(recipe, runs)
    if ready.smoke:
        from mptrain.report.html_and_markdown import write_report

        written = write_report(sweep.folder)
        say(f"smoke: {_how_they_ended(sweep)}; expectations are not checked on shortened runs")
        say(f"report={written.html}")
        return EXIT_OK
    return _conclude(ready, sweep, runs)


def _run(sweep: Sweep, composer: Composer) -> tuple[Sweep, int]:
    from mptrain.study.commands.sweep import PROGRAM
    from mptrain.study.commands.sweep_display import watching
    from mptrain.study.sweep.processes import warm_up
    from mptrain.study.sweep.runner import run_sweep

    warm_up(PROGRAM.modules)
    with watching(sweep) as watch:
        return run_sweep(sweep, composer, PROGRAM, watch)


def _how_they_ended(sweep: Sweep) -> str:
    """Count the runs that are done and those that failed by their numerics, which are results and are not repeated."""
    failed = [job for job in sweep.jobs if job.status == "failed"]
    done = f"{len(sweep.jobs) - len(failed)} of {counted(len(sweep.jobs), 'run')} done"
    if not failed:
        return done
    arms = ", ".join(dict.fromkeys(printable(job.arm) for job in failed))
    return f"{done}, {len(failed)} failed because of {'its' if len(failed) == 1 else 'their'} numerics ({arms})"


def _unfinished(ready: Reproduction, sweep: Sweep, code: int) -> int:
    """Print the unfinished runs and the command that runs the rest."""
    from mptrain.study.commands.sweep_display import print_outcome

    print_outcome(sweep)
    missing = [job for job in sweep.jobs if not sweep.has_ended(job)]
    flags = [*(["--smoke"] if ready.smoke else []), *(f"--config-dir={config_dir}" for config_dir in ready.config_dirs)]
    root = ready.folder.parent.parent
    name = ready.recipe.name if _is_ours(ready.recipe) else str(ready.recipe.path)
    words = [*ready.words, *([f"run.root={root}"] if str(root) != "outputs" else [])]
    again = shlex.join(["mptrain", "reproduce", name, *words, *flags])
    say(f"\nno verdict: {len(missing)} of {len(sweep.jobs)} runs did not finish\nto run the rest: {again}")
    return code or EXIT_SWEEP


def _is_ours(recipe: Recipe) -> bool:
    """Return whether a recipe is included in mptrain."""
    return recipe.path == recipes_folder() / recipe.name / RECIPE_YAML


def _conclude(ready: Reproduction, sweep: Sweep, runs: dict[str, list[RunMeasures]]) -> int:
    from mptrain.cli.blocks import print_blocks
    from mptrain.report.html_and_markdown import write_report
    from mptrain.report.page import Section
    from mptrain.study.commands.compare import print_comparison
    from mptrain.study.pages.comparison_blocks import groups_table
    from mptrain.study.recipe.reproduction import decide_recipe, write_verdict
    from mptrain.study.sweep.comparisons import judge_sweep

    comparisons = judge_sweep(sweep)
    verdict = decide_recipe(ready.recipe, runs, comparisons)
    write_verdict(ready, verdict)
    written = write_report(sweep.folder)  # before printing, which may raise BrokenPipeError
    for group, comparison in comparisons.items():
        say("")
        print_comparison(comparison, group)
    if len(comparisons) > 1:
        print_blocks(Section("\nall groups", (groups_table(comparisons),)))
    _print_verdict(verdict, ready.words)
    say(f"report={written.html}")
    return EXIT_EXPECTATION if verdict.word == "NOT REPRODUCED" else EXIT_OK


def _print_verdict(verdict: RecipeVerdict, words: Sequence[str]) -> None:
    if not verdict.findings:
        say("\nthis recipe has no expectations; it only reports numbers")
        return
    say("")
    print_rows("expectations", [])
    for finding in verdict.findings:
        say(f"  {_coloured(finding.outcome, 9)}  {finding.text}", styled=True)
        say("\n".join(wrapped(finding.numbers, _BELOW, indent=_BELOW)))
    counts = [f"{count} {word}" for word in ("not met", "undecided") if (count := verdict.count(word))]
    met = f"{verdict.count('met')} of {len(verdict.findings)} expectations met"
    changed = f" with {shlex.join(words)}" if words else ""
    say(f"\n{_coloured(verdict.word)}{changed}: {', '.join([met, *counts])}", styled=True)


def _coloured(word: str, width: int = 0) -> str:
    text = word.ljust(width)
    return f"\x1b[1;{_COLOURS[word]}m{text}\x1b[0m" if supports_colour(sys.stdout) else text
