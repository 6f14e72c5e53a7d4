"""``mptrain reproduce NAME``: runs a recipe, prints what it found and whether that is what its claim says."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mptrain.cli.flags import read_jobs
from mptrain.cli.messages import checking, colourful, each_warning_once, printable, say, warn
from mptrain.cli.rows import print_rows, width_of
from mptrain.config import location
from mptrain.errors import EXIT_EXPECTATION, EXIT_OK, EXIT_SWEEP, UsageError, did_you_mean
from mptrain.recipe.catalogue import RECIPE_YAML, check_own_words, find_recipe, recipe_names, recipe_points

if TYPE_CHECKING:
    from mptrain.comparison.results import Comparison
    from mptrain.recipe.recipe import Recipe
    from mptrain.recipe.reproduction import Numbers, RecipeVerdict, Reproduction
    from mptrain.runlog.sweeps import Sweep

_FLAGS = ("--dry-run", "--smoke", "--jobs", "--config-dir", "--help", "--traceback")
_COLOURS = {"met": "32", "not met": "31", "undecided": "33", "REPRODUCED": "32", "NOT REPRODUCED": "31"}

#: Stands before the numbers of an expectation, under its text.
_BELOW = " " * 13


@dataclass(frozen=True)
class Wanted:
    """What the words after ``reproduce`` ask for."""

    name: str
    words: tuple[str, ...]
    dry_run: bool
    smoke: bool
    jobs: int
    config_dirs: tuple[str, ...]


def reproduce(words: Sequence[str]) -> int:
    """Runs a recipe, or prints what it would run.

    Returns:
        0 where everything was found as expected, or nothing was to be judged; 5 where not; 7 where a run failed for
        other reasons than numerics; 130 or 75 where a signal ended it.

    Raises:
        MptrainError: The command line, the recipe or a run of it is wrong, or cannot be run here: then nothing is run.
    """
    wanted = read_words(words)
    recipe = find_recipe(wanted.name)
    own, root = check_own_words(recipe, wanted.words)
    if wanted.dry_run:
        _require_keys(recipe, own, wanted.config_dirs, smoke=wanted.smoke)
        _print_plan(recipe, own, root, wanted.config_dirs, smoke=wanted.smoke)
        return EXIT_OK
    from mptrain.cli.job import PROGRAM
    from mptrain.recipe.reproduction import prepare

    with each_warning_once():
        with checking(len(recipe_points(recipe, own, smoke=wanted.smoke))):
            ready = prepare(recipe, own, root, PROGRAM, smoke=wanted.smoke, config_dirs=wanted.config_dirs)
        warn(sentence for point in ready.points for sentence in point.warnings)
        return _reproduce(ready, wanted.jobs)


def read_words(words: Sequence[str]) -> Wanted:
    """The words after ``reproduce``, sorted.

    Raises:
        UsageError: No name, two of them, or an unknown flag.
    """
    names: list[str] = []
    own: list[str] = []
    folders: list[str] = []
    given: set[str] = set()
    jobs, rest = 1, list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in ("--jobs", "--config-dir", "-cd"):
            if not equals and not rest:
                raise UsageError(f"{flag} needs a value", f"write {flag} {'2' if flag == '--jobs' else 'DIR'}")
            value = value if equals else rest.pop(0)
            if flag == "--jobs":
                jobs = read_jobs(value)
            else:
                folders.append(value)
        elif word in ("--dry-run", "--smoke"):
            given.add(word)
        elif word.startswith("-"):
            guess = did_you_mean(flag, _FLAGS)
            raise UsageError(
                f"unknown option '{word}'", f"did you mean {guess}?" if guess else f"there is {', '.join(_FLAGS)}"
            )
        elif equals or word.startswith("~"):
            own.append(word)
        else:
            names.append(word)
    if not names:
        raise UsageError("reproduce needs the name of a recipe", f"there is {', '.join(recipe_names())}")
    if len(names) > 1:
        raise UsageError(f"reproduce runs one recipe at a time, but there is '{names[1]}' too", "run one after another")
    return Wanted(names[0], tuple(own), "--dry-run" in given, "--smoke" in given, jobs, tuple(folders))


def cost(recipe: Recipe) -> str:
    """What running a recipe takes, in words."""
    needs = recipe.needs
    minutes = (
        "under a minute" if needs.minutes < 1 else f"about {needs.minutes:g} minute{'s' if needs.minutes > 1 else ''}"
    )
    if needs.minutes > 120:
        minutes = f"about {needs.minutes / 60:,.0f} hours"
    where = "on the GPU that it needs" if needs.gpu == "required" else "on 2 CPU cores"
    return f"{minutes} {where}" + ("" if needs.data == "none" else f"; data: {needs.data}")


def _require_keys(recipe: Recipe, own: Sequence[str], config_dirs: Sequence[str], *, smoke: bool) -> None:
    """Refuse unknown keys of the command line and of a recipe of the user's, without importing torch.

    Raises:
        ConfigError: With the problems of all arms.
    """
    if own or config_dirs or not _is_ours(recipe):
        from mptrain.config.compose import Composer
        from mptrain.sweep.points import require_keys

        arms = {point.arm: point for point in recipe_points(recipe, own, smoke=smoke)}  # seeds differ in nothing else
        require_keys(list(arms.values()), Composer(config_dirs))


def _print_plan(recipe: Recipe, own: Sequence[str], root: str, config_dirs: Sequence[str], *, smoke: bool) -> None:
    """The recipe, and the plain commands that it stands for."""
    points = recipe_points(recipe, own, smoke=smoke)
    place = [f"run.root={root}"] if root != "outputs" else []
    folders = [f"--config-dir={one}" for one in config_dirs]
    commands = [shlex.join(["mptrain", *folders, *point.overrides, *place]) for point in points]
    commands += [_arithmetic_command(target.path, target.arguments) for target in recipe.arithmetic.values()]
    print_recipe(recipe, smoke=smoke)
    expected = [f"  {expectation.text}" for expectation in recipe.expectations]
    _say("\n".join(["", *commands, *(["", "expects", *expected] if expected else [])]))


def _arithmetic_command(path: str, arguments: Mapping[str, object]) -> str:
    """A line that computes an entry in any Python that has mptrain."""
    module, _, name = path.rpartition(".")
    shown = {key: json.dumps(value) if isinstance(value, str) else repr(value) for key, value in arguments.items()}
    call = f"{name}({', '.join(f'{key}={value}' for key, value in shown.items())})"
    return shlex.join(["python", "-c", f"from {module} import {name}; print({call})"])


def print_recipe(recipe: Recipe, *, smoke: bool = False, remark: str = "") -> None:
    """Prints what a recipe claims, where that comes from, and what it takes to see.

    Raises:
        StorageError: Standard output takes no more.
    """
    runs = counted(len(recipe_points(recipe, smoke=smoke)))
    rows = [("claim", recipe.claim), ("source", recipe.source), ("cost", f"{runs}{remark}; {cost(recipe)}")]
    print_rows(f"{recipe.name}: {recipe.title}", rows, sys.stdout)


def counted(runs: int) -> str:
    """``12 runs``."""
    return f"{runs} run{'' if runs == 1 else 's'}"


def _reproduce(ready: Reproduction, jobs: int) -> int:
    from mptrain.recipe.reproduction import compute, measured, other_circumstances, plan, require_measures

    recipe = ready.recipe
    numbers = compute(recipe)
    require_measures(ready, {}, numbers)
    sweep = plan(ready, jobs)
    before = sum(map(sweep.has_ended, sweep.jobs))
    print_recipe(recipe, smoke=ready.smoke, remark=f", {before} of them have ended before" if before else "")
    _say(f"recipe={sweep.folder}")
    if before:
        warn(other_circumstances(sweep))
    if before < len(sweep.jobs):
        sweep, code = _run(ready, sweep)
        if not all(map(sweep.has_ended, sweep.jobs)):
            return _unfinished(ready, sweep, code)
    runs = measured(sweep)
    require_measures(ready, runs, numbers)
    if ready.smoke:
        from mptrain.report import write_report

        written = write_report(sweep.folder)
        _say(f"smoke: {_how_they_ended(sweep)}; expectations are not judged on shortened runs")
        _say(f"report={written.html}")
        return EXIT_OK
    return _conclude(ready, sweep, numbers)


def _how_they_ended(sweep: Sweep) -> str:
    """Say how many runs are done, and which failed by their numerics: that is a finding, and no run to be repeated."""
    failed = [job for job in sweep.jobs if job.status == "failed"]
    done = f"{len(sweep.jobs) - len(failed)} of {counted(len(sweep.jobs))} done"
    if not failed:
        return done
    arms = ", ".join(dict.fromkeys(printable(job.arm) for job in failed))
    return f"{done}, {len(failed)} failed by {'its' if len(failed) == 1 else 'their'} numerics ({arms})"


def _run(ready: Reproduction, sweep: Sweep) -> tuple[Sweep, int]:
    from mptrain.cli.job import PROGRAM
    from mptrain.cli.sweep_watch import watching
    from mptrain.sweep.processes import warm_up
    from mptrain.sweep.runner import run_sweep

    warm_up(PROGRAM.modules)
    with watching(sweep) as watch:
        return run_sweep(sweep, ready.composer, PROGRAM, watch)


def _unfinished(ready: Reproduction, sweep: Sweep, code: int) -> int:
    """Says which runs there is no verdict without."""
    from mptrain.cli.sweep_outcome import print_outcome

    print_outcome(sweep)
    missing = [job for job in sweep.jobs if not sweep.has_ended(job)]
    flags = [*(["--smoke"] if ready.smoke else []), *(f"--config-dir={one}" for one in ready.config_dirs)]
    root = ready.folder.parent.parent
    words = [*ready.words, *([f"run.root={root}"] if str(root) != "outputs" else [])]
    again = shlex.join(["mptrain", "reproduce", _name_of(ready.recipe), *words, *flags])
    _say(f"\nno verdict: {len(missing)} of {len(sweep.jobs)} runs did not end\nto run the rest: {again}")
    return code or EXIT_SWEEP


def _name_of(recipe: Recipe) -> str:
    """How the recipe is named on a command line."""
    return recipe.name if _is_ours(recipe) else str(recipe.path)


def _is_ours(recipe: Recipe) -> bool:
    """It is one of those that come with mptrain."""
    return recipe.path == location.recipes() / recipe.name / RECIPE_YAML


def _conclude(ready: Reproduction, sweep: Sweep, numbers: Numbers) -> int:
    from mptrain.cli.comparison_table import print_comparison
    from mptrain.recipe.reproduction import decide, measured, write_verdict
    from mptrain.report import write_report
    from mptrain.sweep.comparisons import judge

    comparisons: dict[str, Comparison] = {}
    if sweep.jobs:
        comparisons = judge(sweep)
    verdict = decide(ready.recipe, measured(sweep), numbers, comparisons)
    write_verdict(ready, verdict, numbers)
    written = write_report(sweep.folder)  # first: whoever reads what is printed may stop reading
    for group, comparison in comparisons.items():
        _say("")
        print_comparison(comparison, group)
    _print_numbers(numbers)
    _print_verdict(verdict, ready.words)
    _say(f"report={written.html}")
    return EXIT_EXPECTATION if verdict.word == "NOT REPRODUCED" else EXIT_OK


def _print_numbers(numbers: Numbers) -> None:
    rows = [
        (name, ", ".join(f"{measure} {value:.6g}" for measure, value in values.items()))
        for name, values in numbers.items()
    ]
    if rows:
        _say("")
        print_rows("arithmetic", rows, sys.stdout)


def _print_verdict(verdict: RecipeVerdict, words: Sequence[str]) -> None:
    if not verdict.findings:
        _say("\nnothing is expected of this recipe: its numbers are what it is for")
        return
    _say("")
    print_rows("expectations", [], sys.stdout)
    width = width_of(sys.stdout) - len(_BELOW)
    for finding in verdict.findings:
        _say(f"  {_coloured(finding.outcome, 9)}  {finding.text}")
        _say(textwrap.indent(textwrap.fill(finding.numbers, width, break_on_hyphens=False), _BELOW))
    wrong, open_ = verdict.count("not met"), verdict.count("undecided")
    total = len(verdict.findings)
    what = f"{verdict.count('met')} of {total} expectations met"
    what += (f", {wrong} not met" if wrong else "") + (f", {open_} undecided" if open_ else "")
    changed = f" with {shlex.join(words)}" if words else ""
    _say(f"\n{_coloured(verdict.word)}{changed}: {what}")


def _coloured(word: str, width: int = 0) -> str:
    text = word.ljust(width)
    return f"\x1b[1;{_COLOURS[word]}m{text}\x1b[0m" if colourful(sys.stdout) else text


def _say(text: str) -> None:
    say(text, styled=True)
